"""Answers of several holders to one micro-batch, as the trainer of a stage takes them in."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from gossamer.peer.link.messages import Backward, HopFile, Returned, Unlike, hop_file
from gossamer.peer.model.stages import manifest_cuts
from gossamer.peer.trainer.magnitudes import LENGTHS_LEARNED
from tests.peer.trainer.staged import SESSION, Holder, reasons, staged_manifest
from tests.peer.trainer.test_stage_loop import coded, gradients, micro_batch

GRADIENT = torch.randn(2, 16, 64, generator=torch.Generator().manual_seed(3))


def middle(folder: Path) -> Holder:
    """A holder of stage 2 of 3 that has computed hop 0 forward."""
    manifest = staged_manifest(3)
    holder = Holder(manifest, manifest_cuts(manifest)[1], folder)
    holder.forward(0, *micro_batch(0), name="ab")
    holder.serve()
    holder.taken()
    return holder


def answered(holder: Holder, answers: dict[int, Tensor | bytes]) -> None:
    """Bring it the answers to hop 0, the first one, and to its copies."""
    for hop, gradient in answers.items():
        holder.payloads.write(hop_file(hop, HopFile.PARTNER_BACKWARD), coded(gradient) if isinstance(gradient, Tensor) else gradient)
    first, *copies = answers
    losses = tuple((copy, 2.0 + copy / 100) for copy in copies)
    holder.hops.put(Backward(first, "ab", False, "", 0, 2.0 + first, losses), SESSION)
    holder.serve()


def test_the_mean_of_like_answers_is_added_once(tmp_path: Path) -> None:
    doubled, single = middle(tmp_path / "doubled"), middle(tmp_path / "single")
    answered(doubled, {0: 1.5 * GRADIENT, 7: 0.5 * GRADIENT + GRADIENT})
    answered(single, {0: 1.5 * GRADIENT})
    (reply,) = doubled.taken()
    assert isinstance(reply, Returned) and (reply.odd, reply.evidence) == (None, "") and abs(reply.loss - 2.035) < 1e-9
    for name, gradient in gradients(single).items():
        torch.testing.assert_close(gradients(doubled)[name], gradient)
    assert doubled.loop.added == ["ab"]


def test_unlike_answers_change_nothing_and_a_third_one_decides(tmp_path: Path) -> None:
    holder, honest = middle(tmp_path / "one"), middle(tmp_path / "other")
    answered(holder, {0: -GRADIENT, 7: GRADIENT})
    (reply,) = holder.taken()
    assert isinstance(reply, Unlike) and "cosine -1.00" in reply.evidence
    assert not gradients(holder) and not holder.loop.added
    answered(holder, {0: -GRADIENT, 7: GRADIENT, 8: GRADIENT})
    (reply,) = holder.taken()
    assert isinstance(reply, Returned) and reply.odd == 0 and "cosine -1.00" in reply.evidence
    answered(honest, {0: GRADIENT})
    for name, gradient in gradients(honest).items():
        torch.testing.assert_close(gradients(holder)[name], gradient)


def test_bytes_that_are_no_gradient_are_an_odd_answer(tmp_path: Path) -> None:
    holder = middle(tmp_path)
    answered(holder, {0: GRADIENT, 7: b"short", 8: GRADIENT})
    (reply,) = holder.taken()
    assert isinstance(reply, Returned) and reply.odd == 7


def test_a_single_answer_that_is_no_gradient_is_declined(tmp_path: Path) -> None:
    holder = middle(tmp_path)
    answered(holder, {0: b"short"})
    assert len(reasons(holder.taken())) == 1 and not gradients(holder)


def test_a_gradient_that_is_far_longer_than_usual_counts_three_times_the_usual_one(tmp_path: Path) -> None:
    """One holder cannot drown a batch in noise."""
    long, usual = middle(tmp_path / "long"), middle(tmp_path / "usual")
    for holder, times in ((long, 40.0), (usual, 3.0)):
        for _ in range(LENGTHS_LEARNED):
            holder.loop._lengths.shorten(GRADIENT)
        answered(holder, {0: times * GRADIENT})
        holder.taken()
    for name, gradient in gradients(usual).items():
        torch.testing.assert_close(gradients(long)[name], gradient, rtol=1e-4, atol=1e-6)
