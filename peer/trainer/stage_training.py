"""One stage of a language model as a program: weights that nobody can measure alone, and held-out text that passes through all stages."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, Final

from torch import Tensor

from gossamer.peer.link import messages
from gossamer.peer.link.payload_folder import PayloadFolder
from gossamer.peer.link.socket import TrainerEnd
from gossamer.peer.machine.events import Event
from gossamer.peer.model.evaluation import held_out_rows
from gossamer.peer.trainer.exchange import TrainerExchange
from gossamer.peer.trainer.hop_queue import HopQueue
from gossamer.peer.trainer.loop_program import LoopProgram
from gossamer.peer.trainer.losses import MOST_EVAL_TOKENS, NUM_EVAL_BATCHES, Losses
from gossamer.peer.trainer.program import Kept
from gossamer.peer.trainer.replica import ALONE, Replica
from gossamer.peer.trainer.stage_loop import StageLoop
from gossamer.peer.trainer.stopwatch import InnerStep
from gossamer.peer.trainer.text_training import TextReplica
from gossamer.protocol.messages.messages import RunPhase
from gossamer.protocol.messages.terms import TOKEN_BYTES, ModelPlan

RESTS: Final = "this peer trains nothing now"


class StageProgram(LoopProgram):
    """One stage, and the text if it is the first. Its holders judge each other's weights by form alone: no stage has a loss of its own."""

    inner: StageLoop

    def losses(self) -> Losses:
        """Return a constant: a stage cannot be measured without the others."""
        return Losses((0.0,))

    def evaluation(self) -> tuple[float, int] | None:
        """Return the loss of the held-out micro-batches that came back since the last call, and send others; None at other stages."""
        if self.corpus is None:
            return None
        back = list(self.inner.held_out)
        self.inner.held_out.clear()
        most_tokens = max(MOST_EVAL_TOKENS, self.inner.terms.token_bytes // TOKEN_BYTES)  # a whole micro-batch at least
        self.inner.measure(held_out_rows(self.corpus, NUM_EVAL_BATCHES, most_tokens))
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
        """Return also the names of micro-batches that these weights hold, and the next window of the text."""
        tensors, state = super().kept()
        return Kept(tensors, state | {"added": self.inner.added, "window": self.inner.next_window})

    def restore(self, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
        """Restore also these."""
        super().restore(tensors, state)
        self.inner.added = state["added"]
        self.inner.next_window = state.get("window", 0)  # a checkpoint of before this number has none

    def forget_optimizer(self) -> None:
        """Clear the optimizer's state, and the gradient so far, which is one of other weights."""
        super().forget_optimizer()
        self.inner.forget_batch()


class StageReplica(TextReplica):
    """A replica of one stage."""

    program: StageProgram

    def inner_step(self, beside: AbstractContextManager[None] = ALONE) -> InnerStep | None:
        """Make an inner step; see TextReplica.inner_step."""
        self.program.inner.global_step = self.global_step
        return super().inner_step(beside)

    @property
    def last_step(self) -> int:
        """The last global step of own training: a stage after the first serves the lower one until that has ended, and its node says so."""
        return super().last_step - (self.program.corpus is None)

    @property
    def num_gathered(self) -> int:
        """The tokens of the micro-batches that have come back since the last step."""
        return self.program.inner.num_tokens

    @property
    def plan(self) -> ModelPlan:
        """The sizes on the wire, those of hops too."""
        return replace(super().plan, stage=self.program.inner.terms, next_state_bytes=self.program.inner.next_state_bytes)


class StagedExchange(TrainerExchange):
    """The exchange of a trainer that holds a stage: requests about hops go to its loop, which returns for everything else."""

    def __init__(
        self,
        link: TrainerEnd,
        payloads: PayloadFolder,
        replica: Replica,
        emit: Callable[[Event], None],
        rng: random.Random,
        hops: HopQueue,
        fits: tuple[int, ...],
    ) -> None:
        super().__init__(link, payloads, replica, emit, rng)
        self._hops, self.fits = hops, fits

    def at_boundary(self) -> Iterator[messages.Start | messages.FinishDone | messages.Adopted | messages.WriteResult | messages.Adopt]:
        """Carry out what waits for a step boundary; see TrainerExchange. While nothing is trained, hops are declined: others take them."""
        if not (self.has_begun and self._replica.phase is RunPhase.TRAIN):
            self._hops.decline_all(RESTS)
        return super().at_boundary()

    def _is_done_now(self, request: messages.Request) -> bool:
        if not isinstance(request, messages.HopRequest):
            return super()._is_done_now(request)
        self._hops.put(request, self._read_session)
        return True

    def _keep(self, item: messages.Request | int) -> None:
        super()._keep(item)
        if isinstance(item, int):
            self._hops.clear()
        self._hops.interrupt()

    def _carry_out(self, request: messages.Request) -> messages.Reply | None:
        if isinstance(request, messages.FollowClock):
            if request.is_unlimited:
                self._replica.set_global_step(max(self._replica.global_step, request.global_step))
            else:
                self._replica.follow_clock(request.global_step)
            return None
        return super()._carry_out(request)
