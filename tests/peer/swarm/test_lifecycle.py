"""Whether a peer may meet, over a pause."""

from __future__ import annotations

from gossamer.peer.swarm.lifecycle import Lifecycle, LifecycleState
from gossamer.protocol.errors import RefusalCode
from gossamer.protocol.messages.messages import RunPhase


def training() -> Lifecycle:
    lifecycle = Lifecycle()
    lifecycle.update(3, RunPhase.TRAIN, True)
    assert lifecycle.may_meet
    return lifecycle


def test_who_is_paused_meets_nobody_until_another_trainer_has_told() -> None:
    lifecycle = training()
    lifecycle.pause()
    lifecycle.update(4, RunPhase.TRAIN, True)  # the old one's last word
    assert (lifecycle.refusal, lifecycle.is_paused) == (RefusalCode.NOT_READY, True)
    lifecycle.resume()
    assert (lifecycle.refusal, lifecycle.is_paused) == (RefusalCode.NOT_READY, True)
    lifecycle.update(4, RunPhase.TRAIN, True)
    assert lifecycle.may_meet
    assert not lifecycle.is_paused


def test_to_wake_who_is_awake_changes_nothing() -> None:
    lifecycle = training()
    lifecycle.resume()
    assert lifecycle.may_meet


def test_weights_that_are_being_taken_over_do_not_end_a_pause() -> None:
    lifecycle = training()
    lifecycle.begin_takeover()
    lifecycle.pause()
    lifecycle.end_takeover()
    assert lifecycle.state is LifecycleState.PAUSED


def test_who_leaves_does_not_pause() -> None:
    lifecycle = training()
    lifecycle.leave()
    lifecycle.pause()
    lifecycle.resume()
    assert lifecycle.state is LifecycleState.LEAVING
