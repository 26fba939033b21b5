"""Every state that some process can put a peer in has a reason and a way out."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from gossamer.peer.machine.states import STATES, changed

ROOT = Path(__file__).parents[3]
REPORTED = {
    "ProcessReported",
    "changed",
    "_set_final_state",
    "_report_state",
    "StateChanged",
}  # calls that begin with a state and its reason
PROCESS_ONLY = {"ready"}  # a report of the trainer to the supervisor, which waits for the node's


def reported_states() -> Iterator[tuple[str, str]]:
    """Yield each state that the code names where it reports one, with the place."""
    for path in (ROOT / "peer").rglob("*.py"):
        for call in ast.walk(ast.parse(path.read_text())):
            if not isinstance(call, ast.Call) or len(call.args) < 2:
                continue
            name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
            if name in REPORTED and isinstance(call.args[0], ast.Constant):
                yield call.args[0].value, f"{path.relative_to(ROOT)}:{call.lineno}"


def test_the_table_holds_exactly_the_reported_states() -> None:
    reported = dict(reported_states())
    assert set(reported) - PROCESS_ONLY == set(STATES), reported


@pytest.mark.parametrize("state", STATES)
def test_every_state_has_a_reason_and_a_way_out(state: str) -> None:
    event = changed(state)
    assert event.reason and event.way_out
    assert changed(state, "why", "until when") == type(event)(state, "why", "until when")
