"""How this machine computes a run, counted before anything is built: for a host that tries its run, and for a trainer that builds it."""

from __future__ import annotations

from pathlib import Path

import torch
from torch.utils._triton import has_triton

from gossamer.optim.compiled import lack_for_triton
from gossamer.peer.machine.config import PeerConfig
from gossamer.peer.model.accelerator import choose_devices
from gossamer.peer.model.computing import Computing, compute_dtype
from gossamer.peer.trainer.need import computing_that_fits, rooms
from gossamer.protocol.errors import BadSettings
from gossamer.protocol.run.manifest import Manifest, StagedManifest


def need_fit(manifest: Manifest, config: PeerConfig, payloads: Path, held_bytes: int) -> None:
    """Raise BadSettings, with the sum and what would fit, for a run that the settings or the machine leave no room for."""
    if isinstance(manifest, StagedManifest):
        stages_here(manifest, config, payloads, held_bytes)
    else:
        computing_here(manifest, config, payloads, held_bytes)


def computing_here(manifest: Manifest, config: PeerConfig, payloads: Path, held_bytes: int) -> Computing:
    """Return how a peer with these settings computes a whole model. Raises as `need_fit`.

    `payloads`: the folder of its payloads; `held_bytes`: the memory that it already holds.
    """
    devices, _ = choose_devices(config.devices)
    compiles = _can_compile(devices[0]) if config.compile is None else config.compile
    dtype = compute_dtype(manifest.inner.precision, devices[0])
    wanted = Computing(dtype, config.micro_batch, config.recompute, compiles, len(devices), config.optimizer_on_host)
    return computing_that_fits(manifest, devices[0].type, rooms(devices, config, payloads, held_bytes), wanted)


def _can_compile(device: torch.device) -> bool:
    return device.type != "cpu" and has_triton() and not lack_for_triton(device)


def stages_here(manifest: StagedManifest, config: PeerConfig, payloads: Path, held_bytes: int) -> dict[int, Computing]:
    """Return the stages that a peer with these settings can hold, from 0, and how it computes each. Raises as `need_fit`."""
    from gossamer.peer.trainer.stage_need import fitting_stages  # a run without stages loads nothing of them

    devices, _ = choose_devices(config.devices)
    if len(devices) > 1:
        raise BadSettings("a stage is trained on one device", hint="start a peer with its own --home for each device")
    dtype, rows = compute_dtype(manifest.inner.precision, devices[0]), manifest.stages.micro_batch
    wanted = Computing(dtype, rows, config.recompute, bool(config.compile), optimizer_on_host=config.optimizer_on_host)
    return fitting_stages(manifest, devices[0].type, rooms(devices, config, payloads, held_bytes), wanted, config.stage)
