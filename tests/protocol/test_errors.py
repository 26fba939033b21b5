from __future__ import annotations

import pytest

from gossamer.protocol import errors
from gossamer.protocol.errors import ExitCode, GossamerError, RefusalCode, Refused, short_reason
from gossamer.protocol.wire import peer_pb2

LEAVES = sorted(
    {kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, GossamerError)}, key=lambda kind: kind.__name__
)


@pytest.mark.parametrize("kind", [kind for kind in LEAVES if kind is not errors.Refused], ids=lambda kind: kind.__name__)
def test_every_error_carries_its_hint_and_a_documented_exit_code(kind: type[GossamerError]) -> None:
    error = kind("what happened", hint="what to do")
    assert (str(error), error.hint) == ("what happened", "what to do")
    assert error.exit_code in ExitCode
    assert kind.__doc__


def test_what_others_wrote_draws_nothing_on_the_terminal() -> None:
    """A column of a stranger's data set may be in a hint, for example."""
    error = GossamerError("two lines,\nno \x1b[2J", hint="its columns: \x9b2J\u202e\nhint: run this")
    assert (str(error), error.hint) == ("two lines,\nno  [2J", "its columns:  2J  hint: run this")


def test_exit_codes_are_stable() -> None:
    assert {code.name: code.value for code in ExitCode} == {
        "DONE": 0,
        "OUR_FAULT": 1,
        "BAD_INPUT": 2,
        "SWARM_UNREACHABLE": 3,
        "REFUSED_BY_RUN": 4,
        "VERSION_MISMATCH": 10,
        "INTERRUPTED": 130,
    }


def test_refusal_codes_match_the_protobuf_enum() -> None:
    wire = {name.removeprefix("REFUSAL_"): number for name, number in peer_pb2.RefusalCode.items() if number}
    assert wire == {code.name: code.value for code in RefusalCode}


def test_every_code_has_its_own_message_and_hint() -> None:
    assert len({code.message for code in RefusalCode}) == len(RefusalCode)
    for code in RefusalCode:
        assert code.message and code.hint and not code.message.endswith(".")


@pytest.mark.parametrize("code", RefusalCode)
def test_refused_carries_its_code_message_and_hint(code: RefusalCode) -> None:
    refused = Refused(code, "detail")
    assert refused.code is code
    assert "(detail)" in str(refused)
    assert refused.hint == code.hint
    assert str(Refused(code)) == code.message


def test_the_reason_is_extracted_from_the_message_of_p2pd() -> None:
    output = (
        "p2pd: failed to dial 12D3: all dials failed * [/ip4/203.0.113.5/tcp/4001] dial tcp4 203.0.113.5:4001: connect: no route to host"
    )
    assert short_reason(output) == "no route to host"
    assert short_reason("something new") == "something new"
