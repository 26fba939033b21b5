"""The greeting: a Hello that the partner accepts, and an id and a seed that both sides derive alike."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gossamer.peer.link.messages import Opened
from gossamer.peer.meeting.interface import Greeting, pairing
from gossamer.protocol.identity import Identity
from gossamer.protocol.messages.messages import Hello, RunPhase
from gossamer.protocol.messages.terms import check_hello
from tests.peer.two_sides import NOW_S, PLAIN, SEEDS, SKETCHED, TERMS, Table, membership
from tests.protocol.samples import changed

A, B = (Identity(seed) for seed in SEEDS)
OPENED = Opened(1, tokens=640, global_step=100, phase=RunPhase.TRAIN)


def first(fragment: int = SKETCHED) -> Greeting:
    return Greeting(membership(A), B.peer_id, fragment, b"n" * 16, NOW_S)


def answering(hello: Hello) -> Greeting:
    return Greeting(membership(B), A.peer_id, hello.fragment, b"p" * 16, NOW_S, hello)


@pytest.mark.parametrize("fragment", [PLAIN, SKETCHED])
def test_each_side_accepts_the_hello_of_the_other(fragment: int) -> None:
    hello = first(fragment).hello(OPENED)
    check_hello(hello, TERMS, B.peer_id, A.peer_id, NOW_S)
    answer = answering(hello).hello(replace(OPENED, tokens=7, global_step=101))
    first(fragment).check_answer(answer, hello)
    assert (hello.tokens, hello.global_step, answer.tokens, answer.global_step) == (640, 100, 7, 101)
    sizes = TERMS.fragments[fragment]
    for side in (hello, answer):
        assert (side.sketch_bytes, side.payload_bytes) == (sizes.sketch_bytes, sizes.payload_bytes)


def test_both_sides_derive_the_same_unique_id_and_seed() -> None:
    initiator, responder = Table(SKETCHED).run()
    (hello, *_), (answer, *_) = initiator.sent, responder.sent
    assert isinstance(hello, Hello) and isinstance(answer, Hello)
    agreed = pairing(hello, answer)
    assert agreed == initiator.meeting.pairing == responder.meeting.pairing and agreed.phase is RunPhase.TRAIN
    assert len(agreed.meeting_id) == 16 and 0 <= agreed.seed < 2**63
    assert pairing(replace(hello, phase=RunPhase.FINISH), answer) == replace(agreed, phase=RunPhase.FINISH)
    others = [
        pairing(changed(hello, nonce=b"o" * 16), answer),
        pairing(hello, changed(answer, nonce=b"o" * 16)),
        pairing(replace(hello, fragment=PLAIN), answer),
        pairing(changed(hello, run_id=b"r" * 32), answer),
        pairing(answer, hello),
    ]
    assert len({agreed.meeting_id, *(other.meeting_id for other in others)}) == len({agreed.seed, *(o.seed for o in others)}) == 6
