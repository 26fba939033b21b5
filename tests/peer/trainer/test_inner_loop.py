from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from gossamer.peer.machine.events import ComputingSet, Event
from gossamer.peer.model.computing import Computing
from gossamer.peer.model.model import build_model
from gossamer.peer.trainer.inner_loop import InnerLoop
from gossamer.protocol.errors import OperatorError
from tests.peer.small import LLAMA, small_corpus, small_manifest

MANIFEST = small_manifest(inner={"batch_size": 6})


class Loop(InnerLoop):
    """An inner loop whose model and text the test can reach."""

    def __init__(self, computing: Computing, emit: Callable[[Event], None] = lambda event: None) -> None:
        self.model, self.corpus = build_model(MANIFEST.model, 0), small_corpus(MANIFEST)
        super().__init__(MANIFEST, self.model, self.corpus, computing, emit)


def gradient(inner: InnerLoop, step: int = 0) -> tuple[float, float, list[Tensor]]:
    loss, norm, num_tokens = inner.gradient(step, seed=1)
    assert num_tokens == 6 * 16
    return float(loss), float(norm), [parameter.grad for parameter in inner.parameters.values() if parameter.grad is not None]


@pytest.mark.parametrize("micro_batch", [1, 2, 4])
def test_the_gradient_is_the_same_however_the_batch_is_cut(micro_batch: int) -> None:
    loss, norm, whole = gradient(Loop(Computing()))
    cut_loss, cut_norm, parts = gradient(Loop(Computing(micro_batch=micro_batch)))
    assert (cut_loss, cut_norm) == pytest.approx((loss, norm), rel=1e-5)
    for one, other in zip(parts, whole, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)


class SmallMemory:
    """A device on which a forward pass of more than so many sequences, or one that keeps its activations, finds no memory."""

    def __init__(self, inner: Loop, most: int, *, keeps: bool = True) -> None:
        self.most = most
        self._keeps = keeps
        self._inner = inner
        inner.model.register_forward_pre_hook(self._allocate, with_kwargs=True)

    def _allocate(self, model: object, args: object, given: dict[str, Tensor]) -> None:
        if len(given["input_ids"]) > self.most or not (self._keeps or self._inner.computing.recompute):
            raise torch.OutOfMemoryError("CUDA out of memory")


def test_a_batch_that_finds_no_memory_is_tried_again_in_smaller_parts() -> None:
    emitted: list[Event] = []
    inner = Loop(Computing(), emitted.append)
    SmallMemory(inner, 2)
    assert gradient(inner)[0] == pytest.approx(gradient(Loop(Computing()))[0], rel=1e-5)
    assert [(event.micro_batch, event.recompute) for event in emitted if isinstance(event, ComputingSet)] == [(3, False), (2, False)]
    gradient(inner, 1)
    assert len(emitted) == 2  # it remembers


def test_at_last_activations_are_computed_again() -> None:
    emitted: list[Event] = []
    inner = Loop(Computing(), emitted.append)
    memory = SmallMemory(inner, 1, keeps=False)
    gradient(inner)
    assert (inner.computing.micro_batch, inner.computing.recompute) == (1, True)
    memory.most = 0
    with pytest.raises(OperatorError, match="not even one sequence"):
        gradient(inner, 1)


def test_other_errors_are_not_taken_for_lack_of_memory() -> None:
    inner = Loop(Computing())
    inner.model.lm_head.register_forward_pre_hook(lambda *_: torch.zeros(2) @ torch.zeros(3))
    with pytest.raises(RuntimeError):
        gradient(inner)
    assert inner.computing.micro_batch == 6


def test_a_batch_is_fetched_ahead_once() -> None:
    inner = Loop(Computing())
    asked: list[int] = []
    fetch = inner.corpus.batch
    inner.corpus.batch = lambda step: asked.append(step) or fetch(step)  # type: ignore[func-returns-value,method-assign]
    for step in (0, 1, 3):  # the batch of step 2 was passed over
        gradient(inner, step)
    assert asked == [0, 1, 2, 3, 4]
    inner.forget_batch()
    gradient(inner, 4)
    assert asked == [0, 1, 2, 3, 4, 4, 5]


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU here")
@pytest.mark.parametrize("computing", [Computing(torch.bfloat16, 2), Computing(torch.bfloat16, recompute=True, compiles=True)])
def test_on_a_gpu_in_bf16(computing: Computing) -> None:
    expected = gradient(Loop(Computing()))
    model = build_model(small_manifest(model={"config": LLAMA}).model, 0).to("cuda")
    inner = InnerLoop(MANIFEST, model, small_corpus(MANIFEST), computing, lambda event: None)
    assert gradient(inner)[0] == pytest.approx(expected[0], abs=0.02)
    inner.devices.step(1e-3)
    assert gradient(inner, 1)[0] < expected[0]
