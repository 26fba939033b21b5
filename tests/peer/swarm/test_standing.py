"""Whether a peer may meet, over a pause."""

from __future__ import annotations

from gossamer.peer.swarm.standing import PeerState, Standing
from gossamer.protocol.errors import RefusalCode
from gossamer.protocol.messages.messages import RunPhase


def training() -> Standing:
    standing = Standing()
    standing.told(3, RunPhase.TRAIN, True)
    assert standing.may_meet
    return standing


def test_who_is_paused_meets_nobody_until_another_trainer_has_told() -> None:
    standing = training()
    standing.rest()
    standing.told(4, RunPhase.TRAIN, True)  # the old one's last word
    assert (standing.refusal, standing.is_paused) == (RefusalCode.NOT_READY, True)
    standing.wake()
    assert (standing.refusal, standing.is_paused) == (RefusalCode.NOT_READY, True)
    standing.told(4, RunPhase.TRAIN, True)
    assert standing.may_meet
    assert not standing.is_paused


def test_to_wake_who_is_awake_changes_nothing() -> None:
    standing = training()
    standing.wake()
    assert standing.may_meet


def test_weights_that_are_being_taken_over_do_not_end_a_pause() -> None:
    standing = training()
    standing.take_over()
    standing.rest()
    standing.taken_over()
    assert standing.state is PeerState.PAUSED


def test_who_leaves_does_not_pause() -> None:
    standing = training()
    standing.leave()
    standing.rest()
    standing.wake()
    assert standing.state is PeerState.LEAVING
