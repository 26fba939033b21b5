"""One stage of a language model as a program: weights that nobody can measure alone, and held-out text that passes through all stages."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from gossamer.peer.model.evaluation import held_out_rows
from gossamer.peer.text.corpus import Corpus
from gossamer.peer.trainer.loop_program import LoopProgram
from gossamer.peer.trainer.losses import Losses
from gossamer.peer.trainer.program import Kept
from gossamer.peer.trainer.stage_loop import StageLoop
from gossamer.peer.trainer.text_training import MOST_EVAL_TOKENS, NUM_EVAL_BATCHES


class StageProgram(LoopProgram):
    """One stage, and the text if it is the first. Its holders judge each other's weights by form alone: no stage has a loss of its own."""

    inner: StageLoop

    def __init__(self, inner: StageLoop, corpus: Corpus | None) -> None:
        super().__init__(inner, corpus)

    def losses(self) -> Losses:
        """Return a constant: a stage cannot be measured without the others."""
        return Losses((0.0,))

    def evaluation(self) -> tuple[float, int] | None:
        """Return the loss of the held-out micro-batches that came back since the last call, and send others; None at other stages."""
        if self.corpus is None:
            return None
        back = list(self.inner.held_out)
        self.inner.held_out.clear()
        self.inner.measure(held_out_rows(self.corpus, NUM_EVAL_BATCHES, MOST_EVAL_TOKENS))
        if not back:
            return None
        return math.fsum(one.loss * one.num_tokens for one in back) / sum(one.num_tokens for one in back), NUM_EVAL_BATCHES

    def outputs(self) -> Tensor | None:
        """Return None: only the last stage has outputs, and no text."""
        return None

    def new_probe(self, rng: random.Random) -> None:
        """Return None: merges are judged by their length alone."""
        return

    def kept(self) -> Kept:
        """Return also the names of micro-batches that these weights hold."""
        tensors, state = super().kept()
        return Kept(tensors, state | {"added": self.inner.added})

    def restore(self, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
        """Restore also these names."""
        super().restore(tensors, state)
        self.inner.added = state["added"]

    def forget_optimizer(self) -> None:
        """Clear the optimizer's state, and the gradient so far, which is one of other weights."""
        super().forget_optimizer()
        self.inner.forget_batch()
