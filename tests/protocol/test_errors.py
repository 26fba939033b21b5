from __future__ import annotations

import pytest

from protocol import errors
from protocol.errors import ExitCode, GossamerError

LEAVES = sorted(
    {kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, GossamerError)}, key=lambda kind: kind.__name__
)


@pytest.mark.parametrize("kind", [kind for kind in LEAVES if kind is not errors.Refused], ids=lambda kind: kind.__name__)
def test_every_error_carries_its_hint_and_a_documented_exit_code(kind: type[GossamerError]) -> None:
    error = kind("what happened", hint="what to do")
    assert (str(error), error.hint) == ("what happened", "what to do")
    assert error.exit_code in ExitCode
    assert kind.__doc__


@pytest.mark.parametrize("kind", LEAVES, ids=lambda kind: kind.__name__)
def test_the_drawn_tree_is_the_real_one(kind: type[GossamerError]) -> None:
    lines = (errors.__doc__ or "").splitlines()
    depth = {line.strip("- ").split()[0]: line.index("-") for line in lines if line.lstrip().startswith("- ")}
    parent = kind.__mro__[1]
    assert depth[kind.__name__] == (0 if kind is GossamerError else depth[parent.__name__] + 2)


def test_exit_codes_are_those_that_scripts_rely_on() -> None:
    assert {code.name: code.value for code in ExitCode} == {
        "DONE": 0,
        "OUR_FAULT": 1,
        "BAD_INPUT": 2,
        "SWARM_UNREACHABLE": 3,
        "REFUSED_BY_RUN": 4,
        "VERSION_MISMATCH": 10,
        "INTERRUPTED": 130,
    }
