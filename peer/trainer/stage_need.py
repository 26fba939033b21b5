"""What each stage of a run needs of a machine, and which stages fit."""

from __future__ import annotations

from typing import Final

from gossamer.peer.model.computing import Computing
from gossamer.peer.model.model import activation_bytes, model_config, need_layout, parameter_shapes
from gossamer.peer.model.stages import Cut, manifest_cuts, stage_shapes
from gossamer.peer.trainer.need import VALUE_BYTES, Need, Rooms, model_need, need_to_fit
from gossamer.peer.trainer.stage_loop import BATCHES_AWAY, stage_terms
from gossamer.protocol.errors import BadSettings
from gossamer.protocol.run.manifest import StagedManifest

HOPS: Final = "for micro-batches under way"
FILES_OF_VALUES: Final = 4  # of a hop: input and output, and the gradients of both
SMALLER: Final = "a run with more stages, or with a smaller model, needs less memory of each peer"


def stage_need(manifest: StagedManifest, cut: Cut, device: str, computing: Computing) -> Need:
    """Count what a holder of this stage needs on one device of this kind. Raises BadManifest for a model that cannot be cut."""
    terms = stage_terms(manifest, cut)
    hops = BATCHES_AWAY * terms.in_batch * (terms.token_bytes + FILES_OF_VALUES * terms.value_bytes)
    return model_need(manifest, stage_shapes(manifest.model, cut), device, computing, _activations(manifest, cut, computing), {HOPS: hops})


def fitting_stages(manifest: StagedManifest, device: str, there: Rooms, computing: Computing) -> tuple[int, ...]:
    """Return the stages that fit into these rooms. Raises BadSettings, with the sum of each stage, if none does."""
    need_layout(manifest.model, parameter_shapes(manifest.model))
    fitting, refusals = [], []
    for cut in manifest_cuts(manifest):
        try:
            need_to_fit(stage_need(manifest, cut, device, computing), there)
            fitting.append(cut.stage)
        except BadSettings as error:
            refusals.append(f"stage {cut.stage + 1} of {len(cut.blocks)}: {error}")
    if not fitting:
        raise BadSettings("no stage of this run fits. " + " ".join(refusals), hint=SMALLER)
    return tuple(fitting)


def _activations(manifest: StagedManifest, cut: Cut, computing: Computing) -> int:
    """Return the bytes that the backward pass of one micro-batch needs beside the weights of a stage.

    They follow from those of the whole model, with and without recomputed blocks: blocks are alike, and outside of them is the head.
    """
    rows, length, num_blocks = manifest.stages.micro_batch, manifest.inner.sequence_length, sum(cut.blocks)
    kept, recomputed = (activation_bytes(manifest.model, rows, length, computing.dtype, recompute) for recompute in (False, True))
    hidden = VALUE_BYTES * rows * length * int(model_config(manifest.model).get_text_config().hidden_size)
    block = (kept - recomputed + num_blocks * hidden) // (num_blocks - 1)
    outside = kept - num_blocks * block if cut.is_last else FILES_OF_VALUES * hidden
    return outside + (len(cut.span) * hidden + block if computing.recompute else len(cut.span) * block)
