"""What a clone must be before it is taken over: of the right length, finite, of a sane size, and with a loss."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch

from peer.trainer.replica import MOST_GROWTH, MOST_MOMENTUM, Replica, parts, try_on, why_not
from tests.peer.small import fingerprint, small_manifest, small_replica

MANIFEST = small_manifest()
Values = npt.NDArray[np.float32]


def own(folder: Path) -> tuple[Replica, Values]:
    """A replica, and the clone of one like it."""
    replica = small_replica(folder, MANIFEST)
    halves = [tensor for fragment in replica.outer.fragments for tensor in (fragment.slow, fragment.momentum)]
    return replica, torch.cat(halves).numpy().copy()


def reason(replica: Replica, values: Values) -> str:
    return why_not(memoryview(values).cast("B"), replica.outer.fragments)


def test_each_fragment_has_its_part(tmp_path: Path) -> None:
    replica, values = own(tmp_path)
    for fragment, slow, momentum in parts(torch.from_numpy(values), replica.outer.fragments):
        assert torch.equal(slow, fragment.slow) and torch.equal(momentum, fragment.momentum)


@pytest.mark.parametrize(("times", "is_sane"), [(0.0, True), (1.0, True), (0.9 * MOST_GROWTH, True), (1e30, False), (3e38, False)])
def test_weights_are_of_the_size_of_ours(tmp_path: Path, times: float, is_sane: bool) -> None:
    replica, values = own(tmp_path)
    values *= np.float32(min(times, 1e38))
    assert (reason(replica, values) == "") == is_sane


def test_one_huge_fragment_is_enough_to_be_refused_and_one_of_zeros_is_not(tmp_path: Path) -> None:
    replica, values = own(tmp_path)
    numel = replica.outer.fragments[0].slow.numel()
    replica.outer.fragments[0].slow.zero_()  # ours begin with zeros, the donor's do no more
    assert reason(replica, values) == ""
    values[:numel] = 3e38
    assert replica.outer.fragments[0].codec.fragment.name in reason(replica, values)


@pytest.mark.parametrize(("times", "is_sane"), [(0.9 * MOST_MOMENTUM, True), (1.5 * MOST_MOMENTUM, False)])
def test_momentum_is_no_larger_than_the_weights(tmp_path: Path, times: float, is_sane: bool) -> None:
    replica, values = own(tmp_path)
    numel = replica.outer.fragments[-1].slow.numel()
    values[-numel:] = times * values[-2 * numel : -numel]
    whole = float(torch.cat([f.slow for f in replica.outer.fragments]).square().mean().sqrt())
    last = float(replica.outer.fragments[-1].slow.square().mean().sqrt())
    values[-numel:] *= max(1.0, whole / last)
    assert (reason(replica, values) == "") == is_sane


@pytest.mark.parametrize("loss", [float("nan"), float("inf"), 3.0])
def test_weights_that_give_no_loss_are_taken_off_again(tmp_path: Path, loss: float) -> None:
    replica, values = own(tmp_path)
    before = fingerprint(replica)
    values *= np.float32(2.0)
    why = try_on(memoryview(values).cast("B"), replica.outer.fragments, replica.parameters, lambda: loss)
    assert (why == "") == (loss == 3.0) == (fingerprint(replica) != before)
