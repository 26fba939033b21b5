"""The page on meetings shows the machine's table. `python -m tests.peer.meeting.test_table` writes it into the page again."""

from __future__ import annotations

from pathlib import Path

import pytest

from gossamer.peer.meeting.interface import DECIDED, MeetingState, Role
from gossamer.peer.meeting.machine import TABLE, Automatic, Transition

PAGE = Path(__file__).parents[3] / "docs" / "concepts" / "meeting.md"
BEGIN, END = "<!-- table: written by tests/peer/meeting/test_table.py -->\n", "<!-- end of the table -->\n"
EVERY = tuple(state for state in MeetingState if state not in {*DECIDED, MeetingState.OVER})


def states(transition: Transition) -> str:
    return "every state before RECORDING" if transition.states == EVERY else ", ".join(state.name for state in transition.states)


def events(transition: Transition) -> str:
    names = ", ".join("-" if event is Automatic else f"`{event.__name__}`" for event in transition.events)
    return f"{names}: {transition.guard.__doc__}" if transition.guard else names


def row(transition: Transition) -> str:
    action = (transition.action.__doc__ or "").splitlines()[0].removesuffix(".")
    next_state = transition.next_state.name if transition.next_state else "-"
    cells = [
        states(transition),
        events(transition),
        transition.role.value if transition.role else "both",
        action,
        next_state,
        transition.timer.value if transition.timer else "-",
    ]
    return f"| {' | '.join(cells)} |\n"


def rendered() -> str:
    header = "| state | event: guard | side | action | next state | timer |\n|---|---|---|---|---|---|\n"
    return header + "".join(map(row, TABLE))


def parts() -> tuple[str, str, str]:
    """Return the page before the table, the table, and the page after it."""
    before, begin, rest = PAGE.read_text().partition(BEGIN)
    table, end, after = rest.partition(END)
    assert begin and end, "the page has no place for the table"
    return before, table, after


def test_the_page_shows_the_table_of_the_code() -> None:
    assert parts()[1] == rendered(), "run python -m tests.peer.meeting.test_table"


@pytest.mark.parametrize("transition", TABLE, ids=row)
def test_no_row_is_hidden_behind_an_earlier_one(transition: Transition) -> None:
    """Some state, event and side reach the row: no earlier row without a guard takes them all."""
    earlier = TABLE[: TABLE.index(transition)]

    def is_reached(role: Role, state: MeetingState, event: type) -> bool:
        return not any(
            other.guard is None and other.role in (None, role) and state in other.states and event in other.events for other in earlier
        )

    roles = [transition.role] if transition.role else list(Role)
    assert any(is_reached(role, state, event) for role in roles for state in transition.states for event in transition.events)


@pytest.mark.parametrize("transition", TABLE, ids=row)
def test_a_row_that_ends_the_meeting_has_the_state_over_and_no_timer(transition: Transition) -> None:
    ends = (transition.action.__doc__ or "").startswith("End as ")
    assert ends == (transition.next_state is MeetingState.OVER)
    assert not ends or transition.timer is None


if __name__ == "__main__":
    before, _, after = parts()
    PAGE.write_text(before + BEGIN + rendered() + END + after)
