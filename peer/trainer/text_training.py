"""The trainer's own program: a language model on text, and the loop that trains it. An ordinary user of the boundary.

All randomness follows from (run seed, peer id, step), so a restored replica continues bit for bit on the CPU.
"""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor

from gossamer.optim.inner import learning_rate
from gossamer.peer.machine.events import Event, ModelBuilt
from gossamer.peer.machine.units import rate_bytes_per_s
from gossamer.peer.model.accelerator import try_coding
from gossamer.peer.model.computing import Computing, predictions
from gossamer.peer.model.evaluation import held_out_loss
from gossamer.peer.model.plan import inner_settings
from gossamer.peer.text.corpus import Corpus
from gossamer.peer.trainer.boundary import IDLE_S, Boundary, State, Supervision
from gossamer.peer.trainer.inner_loop import InnerLoop
from gossamer.peer.trainer.interval import traffic_expected
from gossamer.peer.trainer.loop_program import LoopProgram
from gossamer.peer.trainer.losses import MOST_EVAL_TOKENS, NUM_EVAL_BATCHES, Losses
from gossamer.peer.trainer.probe import TokenProbe
from gossamer.peer.trainer.replica import ALONE, Replica
from gossamer.peer.trainer.stopwatch import InnerStep
from gossamer.protocol.errors import OperatorError
from gossamer.protocol.run.manifest import Manifest

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from gossamer.peer.trainer.ranks import Ranks  # loaded only for several devices

JUDGE_BATCHES: Final = 4  # of held-out text, by which other peers' weights are compared with our own...
JUDGE_TOKENS: Final = (2048, 8192)  # ...of at least and at most so many tokens together: the trainer stands still meanwhile
POOL_TOKENS: Final = 16_384  # of held-out text, from which the probe draws


class TextProgram(LoopProgram):
    """A language model, its text and its inner loop. The model's tensors are written to."""

    inner: InnerLoop
    corpus: Corpus

    def __init__(
        self,
        manifest: Manifest,
        model: PreTrainedModel,
        corpus: Corpus,
        emit: Callable[[Event], None],
        computing: Computing = Computing(),  # noqa: B008 - frozen
        devices: Ranks | None = None,  # None: the one where the model is
    ) -> None:
        super().__init__(InnerLoop(manifest, model, corpus, computing, emit, devices), corpus)
        self.model = model
        self._sizes = manifest.inner

    def losses(self) -> Losses:
        """Measure the loss on a few held-out batches: one number."""
        (least, most), sizes = JUDGE_TOKENS, self._sizes
        num_batches = max(JUDGE_BATCHES, -(-least // (sizes.batch_size * sizes.sequence_length)))
        return Losses((self._held_out_loss(num_batches, most),))

    def evaluation(self) -> tuple[float, int]:
        """Measure the loss on more of them."""
        return self._held_out_loss(NUM_EVAL_BATCHES, MOST_EVAL_TOKENS), NUM_EVAL_BATCHES

    def outputs(self) -> Tensor:
        """Return log-probabilities on a held-out sequence."""
        return predictions(self.model, self.corpus.held_out_batches(1)[0][:1], self.inner.computing.dtype)

    def new_probe(self, rng: random.Random) -> TokenProbe:
        """Return a probe on held-out sequences."""
        return TokenProbe(self.model, self.inner.computing.dtype, probe_pool(self.corpus).to(self.device), rng)

    def _held_out_loss(self, num_batches: int, most_tokens: int) -> float:
        return held_out_loss(self.model, self.corpus, num_batches, computing=self.inner.computing, most_tokens=most_tokens)


class TextReplica(Replica):
    """A replica of a language model, or of one stage of it, that trains on text."""

    program: LoopProgram

    def __init__(self, manifest: Manifest, program: LoopProgram, peer_seed: int) -> None:
        super().__init__(manifest, program, peer_seed)
        self._seed = peer_seed
        self._settings = inner_settings(manifest)

    def inner_step(self, beside: AbstractContextManager[None] = ALONE) -> InnerStep | None:
        """Train on this peer's next batch, and count the step; None where the loop has no whole batch yet: call again.

        The gradient, which only reads weights, is computed inside `beside`. Raises FloatingPointError, with no weight changed, when the
        loss or a gradient is not finite; and as InnerLoop.gradient.
        """
        rate, step = learning_rate(self.global_step, self.steps_since_join(), self._settings), self.own_steps
        try:
            with beside:
                found = self.program.inner.gradient(step, step_seed(self._seed, step))
                if found is None:
                    return None
                *scalars, num_tokens = found
                loss, norm = torch.stack(scalars).tolist()  # waits for a GPU: the only time in a step
            if not math.isfinite(loss + norm):
                raise FloatingPointError(f"inner step {step}: loss {loss}, gradient norm {norm}")
            self.program.inner.devices.step(rate)
        finally:
            self.move_fast_weights()  # by meetings that were decided beside the gradient
        self.count_step(num_tokens)
        return InnerStep(loss, rate, num_tokens)


class TextTrainer:
    """The training loop, one `tick` at a time: `run` does it for a process, a test in its own time. Belongs to one thread."""

    def __init__(self, child: Supervision, replica: TextReplica, boundary: Boundary) -> None:
        self.boundary = boundary
        self._child = child
        self._replica = replica

    def run(self) -> None:
        """Train to the end of the run, or until asked to stop; save before returning."""
        boundary = self.boundary
        try:
            boundary.start()
            while boundary.state is not State.OVER and not self._child.stop_requested():
                boundary.wait(self.tick())
            boundary.end()
        except OperatorError:  # raised between two steps only, so nothing is half done
            if not boundary.bad_batches:
                boundary.save()
            raise
        finally:
            boundary.close()

    def tick(self) -> float:
        """Take one turn: answer the node, make an inner step if the run still trains, report and save what is due.

        Returns for how many seconds there is nothing to do unless the node sends a request. Raises OperatorError for a run that diverges or
        a text that cannot be read.
        """
        boundary = self.boundary
        if not boundary.is_training:
            boundary.idle()
            return IDLE_S
        boundary.answer()
        if not boundary.is_training:  # a meeting has set the clock to the end of the schedule
            return 0.0
        try:
            with boundary.watch.training(lambda: self._replica.program.inner.waited_s):
                step = self._replica.inner_step(boundary.reading())
        except FloatingPointError as error:
            boundary.skip_step(error)
        else:
            if step is None:
                boundary.report_if_time()
            else:
                boundary.after_step(step)
        return 0.0


def emit_built(child: Supervision, replica: TextReplica, flops: float, peak: float) -> None:
    """Emit what was built, and the traffic to expect of it. `flops`: per token; `peak`: of the device a second, 0 where it is not known."""
    config, plan = child.settings.config, replica.plan
    num_params = sum(parameter.numel() for parameter in replica.parameters.values())
    coding = try_coding(replica.fragments[0].codec.codec, replica.program.device)
    child.emit(ModelBuilt(num_params, 8 * plan.round_bytes / num_params, flops, peak, coding))
    line_bytes_per_s = min(rate_bytes_per_s(config.max_upload), rate_bytes_per_s(config.max_download))
    child.emit(traffic_expected(plan, replica.manifest.outer.inner_steps, line_bytes_per_s))


def step_seed(peer_seed: int, own_steps: int) -> int:
    """Derive the random seed of one inner step."""
    return int.from_bytes(hashlib.sha256(f"{peer_seed}/{own_steps}".encode()).digest()[:8], "little") >> 1


def probe_pool(corpus: Corpus) -> Tensor:
    """Return held-out sequences to draw from, int64[N, L+1]."""
    (batch,) = corpus.held_out_batches(1)
    num_batches = -(-POOL_TOKENS // (batch.shape[0] * (batch.shape[1] - 1)))
    return torch.cat(corpus.held_out_batches(num_batches))
