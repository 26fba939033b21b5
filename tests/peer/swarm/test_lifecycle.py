"""The lifecycle: whether a peer may meet, before, during and after a pause."""

from __future__ import annotations

from gossamer.peer.swarm.lifecycle import Lifecycle, LifecycleState
from gossamer.protocol.errors import RefusalCode
from gossamer.protocol.messages.messages import RunPhase


def training() -> Lifecycle:
    lifecycle = Lifecycle()
    lifecycle.update(3, RunPhase.TRAIN, True)
    assert lifecycle.may_meet
    return lifecycle


def test_a_paused_peer_meets_only_after_resume_and_the_next_report() -> None:
    lifecycle = training()
    lifecycle.pause()
    lifecycle.update(4, RunPhase.TRAIN, True)  # the last report of the old trainer
    assert (lifecycle.refusal, lifecycle.is_paused, lifecycle.is_starting) == (RefusalCode.NOT_READY, True, False)
    lifecycle.resume()
    assert (lifecycle.refusal, lifecycle.is_paused, lifecycle.is_starting) == (RefusalCode.NOT_READY, True, True)
    lifecycle.update(4, RunPhase.TRAIN, True)
    assert lifecycle.may_meet
    assert not (lifecycle.is_paused or lifecycle.is_starting)


def test_resume_without_a_pause_changes_nothing() -> None:
    lifecycle = training()
    lifecycle.resume()
    assert lifecycle.may_meet


def test_the_end_of_a_takeover_does_not_end_a_pause() -> None:
    lifecycle = training()
    lifecycle.begin_takeover()
    lifecycle.pause()
    lifecycle.end_takeover()
    assert lifecycle.state is LifecycleState.PAUSED


def test_a_takeover_does_not_end_a_pause_and_goes_on_after_it() -> None:
    lifecycle = training()
    lifecycle.pause()
    lifecycle.begin_takeover()
    assert lifecycle.is_paused
    lifecycle.end_takeover()
    assert lifecycle.state is LifecycleState.PAUSED
    lifecycle.begin_takeover()
    lifecycle.resume()
    lifecycle.update(4, RunPhase.TRAIN, True)
    assert lifecycle.state is LifecycleState.TAKING_OVER, "its trainer is back, and is to adopt other weights"
    lifecycle.end_takeover()
    assert lifecycle.may_meet


def test_leaving_is_final() -> None:
    lifecycle = training()
    lifecycle.leave()
    lifecycle.pause()
    lifecycle.resume()
    assert lifecycle.state is LifecycleState.LEAVING
