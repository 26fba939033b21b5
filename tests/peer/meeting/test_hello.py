"""The greeting: a Hello that the partner accepts, and an id and a seed that both sides derive alike."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gossamer.peer.link.messages import Opened
from gossamer.peer.meeting.interface import Greeting, pairing
from gossamer.protocol.errors import BadMessage, PeerMisbehaved, RefusalCode, Refused
from gossamer.protocol.identity import Identity
from gossamer.protocol.messages.messages import Hello, RunPhase
from gossamer.protocol.messages.terms import check_hello
from tests.peer.two_sides import NOW_S, PLAIN, SEEDS, SKETCHED, TERMS, Table, membership

A, B = (Identity(seed) for seed in SEEDS)
OPENED = Opened(1, tokens=640, global_step=100, phase=RunPhase.TRAIN)


def first(fragment: int = SKETCHED) -> Greeting:
    return Greeting(membership(A), B.peer_id, fragment, b"n" * 16, NOW_S)


def answering(hello: Hello, nonce: bytes = b"p" * 16) -> Greeting:
    return Greeting(membership(B), A.peer_id, hello.fragment, nonce, NOW_S, hello)


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


def test_an_answer_to_another_hello_is_rejected() -> None:
    hello = first().hello(OPENED)
    other = replace(hello, nonce=b"o" * 16).signed(A)
    with pytest.raises(BadMessage):
        first().check_answer(answering(other).hello(OPENED), hello)


def test_an_answer_that_echoes_our_nonce_or_is_forged_is_misbehaviour() -> None:
    hello = first().hello(OPENED)
    answer = answering(hello).hello(OPENED)
    for wrong in (answering(hello, nonce=b"n" * 16).hello(OPENED), replace(answer, tokens=9), replace(answer).signed(A)):
        with pytest.raises(PeerMisbehaved):
            first().check_answer(wrong, hello)


def test_a_partner_whose_clock_is_too_far_is_refused() -> None:
    hello = first().hello(OPENED)
    near, far = (replace(OPENED, global_step=100 + TERMS.max_clock_gap_steps + extra) for extra in (0, 1))
    first().check_answer(answering(hello).hello(near), hello)
    with pytest.raises(Refused) as caught:
        first().check_answer(answering(hello).hello(far), hello)
    assert caught.value.code is RefusalCode.STEP_TOO_FAR


def test_a_training_peer_refuses_the_last_averaging_and_a_finished_peer_still_trains() -> None:
    done = replace(OPENED, phase=RunPhase.FINISH)
    hello = first().hello(done)
    assert hello.phase is RunPhase.FINISH
    with pytest.raises(Refused) as caught:
        answering(hello).hello(OPENED)
    assert caught.value.code is RefusalCode.WRONG_PHASE
    assert answering(hello).hello(done).phase is RunPhase.FINISH
    assert answering(first().hello(OPENED)).hello(done).phase is RunPhase.TRAIN


def test_both_sides_derive_the_same_unique_id_and_seed() -> None:
    initiator, responder = Table(SKETCHED).run()
    (hello, *_), (answer, *_) = initiator.sent, responder.sent
    assert isinstance(hello, Hello) and isinstance(answer, Hello)
    agreed = pairing(hello, answer)
    assert agreed == initiator.meeting.pairing == responder.meeting.pairing and agreed.phase is RunPhase.TRAIN
    assert len(agreed.meeting_id) == 16 and 0 <= agreed.seed < 2**63
    assert pairing(replace(hello, phase=RunPhase.FINISH), answer) == replace(agreed, phase=RunPhase.FINISH)
    others = [
        pairing(replace(hello, nonce=b"o" * 16), answer),
        pairing(hello, replace(answer, nonce=b"o" * 16)),
        pairing(replace(hello, fragment=PLAIN), answer),
        pairing(replace(hello, run_id=b"r" * 32), answer),
        pairing(answer, hello),
    ]
    assert len({agreed.meeting_id, *(other.meeting_id for other in others)}) == len({agreed.seed, *(o.seed for o in others)}) == 6
