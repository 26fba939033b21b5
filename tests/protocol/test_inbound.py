"""Caps on inbound streams. What a handler's failure and a silent opener lead to is in the transport contract."""

from __future__ import annotations

from protocol.inbound import Admission, StreamCaps
from protocol.transport import Purpose
from tests.protocol.peers import seeded

A, B = seeded(1).peer_id, seeded(2).peer_id


def test_caps_hold_per_partner_and_purpose_and_in_all() -> None:
    admission = Admission(StreamCaps(per_purpose=2, total=4))
    assert admission.enter(A, Purpose.MEET)
    assert admission.enter(A, Purpose.MEET)
    assert not admission.enter(A, Purpose.MEET)
    assert admission.enter(A, Purpose.FETCH)
    assert admission.enter(B, Purpose.MEET)
    assert not admission.enter(B, Purpose.FETCH)


def test_a_place_is_free_again_after_leaving() -> None:
    admission = Admission(StreamCaps(per_purpose=1, total=1))
    for _ in range(3):
        assert admission.enter(A, Purpose.MEET)
        assert not admission.enter(A, Purpose.MEET)
        admission.leave(A, Purpose.MEET)
