"""What `peer doctor` examines. Facts that several checks need are computed once, in the first thread that asks."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from gossamer.peer.doctor.machine_checks import compute_in_child
from gossamer.peer.doctor.visit import Call, CallRound, Place, visit
from gossamer.peer.machine.config import LocalSettings
from gossamer.peer.machine.held_manifest import held_manifest
from gossamer.peer.machine.held_stage import held_stage
from gossamer.peer.machine.home import Home
from gossamer.peer.machine.port import free_port, kept_port
from gossamer.peer.machine.room import Room, held_bytes, home_room, memory_room
from gossamer.peer.machine.runtime_folder import PAYLOAD_BYTES, place_for
from gossamer.peer.machine.units import rate_bytes_per_s
from gossamer.protocol.errors import BadSettings, GossamerError
from gossamer.protocol.identity import Identity
from gossamer.protocol.run.invite import Invite
from gossamer.protocol.run.layout import by_name
from gossamer.protocol.run.manifest import AnyManifest, Manifest, SignedManifest, StagedManifest

if TYPE_CHECKING:
    from gossamer.peer.trainer.need import Need
    from gossamer.peer.trainer.stage_need import StageEstimate

DEFAULT_HOST = "0.0.0.0"  # noqa: S104 - as a peer listens

T = TypeVar("T")


def cached(work: Callable[[], T]) -> Callable[[], T]:
    """Return a function that computes `work` on its first call; later calls return the result or raise the same error. Thread-safe."""
    future: Future[T] = Future()
    working = threading.Lock()

    def result() -> T:
        with working:
            if not future.done():
                try:
                    future.set_result(work())
                except Exception as error:
                    future.set_exception(error)
        return future.result()

    return result


class Case:
    """The subject of one examination: home, invite if given, and the settings of a peer that would start here."""

    def __init__(
        self, home: Home, invite_text: str | None, settings: LocalSettings, port: int | None, manifest: Manifest | None = None
    ) -> None:
        self.home = home
        self.settings = settings
        self.port = port  # None: the port of the last start, or any
        self._invite_text, self.given_manifest = invite_text, manifest
        self.visit = cached(self._visit)
        """The answers of the run's peers; no calls where there is no run."""
        self.need = cached(self._need)
        """What the run needs; None for a program run whose tensors are not known here."""
        self.computed = cached(lambda: compute_in_child(settings.devices))
        """How the process that computes on the device ended, and what it printed."""
        self.stages = cached(self._stages)
        """What this peer's stage, or each kind of stage, takes; empty in a run without stages."""

    @property
    def is_about_a_run(self) -> bool:
        """Whether an invite or the home names a run."""
        return self._invite_text is not None or self.given_manifest is not None or self.home.invite.exists() or self.home.manifest.exists()

    def invite(self) -> Invite | None:
        """Read the invite that was given, else that of the home; None where there is none. Raises BadInvite, WrongVersion."""
        text = self._invite_text
        if text is None and self.home.invite.exists():
            text = self.home.invite.read_text()
        return None if text is None else Invite.from_text(text)

    def held(self) -> SignedManifest | None:
        """Read the manifest in the home, None where there is none. Raises BadManifest, BadSettings."""
        return held_manifest(self.home)

    def identity(self) -> Identity | None:
        """Read the home's key, None without one; creates none. Raises BadSettings."""
        return Identity.load_or_create(self.home.identity) if self.home.identity.exists() else None

    def _need(self) -> Need | None:
        from gossamer.peer.model.accelerator import choose_devices, has_own_memory  # torch: seconds to import
        from gossamer.peer.model.weights import saved_shapes
        from gossamer.peer.trainer.need import least_need, program_need

        try:
            devices, _ = choose_devices(self.settings.devices)
            kind, count, room = devices[0].type, len(devices), self.device_room() if has_own_memory(devices[0].type) else None
        except BadSettings:  # reported by another check
            kind, count, room = "cuda", 1, None
        manifest = self.manifest()
        if isinstance(manifest, StagedManifest):
            from gossamer.peer.trainer.stage_need import least_stage_need

            return least_stage_need(manifest, kind, room)
        if isinstance(manifest, Manifest):
            return least_need(manifest, kind, room, count)
        saved = saved_shapes(self.home) if self.held() else None
        shapes = manifest.model.shapes or (by_name(saved[0]) if saved else None)
        return program_need(manifest, shapes, kind, saved[1] if saved else 0) if shapes else None

    def memory_room(self) -> Room:
        """Return the memory that the machine and the settings leave."""
        return memory_room(held_bytes(os.getpid()), self.settings.max_memory)

    def disk_room(self) -> Room:
        """Return the disk space that the machine and the settings leave the home."""
        return home_room(self.home, self.settings.max_disk)

    def device_room(self) -> Room:
        """Return the least free memory of the devices, as far as the settings allow. Raises BadSettings if one is absent."""
        from gossamer.peer.model.accelerator import choose_devices
        from gossamer.peer.trainer.need import device_room

        return device_room(choose_devices(self.settings.devices)[0], self.settings.gpu_memory)

    def payload_folder(self) -> Path:
        """Return where node and trainer would exchange payloads. Raises BadSettings if no folder has room."""
        return place_for(PAYLOAD_BYTES, self.home.path if self.home.path.exists() else None)

    def answered(self) -> list[Call]:
        """Return the calls on members of the run that answered."""
        return [call for call in self.visit().reached if call.manifest]

    def signed(self) -> SignedManifest | None:
        """Return the run's signed manifest: the home's, else one that a peer sent; None where neither is there. Raises BadManifest."""
        return self.held() or self.visit().manifest

    def manifest(self) -> AnyManifest:
        """Return the run's manifest: the home's, else one that a peer sent, else the default one. Raises BadManifest."""
        if self.given_manifest is not None:
            return self.given_manifest
        signed = self.signed()
        return signed.manifest() if signed else Manifest()

    def measured_step_s(self) -> float | None:
        """Return how long an inner step takes, as the home's peer measured it in this run; None where it has not. Raises BadManifest."""
        last = self.home.last_status()
        expected = last.get("expected_traffic") or {}
        is_of_run = last.get("run_id") == self.manifest().run_id.hex()
        return float(expected["step_s"]) if is_of_run and expected.get("is_measured") else None

    def _stages(self) -> list[StageEstimate]:
        manifest = self.manifest()
        if not isinstance(manifest, StagedManifest):
            return []
        from gossamer.peer.trainer.stage_need import estimated_stages

        return estimated_stages(manifest, None if self.given_manifest else held_stage(self.home))

    def whole_refusal(self) -> str:
        """Return why the whole model of a text run does not fit this machine; empty if it does. Raises BadSettings without the device."""
        from gossamer.peer.model.accelerator import choose_devices, has_own_memory
        from gossamer.peer.trainer.need import least_need, need_device_memory, need_memory

        manifest = self.manifest()
        assert isinstance(manifest, Manifest), "only a text run has stages"
        devices, _ = choose_devices(self.settings.devices)
        room = self.device_room() if has_own_memory(devices[0].type) else None
        need = least_need(manifest, devices[0].type, room, len(devices))
        try:
            need_memory(need, self.memory_room())
            if room is not None:
                need_device_memory(need, room)
        except BadSettings as error:
            return str(error)
        return ""

    def line_bytes_per_s(self) -> float:
        """Return the rate of the slower direction, as measured and as the settings limit it; infinite where nothing is known."""
        limits = rate_bytes_per_s(self.settings.max_upload), rate_bytes_per_s(self.settings.max_download)
        return min(*limits, *(self.visit().line or ()))

    def _visit(self) -> CallRound:
        try:
            invite, held, own = self.invite(), self.held(), self.identity()
        except (GossamerError, OSError) as error:
            return CallRound(f"nobody can be asked: {error}")
        place = Place(DEFAULT_HOST, 0)
        with suppress(BadSettings):  # reported by another check
            if self.home.holder():
                place = Place(self.settings.listen, 0, kept_port(self.home))
            else:
                place = Place(self.settings.listen, free_port(self.home, self.settings.listen, self.port))
        return visit(self.home, invite, held, own, place)
