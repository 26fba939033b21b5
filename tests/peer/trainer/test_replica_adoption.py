"""How a replica gives its state to another, and takes another's over."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from gossamer.optim.inner import learning_rate
from gossamer.peer.link import messages
from gossamer.peer.link.payload_folder import PayloadFolder
from gossamer.peer.model.plan import STEP_FACTOR, inner_settings
from gossamer.peer.trainer import text_training
from gossamer.peer.trainer.exchange import LATE_SHARE
from gossamer.protocol.messages.messages import RunPhase
from tests.peer.exchange import Terms, opened
from tests.peer.small import AskedReplica, fingerprint, small_replica
from tests.peer.trainer.test_replica import MANIFEST, make_due, meet_a_clock, pair, train


def copy_of(source: AskedReplica, folder: Path) -> str:
    """Have the source write its state; return the file's path."""
    assert source.handle(messages.CopyState("copy-1")) == messages.Written("copy-1", "")
    return str(folder / "copy-1")


def test_a_state_is_adopted_whole(tmp_path: Path) -> None:
    (source, joiner), _ = pair(tmp_path)
    train(source, 9)
    source.handle(messages.Solo(make_due(source)))
    train(source, 2)
    file = copy_of(source, tmp_path / "i")
    assert joiner.handle(messages.Adopt(file, 11)) == messages.Adopted(file, True, "")
    for mine, theirs in zip(joiner.fragments, source.fragments, strict=True):
        assert torch.equal(mine.slow, theirs.slow.bfloat16().float())
        assert torch.equal(mine.momentum, theirs.momentum.bfloat16().float())
        assert mine.since.tokens == 0
    fast = torch.cat([parameter.detach().flatten() for parameter in joiner.parameters.values()])
    slow = sum(float(fragment.slow.double().sum()) for fragment in joiner.fragments)
    assert float(fast.double().sum()) == pytest.approx(slow, rel=1e-9)
    assert (joiner.global_step, joiner.own_steps) == (11, 0)


def test_a_state_of_fewer_steps_is_not_taken_over(tmp_path: Path) -> None:
    (source, joiner), _ = pair(tmp_path)
    train(source, 9)
    train(joiner, 3)
    before = fingerprint(joiner)
    for global_step in (2, 3):
        reply = joiner.handle(messages.Adopt(copy_of(source, tmp_path / "i"), global_step))
        assert isinstance(reply, messages.Adopted) and not reply.accepted and reply.is_sound and "steps" in reply.reason
    assert fingerprint(joiner) == before


def test_a_peer_that_predicts_better_keeps_its_weights_and_takes_the_global_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (source, joiner), _ = pair(tmp_path)
    train(joiner, 3)
    losses = iter([2.0, 2.5])
    monkeypatch.setattr(text_training, "held_out_loss", lambda *_, **__: next(losses))
    before = [fragment.slow for fragment in joiner.fragments]
    reply = joiner.handle(messages.Adopt(copy_of(source, tmp_path / "i"), 40))
    assert isinstance(reply, messages.Adopted) and reply.accepted and "2.5000" in reply.reason
    assert all(fragment.slow is slow for fragment, slow in zip(joiner.fragments, before, strict=True))
    assert (joiner.global_step, joiner.own_steps) == (40, 3)


def test_a_clock_is_set_back_and_never_forward(tmp_path: Path) -> None:
    replica = small_replica(tmp_path, MANIFEST)
    train(replica, 9)
    for asked, global_step in ((4, 4), (20, 4)):
        replica.handle(messages.StepBack(asked))
        assert replica.global_step == global_step


def test_a_joiner_warms_up_again(tmp_path: Path) -> None:
    (source, joiner), _ = pair(tmp_path)
    train(source, 20)
    source.exchange.take_last_solo_steps()  # its slow weights have learnt too
    joiner.handle(messages.Adopt(copy_of(source, tmp_path / "i"), 20))
    assert not joiner.program.inner.devices.state()
    settings = inner_settings(MANIFEST)
    rates = [joiner.inner_step().learning_rate for _ in range(12)]
    assert rates == [learning_rate(20 + step, step, settings) for step in range(12)]
    assert rates[0] < 0.2 * source.inner_step().learning_rate


def test_a_joiners_clock_is_bounded_from_where_it_joined(tmp_path: Path) -> None:
    (source, joiner), _ = pair(tmp_path)
    train(source, 20)
    joiner.handle(messages.Adopt(copy_of(source, tmp_path / "i"), 20))
    train(joiner, 1)
    meet_a_clock(tmp_path / "j", joiner, 50)
    assert joiner.global_step == 20 + STEP_FACTOR


def test_a_source_cannot_push_the_global_step_beyond_the_end(tmp_path: Path) -> None:
    (source, joiner), _ = pair(tmp_path)
    joiner.handle(messages.Adopt(copy_of(source, tmp_path / "i"), 10**15))
    assert joiner.global_step == MANIFEST.run.total_steps


def test_adopting_drops_open_meetings(tmp_path: Path) -> None:
    (source, joiner), sides = pair(tmp_path)
    opened(sides[1], Terms())
    joiner.handle(messages.Adopt(copy_of(source, tmp_path / "i"), 0))
    assert isinstance(joiner.handle(messages.Prepare(1, 0, 0, 1, RunPhase.TRAIN)), messages.Unavailable)


@pytest.mark.parametrize("fault", ["nan", "short", "missing", "long", "huge", "huge momentum", "useless"])
def test_a_bad_state_is_refused_with_a_reason_and_changes_nothing(tmp_path: Path, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (source, joiner), _ = pair(tmp_path)
    file = Path(copy_of(source, tmp_path / "i"))
    data = bytearray(file.read_bytes())
    if fault == "nan":
        data[-2:] = b"\xff\xff"  # in the last momentum
    sizes = [fragment.slow.numel() for fragment in joiner.fragments]
    values = np.frombuffer(data, dtype=np.uint16)
    if fault == "huge":
        values[:] = 0x7F00  # 1.7e38
    elif fault == "huge momentum":
        values[sum(sizes) : sum(sizes) + sizes[0]] = 0x4248  # 50
    elif fault == "useless":
        monkeypatch.setattr(text_training, "held_out_loss", lambda *_, **__: float("nan"))
    file.write_bytes({"short": data[:-4], "long": data + bytes(4), "missing": b""}.get(fault, data))
    before = fingerprint(joiner)
    reply = joiner.handle(messages.Adopt(str(file), 5))
    assert isinstance(reply, messages.Adopted)
    assert not reply.accepted and reply.is_sound == (fault == "useless")
    reasons = {"nan": "finite", "huge": "large", "huge momentum": "momentum", "useless": "held-out loss is nan"}
    assert reasons.get(fault, "bytes") in reply.reason
    assert fingerprint(joiner) == before


def test_a_copy_that_finds_no_room_is_answered_with_the_sum(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    replica = small_replica(tmp_path, MANIFEST)
    monkeypatch.setattr(PayloadFolder, "free_bytes", lambda _: 1000)
    reply = replica.handle(messages.CopyState("copy-1"))
    assert isinstance(reply, messages.Written) and "1.0 kB are free" in reply.reason
    assert not list(tmp_path.glob("copy-*"))


def test_what_has_long_waited_for_a_partner_is_brought_up_before_it_is_given(tmp_path: Path) -> None:
    replica = small_replica(tmp_path, MANIFEST)
    late_steps = MANIFEST.outer.max_clock_gap_steps // LATE_SHARE
    before = [fragment.slow for fragment in replica.fragments]

    def has_moved() -> list[bool]:
        return [fragment.slow is not slow for fragment, slow in zip(replica.fragments, before, strict=True)]

    train(replica, late_steps)
    for _ in range(late_steps):
        replica.countdown.tick()
    assert replica.countdown.due() == [0, 1, 2]
    assert replica.handle(messages.BringUp("copy")) == messages.Written("copy", "") and not any(has_moved())
    train(replica, 1)
    replica.handle(messages.BringUp("copy"))
    assert all(has_moved())
