"""What a state must be before it is taken over: of the right length, finite, of a sane size, and no worse than what we have."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from gossamer.peer.trainer.fragment_syncs import SYNC_TOLERANCE, FragmentShift, try_shifts
from gossamer.peer.trainer.losses import Losses
from gossamer.peer.trainer.replica import Replica
from gossamer.peer.trainer.shared_state import MOST_GROWTH, MOST_MOMENTUM, TOLERANCE, read_state, try_on
from tests.peer.small import fingerprint, small_manifest, small_replica

MANIFEST = small_manifest()


def own(folder: Path) -> tuple[Replica, Tensor]:
    """A replica, and the state of one like it."""
    replica = small_replica(folder, MANIFEST)
    fragments = replica.fragments
    return replica, torch.cat([f.slow for f in fragments] + [f.momentum for f in fragments]).bfloat16()


def as_bytes(values: Tensor) -> memoryview:
    return memoryview(values.view(torch.int16).numpy()).cast("B")


def reason(replica: Replica, values: Tensor) -> str:
    try:
        read_state(as_bytes(values), replica.fragments)
    except ValueError as error:
        return str(error)
    return ""


def test_each_fragment_has_its_part(tmp_path: Path) -> None:
    replica, values = own(tmp_path)
    for part in read_state(as_bytes(values), replica.fragments):
        assert torch.equal(part.slow, part.fragment.slow.bfloat16().float()) and torch.equal(part.momentum, part.fragment.momentum)


def test_without_momentum_a_state_is_half_as_long(tmp_path: Path) -> None:
    values = own(tmp_path / "with")[1]
    fragments = small_replica(tmp_path, small_manifest(outer={"alpha": 0.0})).fragments
    parts = read_state(as_bytes(values[: len(values) // 2]), fragments)
    assert all(not part.momentum.any() for part in parts)
    with pytest.raises(ValueError, match="bytes"):
        read_state(as_bytes(values), fragments)


def test_a_newcomer_of_a_program_run_knows_no_size_that_is_sane(tmp_path: Path) -> None:
    """Its own weights are not the run's: a run's statistics may have grown a thousandfold. Values that are not finite stay refused."""
    replica, values = own(tmp_path)
    values *= 1000.0
    assert "large" in reason(replica, values)
    read_state(as_bytes(values), replica.fragments, is_comparable=False)
    values[0] = torch.inf
    with pytest.raises(ValueError, match="finite"):
        read_state(as_bytes(values), replica.fragments, is_comparable=False)


@pytest.mark.parametrize(("times", "is_sane"), [(0.0, True), (1.0, True), (0.9 * MOST_GROWTH, True), (1e30, False), (3e38, False)])
def test_weights_are_of_the_size_of_ours(tmp_path: Path, times: float, is_sane: bool) -> None:
    replica, values = own(tmp_path)
    values *= min(times, 1e38)
    assert (reason(replica, values) == "") == is_sane


def test_one_huge_fragment_is_enough_to_be_refused_and_one_of_zeros_is_not(tmp_path: Path) -> None:
    replica, values = own(tmp_path)
    numel = replica.fragments[0].slow.numel()
    replica.fragments[0].slow.zero_()  # ours begin with zeros, the source's do no more
    assert reason(replica, values) == ""
    values[:numel] = 3e38
    assert replica.fragments[0].codec.fragment.name in reason(replica, values)


@pytest.mark.parametrize(("times", "is_sane"), [(0.9 * MOST_MOMENTUM, True), (1.5 * MOST_MOMENTUM, False)])
def test_momentum_is_no_larger_than_the_weights(tmp_path: Path, times: float, is_sane: bool) -> None:
    replica, values = own(tmp_path)
    slow = torch.cat([f.slow for f in replica.fragments])
    last = replica.fragments[-1].slow
    values[-last.numel() :] = (times * last * max(1.0, float(slow.square().mean().sqrt() / last.square().mean().sqrt()))).bfloat16()
    assert (reason(replica, values) == "") == is_sane


@pytest.mark.parametrize(
    ("losses", "is_taken"),
    [
        ((3.0, 3.0), True),
        ((3.0, 2.0), True),
        ((3.0, 3.0 * (1.0 + TOLERANCE) + 0.01), False),
        ((3.0, float("nan")), False),
        ((float("nan"), 3.0), True),
    ],
)
def test_weights_that_predict_worse_are_taken_off_again(tmp_path: Path, losses: tuple[float, float], is_taken: bool) -> None:
    replica, values = own(tmp_path)
    before, measured = fingerprint(replica), iter(losses)
    values *= 2.0
    parts = read_state(as_bytes(values), replica.fragments)
    assert (
        (try_on(parts, replica.weights, lambda: Losses((next(measured),)), TOLERANCE) == "") == is_taken == (fingerprint(replica) != before)
    )


@pytest.mark.parametrize(
    ("losses", "taken"),
    [
        ((3.0, 2.9, 2.9, 2.8), "abc"),
        ((3.0, 9.0, 2.9), "c"),
        ((3.0, 2.9, 2.9, float("nan")), "ab"),
        ((3.0, 2.0, 2.0, 2.5), "ab"),  # what the first source has bettered does not pay for the second
        ((3.0, *[3.0 + 2.9 * SYNC_TOLERANCE] * 2, 3.0 + 3.1 * SYNC_TOLERANCE), "ab"),  # tolerances do not add up
        ((float("nan"), 2.9, 2.9, 9.0), "ab"),
        ((3.0, 9.0, 9.0), ""),
    ],
)
def test_synced_fragments_count_source_by_source(tmp_path: Path, losses: tuple[float, ...], taken: str) -> None:
    replica, _ = own(tmp_path)
    measured = iter(losses)
    shifts = {
        name: FragmentShift(name, fragment, torch.full_like(fragment.slow, 0.25), 0.0)
        for name, fragment in zip("abc", replica.fragments, strict=True)
    }
    before = {name: shift.fragment.fast() for name, shift in shifts.items()}
    moved, reason = try_shifts([[shifts["a"], shifts["b"]], [shifts["c"]]], replica.weights, lambda: Losses((next(measured),)))
    assert "".join(shift.name for shift in moved) == taken and bool(reason) == (taken != "abc")
    assert next(measured, None) is None, "the text is measured once before, and once or twice for each source"
    for name, shift in shifts.items():
        assert torch.equal(shift.fragment.fast(), before[name] + 0.25 if name in taken else before[name])
