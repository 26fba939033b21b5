from __future__ import annotations

from dataclasses import replace

import pytest

from peer import requests as ask
from peer.greeting import Greeting, pairing
from peer.requests import Stage
from protocol.errors import BadMessage, BadSignature
from protocol.identity import Identity
from protocol.messages import Hello, Phase, RefusalCode, Refused
from protocol.terms import check_hello
from tests.peer.two_sides import NOW_S, PLAIN, SEEDS, SKETCHED, TERMS, membership

ME, PARTNER = Identity(SEEDS[0]), Identity(SEEDS[1])
OPENED = ask.Opened(1, 640, 100, Stage.TRAIN)
FINISHED = ask.Opened(1, 640, 100, Stage.FINISH)


def opening(fragment: int = PLAIN) -> Greeting:
    return Greeting(membership(ME), PARTNER.peer_id, fragment, b"n" * 16, NOW_S)


def answering(hello: Hello) -> Greeting:
    return Greeting(membership(PARTNER), ME.peer_id, hello.fragment, b"p" * 16, NOW_S, hello)


def test_an_opening_hello_passes_the_partners_checks() -> None:
    hello = opening(SKETCHED).hello(OPENED)
    check_hello(hello, TERMS, PARTNER.peer_id, ME.peer_id, NOW_S)
    assert (hello.tokens, hello.clock_steps, hello.phase) == (640, 100, Phase.TRAIN)
    assert (hello.sketch_bytes, hello.payload_bytes) == (64, 900)


def test_an_answer_repeats_the_nonce_and_passes_our_checks() -> None:
    hello = opening().hello(OPENED)
    answer = answering(hello).hello(OPENED)
    assert answer.partner_nonce == hello.nonce
    opening().check_answer(answer, hello)


def test_an_answer_takes_the_phase_of_the_question() -> None:
    hello = opening().hello(OPENED)
    assert answering(hello).hello(FINISHED).phase is Phase.TRAIN
    finished = opening().hello(FINISHED)
    assert finished.phase is Phase.FINISH
    assert answering(finished).hello(FINISHED).phase is Phase.FINISH


def test_a_trainer_that_trains_does_not_join_the_last_averaging() -> None:
    with pytest.raises(Refused) as refusal:
        answering(opening().hello(FINISHED)).hello(OPENED)
    assert refusal.value.code is RefusalCode.WRONG_PHASE


def test_a_wrong_answer_is_refused() -> None:
    own = opening().hello(OPENED)
    answer = answering(own).hello(OPENED)
    with pytest.raises(BadMessage):
        opening().check_answer(replace(answer, partner_nonce=b"x" * 16, signature=b"").signed(PARTNER), own)
    with pytest.raises(BadSignature):
        opening().check_answer(replace(answer, tokens=1), own)
    with pytest.raises(Refused):
        opening().check_answer(replace(answer, clock_steps=100_000, signature=b"").signed(PARTNER), own)


def test_both_sides_derive_the_same_pairing_and_every_nonce_another() -> None:
    own = opening().hello(OPENED)
    answer = answering(own).hello(OPENED)
    assert pairing(own, answer) == pairing(own, answer)
    others = [
        pairing(replace(own, nonce=b"m" * 16), answer),
        pairing(own, replace(answer, nonce=b"m" * 16)),
        pairing(replace(own, fragment=SKETCHED), answer),
        pairing(replace(own, run_id=b"r" * 32), answer),
    ]
    assert len({pairing(own, answer).meeting_id, *(other.meeting_id for other in others)}) == 5
    assert len({pairing(own, answer).seed, *(other.seed for other in others)}) == 5
    assert pairing(replace(own, phase=Phase.FINISH), answer).stage is Stage.FINISH
