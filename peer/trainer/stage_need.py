"""What each stage of a run needs of a machine, and which stages fit."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Final

from gossamer.peer.machine.room import Room
from gossamer.peer.machine.stage_line import StageLine
from gossamer.peer.model.accelerator import has_own_memory
from gossamer.peer.model.activation_memory import activation_bytes
from gossamer.peer.model.computing import Computing
from gossamer.peer.model.model import need_layout, parameter_shapes
from gossamer.peer.model.stages import Cut, manifest_cuts, stage_operations, stage_shapes
from gossamer.peer.trainer.interval import step_hop_bytes
from gossamer.peer.trainer.need import HOPS_BYTES, PROGRAMS, Need, Rooms, model_need, need_to_fit
from gossamer.peer.trainer.stage_loop import next_state_bytes, stage_terms
from gossamer.protocol.errors import BadSettings
from gossamer.protocol.limits import WINDOW
from gossamer.protocol.messages.terms import ModelPlan, StageTerms, stage_name
from gossamer.protocol.run.manifest import StagedManifest

HOPS: Final = "for micro-batches under way"
WARD: Final = "for copies of the next stage"
COPIES: Final = 2  # the last one, and the one that is being fetched
SMALLER: Final = "a run with more stages, or with a smaller model, needs less memory of each peer"


def stage_need(manifest: StagedManifest, cut: Cut, device: str, computing: Computing) -> Need:
    """Count what a holder of this stage needs on one device of this kind. Raises BadManifest for a model that cannot be cut."""
    terms, inner = stage_terms(manifest, cut), manifest.inner
    hops = min(WINDOW, terms.most_hops) * terms.files_bytes
    rows = manifest.stages.micro_batch
    left = activation_bytes(manifest.model, rows, inner.sequence_length, computing.dtype, computing.recompute, cut)
    need = model_need(manifest, stage_shapes(manifest.model, cut), device, computing, left, {HOPS: hops})
    memory = {**need.memory, PROGRAMS: need.memory[PROGRAMS] + HOPS_BYTES}
    disk = {**need.disk, WARD: COPIES * next_state_bytes(manifest, cut)}
    return replace(need, memory=memory, disk=disk, whose=stage_name(cut.stage + 1, len(cut.blocks)), less=SMALLER)


def fitting_stages(manifest: StagedManifest, device: str, there: Rooms, wanted: Computing, only: int | None = None) -> dict[int, Computing]:
    """Return the stages that fit into these rooms, from 0, each with how to compute there: as wanted, else with less memory.

    `only`: the stage that the operator wants, counted from one. Raises BadSettings, with the sum of each stage, if none fits.
    """
    need_layout(manifest.model, parameter_shapes(manifest.model))
    fitting, refusals = dict[int, Computing](), list[BadSettings]()
    for alike in _alike([cut for cut in manifest_cuts(manifest) if only in (None, cut.stage + 1)]):
        for computing in _tries(wanted, device):
            try:
                need_to_fit(stage_need(manifest, alike[0], device, computing), there)
                fitting |= dict.fromkeys((cut.stage for cut in alike), computing)
                break
            except BadSettings as error:
                refusal = error
        else:
            refusals.append(refusal)
    if not fitting and only is not None:
        raise BadSettings(str(refusals[0]), hint=f"leave out --stage, so that this peer takes a stage that fits, or {refusals[0].hint}")
    if not fitting:
        raise BadSettings("no stage of this run fits: " + "; ".join(map(str, refusals)), hint=refusals[0].hint)
    return dict(sorted(fitting.items()))


def _alike(cuts: Iterable[Cut]) -> list[list[Cut]]:
    """Return the stages in groups that need the same, with the copy of the next one: to count the needs of a large stage takes a second."""
    groups: dict[tuple[Any, ...], list[Cut]] = {}
    for cut in cuts:
        following = replace(cut, stage=(cut.stage + 1) % len(cut.blocks))
        key = tuple((one.is_first, one.is_last, len(one.span)) for one in (cut, following))
        groups.setdefault(key, []).append(cut)
    return list(groups.values())


def least_stage_need(manifest: StagedManifest, device: str, room: Room | None) -> Need:
    """Count the least that a peer needs for the smallest stage, where a device has this room. Raises BadManifest."""
    least = Computing(micro_batch=manifest.stages.micro_batch, recompute=True)

    def of(cut: Cut) -> Need:
        for computing in _tries(least, device):
            need = stage_need(manifest, cut, device, computing)
            if room is None or sum(need.device.values()) <= room.num_bytes:
                break
        return need

    return min(
        (of(alike[0]) for alike in _alike(manifest_cuts(manifest))), key=lambda need: (sum(need.device.values()), sum(need.memory.values()))
    )


@dataclass(frozen=True, slots=True)
class StageEstimate:
    """What follows from holding a stage: sizes on the wire, and the work of a token."""

    plan: ModelPlan  # with the terms of the stage
    operations: float  # for a token, recomputation included
    tokens: int  # of a micro-batch

    @property
    def name(self) -> str:
        """Return the stage in words."""
        return self._terms.name

    @property
    def _terms(self) -> StageTerms:
        assert self.plan.stage is not None
        return self.plan.stage

    def on(self, flops: float, line_bytes_per_s: float) -> StageLine:
        """Return what a line of this rate feeds of a device of so many useful operations a second."""
        sent, received = step_hop_bytes(self._terms)
        step_tokens = self._terms.in_batch * self.tokens
        return StageLine(sent / step_tokens, received / step_tokens, flops / self.operations, line_bytes_per_s)

    def step_s(self, line: StageLine) -> float:
        """Return how long an own inner step takes."""
        return self._terms.in_batch * self.tokens / line.carried_tokens_per_s


def estimated_stages(manifest: StagedManifest, held: int | None) -> list[StageEstimate]:
    """Return the stage that is held, counted from one; without one the first, a middle and the last stage. Raises BadManifest."""
    cuts = manifest_cuts(manifest)
    chosen = [cuts[held - 1]] if held is not None and held <= len(cuts) else [*dict.fromkeys((cuts[0], cuts[len(cuts) // 2], cuts[-1]))]
    length, rows = manifest.inner.sequence_length, manifest.stages.micro_batch
    least = Computing(micro_batch=rows, recompute=True)
    return [
        StageEstimate(
            replace(stage_need(manifest, cut, "cpu", least).plan, stage=stage_terms(manifest, cut)),
            stage_operations(manifest.model, cut, length),
            rows * length,
        )
        for cut in chosen
    ]


def _tries(wanted: Computing, device: str) -> list[Computing]:
    hosted = [replace(wanted, optimizer_on_host=True)] if has_own_memory(device) else []
    tries = [wanted, *hosted]
    return [*tries, *(replace(one, recompute=True) for one in tries)]
