from __future__ import annotations

import pytest

from protocol.errors import (
    MEANING,
    BadContents,
    BadInvite,
    BadMessage,
    BadSignature,
    DeadlineExceeded,
    GossamerError,
    PeerGone,
    PeerMisbehaved,
    RefusalCode,
    Refused,
    Unreachable,
    refusal_code,
)
from protocol.wire import peer_pb2


def test_codes_are_those_of_the_wire() -> None:
    wire = {name.removeprefix("REFUSAL_"): number for name, number in peer_pb2.RefusalCode.items() if number}
    assert wire == {code.name: code.value for code in RefusalCode}


def test_every_code_has_its_own_meaning_and_hint() -> None:
    assert set(MEANING) == set(RefusalCode)
    assert len({says for says, _ in MEANING.values()}) == len(RefusalCode)
    for says, hint in MEANING.values():
        assert says and hint and not says.endswith(".")


@pytest.mark.parametrize("code", RefusalCode)
def test_refused_carries_its_code_both_ways(code: RefusalCode) -> None:
    refused = Refused(code, "detail")
    assert refusal_code(refused) is code
    assert "(detail)" in str(refused)
    assert refused.hint == MEANING[code][1]
    assert str(Refused(code)) == MEANING[code][0]


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (BadMessage("x"), RefusalCode.BAD_MESSAGE),
        (BadSignature("x"), RefusalCode.BAD_MESSAGE),
        (BadContents("x"), RefusalCode.GATE),
        (DeadlineExceeded("x"), RefusalCode.TOO_SLOW),
        (PeerGone("x"), None),
        (Unreachable("x"), None),
        (BadInvite("x"), None),
    ],
    ids=lambda value: type(value).__name__,
)
def test_errors_tell_the_partner_what_it_can_use(error: GossamerError, code: RefusalCode | None) -> None:
    assert refusal_code(error) is code


def test_every_kind_of_misbehaviour_has_a_code() -> None:
    for kind in (PeerMisbehaved, *PeerMisbehaved.__subclasses__()):
        assert refusal_code(kind("x")) is not None
