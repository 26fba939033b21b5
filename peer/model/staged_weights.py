"""The weights of a staged run, put together from the homes of peers that hold its stages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from torch import Tensor

from gossamer.peer.machine.home import Home
from gossamer.peer.model.stages import Cut, manifest_cuts, stage_shapes
from gossamer.peer.model.weights import Show, Trained, fast_weights, load_trained, mean_weights, show_nothing, slow_weights
from gossamer.protocol.errors import BadSettings
from gossamer.protocol.messages.terms import stage_name
from gossamer.protocol.run.manifest import StagedManifest

NAME_ANOTHER: Final = "name the home of a peer that holds it: --with HOME"


@dataclass(frozen=True, slots=True)
class StagePart:
    """The stage that one home holds, with its newest checkpoint."""

    home: Home
    stage: int  # from 0
    trained: Trained


def load_parts(first: Home, trained: Trained, others: Sequence[Home], show: Show = show_nothing) -> list[StagePart]:
    """Return the stage that each home holds, with its checkpoint. Raises BadSettings for a home of another run; BadManifest."""
    manifest, parts = trained.manifest, list[StagePart]()
    assert isinstance(manifest, StagedManifest)
    cuts = manifest_cuts(manifest)
    for home, held in [(first, trained), *((home, load_trained(home, show)) for home in others)]:
        if held.manifest.run_id != manifest.run_id:
            raise BadSettings(f"{home.path} holds another run", hint="name homes of peers of the same run")
        parts.append(StagePart(home, stage_of_checkpoint(held, cuts), held))
    return parts


def whole_weights(parts: Sequence[StagePart], use_slow_weights: bool) -> list[Mapping[str, Tensor]]:
    """Return the weights of each stage by parameter, in the order of the stages; several peers' of one stage are averaged.

    The tensors lie in the files of the checkpoints, as far as nobody reads them. Raises BadSettings for a stage that nobody holds;
    BadManifest.
    """
    manifest = parts[0].trained.manifest
    assert isinstance(manifest, StagedManifest)
    cuts, held = manifest_cuts(manifest), dict[int, list[Mapping[str, Tensor]]]()
    steps = dict[int, tuple[int, int]]()  # by stage: the least and the most global step
    for part in parts:
        stage, trained, step = part.stage, part.trained, int(part.trained.checkpoint.state["clock_steps"])
        least, most = steps.get(stage, (step, step))
        steps[stage] = min(least, step), max(most, step)
        held.setdefault(stage, []).append(slow_weights(trained) if use_slow_weights else fast_weights(trained.checkpoint))
    for stage, (least, most) in steps.items():
        if most - least > manifest.outer.max_clock_gap_steps:
            raise BadSettings(
                f"homes of stage {stage + 1} are at step {least} and at step {most}: their average would be worse than either",
                hint="leave out the one that is behind",
            )
    if missing := [cut.stage + 1 for cut in cuts if cut.stage not in held]:
        raise BadSettings(f"{stage_name(missing[0], len(cuts))} is not among the given homes", hint=NAME_ANOTHER)
    return [several[0] if len(several) == 1 else mean_weights(several) for _, several in sorted(held.items())]


def stage_of_checkpoint(trained: Trained, cuts: Sequence[Cut]) -> int:
    """Return the stage, from 0, whose weights a checkpoint holds. Raises BadSettings if it is none of the run's."""
    names = fast_weights(trained.checkpoint).keys()
    section = trained.manifest.model
    for cut in cuts:
        if stage_shapes(section, cut).keys() == names:  # type: ignore[arg-type]
            return cut.stage
    raise BadSettings("the checkpoint holds no stage of this run's model", hint="use the release of the packages with which it was trained")
