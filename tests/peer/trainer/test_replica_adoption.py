"""How a replica gives its state to another, and takes another's over."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pytest
import torch

from optim.inner import learning_rate
from peer.link import records as ask
from peer.model.plan import CLOCK_FACTOR, inner_settings
from peer.trainer import replica as replica_module
from peer.trainer.replica import Replica
from protocol.messages.messages import RunPhase
from tests.peer.exchange import Terms, opened
from tests.peer.small import fingerprint, small_replica
from tests.peer.trainer.test_replica import MANIFEST, make_due, meet_a_clock, pair, train


def clone(donor: Replica, folder: Path, taker: Path) -> ask.SnapshotTaken:
    reply = donor.handle(ask.TakeSnapshot("clone-1"))
    assert isinstance(reply, ask.SnapshotTaken)
    data = (folder / "clone-1").read_bytes()
    assert hashlib.sha256(data).hexdigest() == reply.sha256
    taker.mkdir(exist_ok=True)
    (taker / "adopt-1").write_bytes(data)
    return reply


def test_a_clone_is_adopted_whole(tmp_path: Path) -> None:
    (donor, joiner), _ = pair(tmp_path)
    train(donor, 9)
    donor.handle(ask.Solo(make_due(donor)))
    train(donor, 2)
    cloned = clone(donor, tmp_path / "i", tmp_path / "j")
    assert joiner.handle(ask.Adopt("adopt-1", cloned.clock_steps)) == ask.Adopted("adopt-1", True, "")
    for mine, theirs in zip(joiner.outer.fragments, donor.outer.fragments, strict=True):
        assert torch.equal(mine.slow, theirs.slow)
        assert torch.equal(mine.momentum, theirs.momentum)
        assert mine.tokens == 0
    fast = torch.cat([parameter.detach().flatten() for parameter in joiner.parameters.values()])
    slow = sum(float(fragment.slow.double().sum()) for fragment in joiner.outer.fragments)
    assert float(fast.double().sum()) == pytest.approx(slow, rel=1e-9)
    assert (joiner.clock_steps, joiner.own_steps) == (11, 0)


def test_a_joiner_warms_up_again(tmp_path: Path) -> None:
    (donor, joiner), _ = pair(tmp_path)
    train(joiner, 3)
    train(donor, 20)
    clone(donor, tmp_path / "i", tmp_path / "j")
    joiner.handle(ask.Adopt("adopt-1", 20))
    assert not joiner.optimizer.state
    settings = inner_settings(MANIFEST)
    rates = [joiner.inner_step().learning_rate for _ in range(12)]
    assert rates == [learning_rate(20 + step, step, settings) for step in range(12)]
    assert rates[0] < 0.2 * donor.inner_step().learning_rate


def test_a_joiners_clock_is_bounded_from_where_it_joined(tmp_path: Path) -> None:
    (donor, joiner), _ = pair(tmp_path)
    train(donor, 20)
    clone(donor, tmp_path / "i", tmp_path / "j")
    joiner.handle(ask.Adopt("adopt-1", 20))
    train(joiner, 1)
    meet_a_clock(tmp_path / "j", joiner, 50)
    assert joiner.clock_steps == 20 + CLOCK_FACTOR


def test_a_donor_cannot_push_the_clock_beyond_the_end(tmp_path: Path) -> None:
    (donor, joiner), _ = pair(tmp_path)
    clone(donor, tmp_path / "i", tmp_path / "j")
    joiner.handle(ask.Adopt("adopt-1", 10**15))
    assert joiner.clock_steps == MANIFEST.run.total_steps


def test_adopting_drops_open_meetings(tmp_path: Path) -> None:
    (donor, joiner), sides = pair(tmp_path)
    opened(sides[1], Terms())
    clone(donor, tmp_path / "i", tmp_path / "j")
    joiner.handle(ask.Adopt("adopt-1", 0))
    assert isinstance(joiner.handle(ask.Prepare(1, 0, 0, 1, RunPhase.TRAIN)), ask.Unavailable)


@pytest.mark.parametrize("fault", ["nan", "short", "missing", "long", "huge", "huge momentum", "useless"])
def test_a_bad_clone_is_refused_with_a_reason_and_changes_nothing(tmp_path: Path, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (donor, joiner), _ = pair(tmp_path)
    train(joiner, 2)
    clone(donor, tmp_path / "i", tmp_path / "j")
    path = tmp_path / "j" / "adopt-1"
    data = bytearray(path.read_bytes())
    if fault == "nan":
        data[-4:] = b"\xff\xff\xff\xff"  # in the last momentum
    first = joiner.outer.fragments[0].slow.numel()
    values = np.frombuffer(data, dtype=np.float32)
    if fault == "huge":
        values[:] = 3e38
    elif fault == "huge momentum":
        values[first : 2 * first] = 50.0
    elif fault == "useless":
        monkeypatch.setattr(replica_module, "held_out_loss", lambda *_: float("nan"))
    path.write_bytes({"short": data[:-4], "long": data + bytes(4), "missing": b""}.get(fault, data))
    before = fingerprint(joiner)
    reply = joiner.handle(ask.Adopt("adopt-1", 5))
    assert isinstance(reply, ask.Adopted)
    assert not reply.accepted
    reasons = {"nan": "finite", "huge": "large", "huge momentum": "momentum", "useless": "held-out text is nan"}
    assert reasons.get(fault, "bytes") in reply.reason
    assert fingerprint(joiner) == before


def test_a_clone_that_finds_no_room_is_answered(tmp_path: Path) -> None:
    replica = small_replica(tmp_path / "gone", MANIFEST)
    (tmp_path / "gone").rmdir()
    reply = replica.handle(ask.TakeSnapshot("clone-1"))
    assert isinstance(reply, ask.NoSnapshot)
    assert "No such file" in reply.reason
