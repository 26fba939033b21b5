"""The inner loop of one stage: it serves hops of micro-batches until a batch of them has come back, whoever sent them.

The trainer keeps nothing of a hop. Tokens, input and output of the stage lie coded in the payload folder. The backward pass computes the
stage again from them, with the weights of then: weights may move, and the trainer may step or restart, between both passes.
Across stages nothing is exactly once; at this stage a micro-batch is added once at most.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from gossamer.optim.codecs.activations import ACTIVATIONS
from gossamer.peer.link.messages import (
    Backward,
    Begin,
    Declined,
    Forward,
    Forwarded,
    HopFile,
    HopReply,
    HopRequest,
    Returned,
    Unlike,
    hop_file,
)
from gossamer.peer.link.payload_folder import PayloadFolder
from gossamer.peer.machine.events import Event
from gossamer.peer.model.computing import Computing, can_recompute, evaluating, is_out_of_memory, next_token_loss
from gossamer.peer.model.model import model_config, state_tensors
from gossamer.peer.model.plan import fragment_codecs, model_plan
from gossamer.peer.model.stages import Cut, manifest_cuts, stage_output, stage_shapes
from gossamer.peer.text.corpus import Corpus
from gossamer.peer.text.labels import ids_of, num_targets
from gossamer.peer.trainer.device import OneDevice, seed_generators
from gossamer.peer.trainer.hop_queue import HopQueue
from gossamer.peer.trainer.inner_loop import OUT_OF_MEMORY, computing_set
from gossamer.peer.trainer.likeness import AnswersAlike, GradientAnswer, compare
from gossamer.peer.trainer.magnitudes import MOST_ACTIVATION, MOST_GRADIENT, GradientLengths, Magnitudes
from gossamer.peer.trainer.opposition import GradientSample, Opposition
from gossamer.protocol import limits
from gossamer.protocol.errors import OperatorError
from gossamer.protocol.messages.terms import BATCHES_AWAY, TOKEN_BYTES, StageTerms
from gossamer.protocol.newest import keep_newest
from gossamer.protocol.run.manifest import StagedManifest

MAX_LATE_STEPS: Final = 4  # a gradient for an older forward pass is not added
NAMES_KEPT: Final = limits.WINDOW  # of micro-batches that were added: as many as may be under way
MEASURED_KEPT: Final = limits.WINDOW  # losses of held-out micro-batches
MOST_BATCHES: Final = 16  # in a step, where the lower stage is behind
TURN_S: Final = 1.0  # the loop returns after so long, for reports and requests that need a boundary
STARVED_S: Final = 0.1  # without work for so long, the loop returns without a gradient


@dataclass(frozen=True, slots=True)
class HeldOut:
    """The loss of one held-out micro-batch, nats per token, at its driver."""

    loss: float
    num_tokens: int


class StageLoop:
    """The inner steps of one stage of a model, on one device. The stage's tensors are written to. Belongs to one thread.

    `corpus` is the text of a driver, which holds the first stage; None at other stages. Another thread puts the node's requests into
    `hops`, once the files that they need lie in `payloads`.
    """

    def __init__(
        self,
        manifest: StagedManifest,
        stage: PreTrainedModel,
        cut: Cut,
        corpus: Corpus | None,
        computing: Computing,
        emit: Callable[[Event], None],
        payloads: PayloadFolder,
        hops: HopQueue,
    ) -> None:
        assert (corpus is not None) == cut.is_first
        self.parameters: dict[str, Tensor] = state_tensors(stage)
        self.device = next(iter(self.parameters.values())).device
        self.devices = OneDevice(manifest, stage)
        self.computing = replace(computing, micro_batch=manifest.stages.micro_batch)
        self.hops = hops
        self.terms, self.next_state_bytes = stage_terms(manifest, cut), next_state_bytes(manifest, cut)
        self.waited_s = 0.0  # for hops, so far
        self.global_step = 0  # the replica's, which sets it before each call of `gradient`
        self.held_out: deque[HeldOut] = deque(maxlen=MEASURED_KEPT)  # at a driver: measured since the caller last took them away
        self.next_window = 0  # at a driver: micro-batches of its text that were begun so far, whatever became of them
        self._stage, self._cut, self._corpus = stage, cut, corpus
        self._emit, self._payloads = emit, payloads
        self._rows, self._clip_norm = manifest.stages.micro_batch, manifest.inner.clip_norm
        self._in_batch = manifest.inner.batch_size // self._rows
        self._shape = self._rows, manifest.inner.sequence_length + 1
        config = stage.config.get_text_config()
        self._vocab_size, self._width = int(config.vocab_size), int(config.hidden_size)
        self._codec = ACTIVATIONS[manifest.stages.activations]
        self._added: dict[str, None] = {}  # names of micro-batches, newest last
        self._activations, self._gradients, self._lengths = Magnitudes(MOST_ACTIVATION), Magnitudes(MOST_GRADIENT), GradientLengths()
        self._sample, self._opposition = GradientSample(stage.parameters()), Opposition()
        self._sampled = self._sample.read()  # of the gradient so far
        self._own_steps = 0
        self._lower_step = 0  # typical global step of the lower stage
        self._batch: tuple[int, Tensor] | None = None  # the last one read, with its step
        self._to_measure: deque[Tensor] = deque()
        self._losses: list[float] = []  # of the micro-batches in the gradient
        self.num_tokens = 0  # likewise; the caller may read it
        self.devices.compute_as(self.computing)

    def emit_computing(self, reason: str) -> None:
        """Emit how this peer computes, and why."""
        self._emit(computing_set(self.computing, reason))

    def gradient(self, step: int, seed: int) -> tuple[Tensor, Tensor, int] | None:
        """Serve hops until a batch of micro-batches is in the gradient; return as InnerLoop.gradient does, the loss as it came by.

        A stage after the first keeps the pace of the lower one: where that has more holders, the batch is larger. None where no hop came
        in time, or `hops` was interrupted, or after TURN_S: what is added so far stays, and the next call goes on. `step` counts own steps.
        `seed` is not used, as each hop has its own. Raises OperatorError.
        """
        self._own_steps, until_s = step, time.monotonic() + TURN_S
        while not self._is_whole:
            if time.monotonic() >= until_s:
                return None
            found = self._take()
            if found is None:
                return None
            request, session = found
            self.hops.send(self._answer(request), session)
        loss, num_tokens = math.fsum(self._losses) / len(self._losses), self.num_tokens
        if len(self._losses) > self._in_batch:
            self.devices.scale(self._in_batch / len(self._losses))  # each micro-batch was added as a part of one batch
        norm = self.devices.clip(self._clip_norm)
        self._losses, self.num_tokens = [], 0
        return torch.tensor(loss), norm.to("cpu"), num_tokens

    @property
    def _is_whole(self) -> bool:
        """Whether to step now."""
        ahead_steps = 0 if self._cut.is_first else self.global_step - self._lower_step
        return len(self._losses) >= self._in_batch * batches_to_step(ahead_steps)

    def _take(self) -> tuple[HopRequest, int] | None:
        """Wait for the next request, and count how long that takes."""
        began_s = time.monotonic()
        try:
            return self.hops.take(STARVED_S)
        finally:
            self.waited_s += time.monotonic() - began_s

    def measure(self, rows: Tensor) -> None:
        """Let the next micro-batches of a driver be these held-out sequences, int64[N, L+1]; an incomplete last one is left out."""
        self._to_measure += [part for part in torch.split(rows, self._rows) if len(part) == self._rows]

    @property
    def added(self) -> list[str]:
        """The names of the newest micro-batches that were added, which are not added again."""
        return list(self._added)

    @added.setter
    def added(self, names: list[str]) -> None:
        self._added = dict.fromkeys(names)

    def forget_batch(self) -> None:
        """Forget the gradient so far: the weights are others now. The text goes on behind what was begun."""
        self._batch = None
        self._drop_gradient()

    def _drop_gradient(self) -> None:
        self._losses, self.num_tokens = [], 0
        self.devices.clear()

    # ------------------------------------------------------------------ one request

    def _answer(self, request: HopRequest) -> HopReply:
        """Carry out a request; bytes that do not allow it change nothing and are the reason of the reply. Raises OperatorError."""
        try:
            reply = self._carry_out(request)
            if not isinstance(reply, Forwarded | Returned):
                return reply
            num_gathered = len(self._losses) if self._cut.is_first and not self._is_whole else 0
            return replace(reply, global_step=self.global_step, num_gathered=num_gathered)
        except (OSError, ValueError) as error:
            return Declined(request.hop, getattr(error, "strerror", None) or str(error))
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
        self._use_less()  # outside `except`, where the error no longer holds the pass's tensors
        return Declined(request.hop, OUT_OF_MEMORY)

    def _carry_out(self, request: HopRequest) -> HopReply:
        match request:
            case Begin():
                return self._begin(request)
            case Forward(hop):
                self._lower_step = request.lower_step
                tokens, received = self._tokens(hop), self._read(hop, HopFile.PARTNER_FORWARD)
                self._activations.check(received)
                if self._cut.is_last:
                    return self._finish(request, tokens, received)
                return self._forwarded(request, tokens, received, measure=request.measure)
            case Backward():
                return self._return(request)

    def _begin(self, request: Begin) -> HopReply:
        """Take the next window of the text, or a held-out one, and compute the first stage."""
        measure = bool(self._to_measure)
        tokens = self._to_measure.popleft() if measure else self._window()
        self._payloads.write(hop_file(request.hop, HopFile.OWN_TOKENS), tokens.numpy().astype("<i4").data)
        return self._forwarded(request, tokens.to(self.device), None, measure=measure)

    def _forwarded(self, request: Begin | Forward, tokens: Tensor, received: Tensor | None, *, measure: bool) -> HopReply:
        """Compute a stage that is not the last, and write its output."""
        with evaluating(self._stage) if measure else torch.no_grad():
            self._write(request.hop, HopFile.OWN_FORWARD, self._output(request.name, tokens, received))
        return Forwarded(request.hop, measure, own_steps=self._own_steps)

    def _window(self) -> Tensor:
        """Return the next micro-batch of the own text, whether or not an earlier one has come back. A stream has no way back."""
        assert self._corpus is not None
        number = max(self.next_window, self._own_steps * self._in_batch)
        self.next_window = number + 1
        step, part = divmod(number, self._in_batch)
        if self._batch is None or self._batch[0] != step:
            self._batch = step, self._corpus.batch(step)
        return self._batch[1][part * self._rows : (part + 1) * self._rows]

    def _finish(self, request: Forward, tokens: Tensor, received: Tensor) -> HopReply:
        """Compute the last stage with its loss, and at once backward."""
        hop, name = request.hop, request.name
        seed_generators(self.device, hop_seed(name, self._cut.stage))
        if request.measure:
            with evaluating(self._stage):
                return Returned(hop, checked_loss(float(next_token_loss(self._stage, tokens, self.computing.dtype, received))))
        self._need_new(name)
        loss = next_token_loss(self._stage, tokens, self.computing.dtype, received.requires_grad_())
        value = checked_loss(float(loss.detach()))
        opposed = self._add(request.source, lambda: torch.autograd.backward(loss * (1.0 / self._in_batch)))
        self._count(name, value, tokens)
        self._write_gradient(hop, received)
        return Returned(hop, value, opposed=opposed)

    def _return(self, request: Backward) -> HopReply:
        """Compute the stage again, and backward from the gradient of its output."""
        hop, loss = request.hop, checked_loss(request.loss)
        tokens = self._tokens(hop)
        if request.measure:
            self.held_out.append(HeldOut(loss, int(num_targets(tokens))))
            return Returned(hop, loss)
        if abs(late := self._own_steps - request.own_steps) > MAX_LATE_STEPS:  # negative after a restart from a checkpoint
            raise ValueError(f"the gradient is {late} steps late")
        self._need_new(request.name)
        compared = self._compared(request)
        if not compared.alike:
            return Unlike(hop, compared.evidence)
        gradient = torch.stack([answer.gradient for answer in compared.alike]).mean(0)
        loss = math.fsum(answer.loss for answer in compared.alike) / len(compared.alike)
        share = int(num_targets(tokens)) / gradient[..., 0].numel()
        self._gradients.check(gradient, share)
        gradient = self._lengths.shorten(gradient, share)
        received = None if self._cut.is_first else self._read(hop, HopFile.PARTNER_FORWARD).requires_grad_()
        output = self._output(request.name, tokens, received)
        opposed = self._add(request.source, lambda: torch.autograd.backward(output, gradient))
        self._count(request.name, loss, tokens)
        if received is not None:
            self._write_gradient(hop, received)
        return Returned(hop, loss, compared.odd, compared.evidence, opposed=opposed)

    def _compared(self, request: Backward) -> AnswersAlike:
        """Return which answers to a micro-batch are alike: a single one is. Raises ValueError for bytes that are none in a single one."""
        if not request.copies:
            return AnswersAlike((GradientAnswer(request.hop, self._read(request.hop, HopFile.PARTNER_BACKWARD), request.loss),))
        answers = []
        for hop, loss in ((request.hop, request.loss), *request.copies):
            try:
                gradient = self._read(hop, HopFile.PARTNER_BACKWARD)
            except ValueError:  # like no other answer
                gradient = torch.full((self._shape[0], self._shape[1] - 1, self._width), math.nan, device=self.device)
            answers.append(GradientAnswer(hop, gradient, checked_loss(loss)))
        return compare(answers)

    def _add(self, source: str, backward: Callable[[], None]) -> str:
        """Add a gradient; return why the source of the hop is to send no more. After an error the whole gradient so far is dropped."""
        if not self._losses:
            self.devices.clear()
            self._sampled.zero_()
        try:
            backward()
            if self._cut.is_first:
                return ""
            before, self._sampled = self._sampled, self._sample.read()
            return self._opposition.note(source, self._sampled - before) if source else ""
        except BaseException:
            self._drop_gradient()
            raise

    def _write_gradient(self, hop: int, received: Tensor) -> None:
        """Write the gradient of the stage's input. Raises ValueError, with no gradient left, where it is not finite.

        It then is because of own weights: what a partner sends is checked before. A full disk costs the answer alone.
        """
        assert received.grad is not None
        try:
            self._write(hop, HopFile.OWN_BACKWARD, received.grad)
        except ValueError:
            self._drop_gradient()
            raise

    def _count(self, name: str, loss: float, tokens: Tensor) -> None:
        keep_newest(self._added, name, None, NAMES_KEPT)
        self._losses.append(loss)
        self.num_tokens += int(num_targets(tokens))

    def _need_new(self, name: str) -> None:
        if name in self._added:
            raise ValueError("the micro-batch is added already")

    # ------------------------------------------------------------------ tensors

    def _output(self, name: str, tokens: Tensor, received: Tensor | None) -> Tensor:
        """Compute the stage's output. Both passes of a hop draw the same random numbers."""
        seed_generators(self.device, hop_seed(name, self._cut.stage))
        return stage_output(self._stage, tokens, received, self.computing.dtype)

    def _tokens(self, hop: int) -> Tensor:
        """Return a hop's tokens on the device, int64[rows, L+1]. Raises ValueError for what no driver sends."""
        file = HopFile.OWN_TOKENS if self._cut.is_first else HopFile.PARTNER_TOKENS
        read = np.frombuffer(self._payloads.read(hop_file(hop, file)), dtype="<i4")
        if read.size != math.prod(self._shape):
            raise ValueError(f"{read.size} tokens are not {self._shape[0]} sequences of {self._shape[1]}")
        tokens = torch.from_numpy(read.astype(np.int64)).view(self._shape)
        if int(ids_of(tokens).max()) >= self._vocab_size or int(tokens.max()) >= self._vocab_size:
            raise ValueError("a token is not in the vocabulary")
        return tokens.to(self.device)

    def _read(self, hop: int, file: HopFile) -> Tensor:
        """Return decoded values, f32[rows, L, width] on the device. Raises ValueError for bytes that are none."""
        shape = self._shape[0], self._shape[1] - 1, self._width
        data = self._payloads.read(hop_file(hop, file))
        coded = torch.frombuffer(data, dtype=torch.uint8) if len(data) else torch.empty(0, dtype=torch.uint8)
        return self._codec.unpack(coded.to(self.device), math.prod(shape)).view(shape).clone()

    def _write(self, hop: int, file: HopFile, values: Tensor) -> None:
        """Code values into a file. Raises ValueError for values that are not finite."""
        self._payloads.write(hop_file(hop, file), self._codec.pack(values.detach().flatten()).cpu().numpy().data)

    def _use_less(self) -> None:
        """Recompute activations from now on. The gradient, which may hold a part of a micro-batch, is forgotten. Raises OperatorError."""
        self._drop_gradient()
        if self.computing.recompute or not can_recompute(self._stage):
            raise OperatorError(
                f"not even one micro-batch of this run fits into the memory of {self.device} beside the stage",
                hint="close other programs that use that memory, choose other --devices, or join a run with shorter sequences",
            )
        self.computing = replace(self.computing, recompute=True)
        self.devices.compute_as(self.computing)
        self.emit_computing(OUT_OF_MEMORY)


def stage_terms(manifest: StagedManifest, cut: Cut) -> StageTerms:
    """Return the sizes of the hops of a stage, which the node needs."""
    rows, length = manifest.stages.micro_batch, manifest.inner.sequence_length
    num_values = rows * length * int(model_config(manifest.model).get_text_config().hidden_size)
    value_bytes = ACTIVATIONS[manifest.stages.activations].payload_bytes(num_values)
    return StageTerms(cut.stage, len(cut.blocks), TOKEN_BYTES * rows * (length + 1), value_bytes, manifest.inner.batch_size // rows)


def next_state_bytes(manifest: StagedManifest, cut: Cut) -> int:
    """Return the size of the state of the next stage, of which the node keeps a copy; the last stage's next is the first."""
    cuts = manifest_cuts(manifest)
    shapes = stage_shapes(manifest.model, cuts[(cut.stage + 1) % len(cuts)])
    return model_plan(fragment_codecs(manifest, shapes), manifest.outer.alpha).state_bytes


def batches_to_step(ahead_steps: int) -> int:
    """Return how many batches a step holds at least, where own global step is so far ahead of the lower stage's.

    A stage that is ahead by more than a driver has under way has fewer holders than the lower one.
    """
    return MOST_BATCHES if ahead_steps >= BATCHES_AWAY else 1


def checked_loss(loss: float) -> float:
    """Return a loss, nats per token. Raises ValueError for one that no answer to a hop may carry."""
    if not 0 <= loss <= limits.LOSS:  # false for NaN
        raise ValueError(f"the loss is {loss}")
    return loss


def hop_seed(name: str, stage: int) -> int:
    """Derive the seed of a micro-batch's dropout at one stage."""
    return int.from_bytes(hashlib.sha256(f"{name}/{stage}".encode()).digest()[:8], "little") >> 1
