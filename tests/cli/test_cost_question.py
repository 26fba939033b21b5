"""What a run costs is said, and a high cost is allowed by the operator or limited."""

from __future__ import annotations

import asyncio
import io
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gossamer.cli.cost_question import STEADY_S, CostQuestion, offered, round_up
from gossamer.cli.screen import PlainLines
from gossamer.peer.machine.config import PeerConfig, save_settings
from gossamer.peer.machine.control_socket import serving
from gossamer.peer.machine.home import Home
from gossamer.peer.machine.runtime_folder import runtime_folder
from gossamer.peer.machine.status import Status


def status(day_bytes: float, *, is_measured: bool = False, has_met: bool = True) -> Status:
    received = {"day_received": day_bytes, "day_hops": 0.0}
    expected = {"day_bytes": day_bytes, "inner_steps": 4, "step_s": 1.0, "is_measured": is_measured, **received}
    return replace(Status(), expected_traffic=expected, meetings=Status().meetings | {"completed": int(has_met)})


class Trial:
    """A question to an operator at a terminal, and a peer that notes what it is told."""

    def __init__(self, folder: Path, *, has_terminal: bool, **settings: Any) -> None:
        self.told: list[dict[str, Any]] = []
        self.lines = io.StringIO()
        self.now_s = 0.0
        self._home = Home(folder)
        self._home.create()
        self._config = PeerConfig.model_validate({"home": folder, **settings})
        self._master, slave = os.openpty()
        self._terminal = os.fdopen(slave, "r")
        self._stdin = self._terminal if has_terminal else io.StringIO()

    def answer(self, text: str) -> None:
        os.write(self._master, text.encode())

    def typed(self) -> str:
        """Return the line that nobody has read."""
        return self._terminal.readline()

    def close(self) -> None:
        self._terminal.close()
        os.close(self._master)

    def measured(self, *day_bytes: float, **more: Any) -> Callable[[CostQuestion], None]:
        """Return an act: each of these costs of a day is measured for a minute."""

        def looks(question: CostQuestion) -> None:
            for one in day_bytes:
                found = status(one, is_measured=True)
                found = replace(found, expected_traffic=found.expected_traffic | more)
                question.look(found)
                self.now_s += STEADY_S
                question.look(found)

        return looks

    def run(self, act: Callable[[CostQuestion], None], num_told: int) -> str:
        """Act, and wait until the peer has been told so much; return the lines shown."""

        def tell(request: dict[str, Any]) -> dict[str, Any]:
            self.told.append(request)
            return {}

        async def main() -> None:
            with runtime_folder(0) as runtime:
                async with serving(self._home, runtime, tell), asyncio.timeout(20):
                    act(CostQuestion(self._config, PlainLines(self.lines), self._stdin, lambda: self.now_s))
                    while len(self.told) < num_told:  # noqa: ASYNC110 (it comes from another thread)
                        await asyncio.sleep(0.01)

        asyncio.run(main())
        return self.lines.getvalue()


New = Callable[..., Trial]


@pytest.fixture
def new(tmp_path: Path) -> Iterator[New]:
    made: list[Trial] = []

    def trial(*, has_terminal: bool, **settings: Any) -> Trial:
        made.append(Trial(tmp_path, has_terminal=has_terminal, **settings))
        return made[-1]

    yield trial
    for one in made:
        one.close()


@pytest.fixture(autouse=True)
def in_foreground(monkeypatch: pytest.MonkeyPatch) -> None:
    """The terminal of a test is no controlling terminal."""
    monkeypatch.setattr(os, "tcgetpgrp", lambda descriptor: os.getpgrp())


def limit(size: str) -> dict[str, Any]:
    return {"verb": "set", "key": "monthly_traffic", "value": size}


def test_without_a_terminal_the_default_limit_holds_and_is_said(new: New) -> None:
    trial = new(has_terminal=False)
    shown = trial.run(trial.measured(13.3e9), 1)
    assert trial.told == [limit("300 GB")]
    assert "about 13.3 GB a day up and as much down, 798 GB a month" in shown
    assert (
        "monthly_traffic = 300 GB holds from now on, which lasts 11 days of a month at this rate" in shown
        and "`peer config monthly_traffic unlimited` lifts" in shown
    )


@pytest.mark.parametrize("has_terminal", [False, True])
def test_an_assumed_or_first_figure_is_neither_asked_about_nor_a_limit(new: New, has_terminal: bool) -> None:
    """The first steps are slow, and a peer alone would call at each: it was asked for 3.6 TB, where the run took half of that."""
    trial = new(has_terminal=has_terminal)

    def looks(question: CostQuestion) -> None:
        question.look(status(53e9))
        question.look(status(500e9, is_measured=True, has_met=False))
        trial.now_s += 10 * STEADY_S
        question.look(status(20e9, is_measured=True))
        trial.now_s += STEADY_S - 1
        question.look(status(100e9, is_measured=True))

    shown = trial.run(looks, 0)
    assert shown.count("cost: ") == 1 and "assumed" in shown and "month?" not in shown and not trial.told


def test_a_line_typed_after_the_peer_went_to_the_background_is_left_to_the_shell(new: New, monkeypatch: pytest.MonkeyPatch) -> None:
    trial = new(has_terminal=True)

    def ask_then_leave(question: CostQuestion) -> None:
        trial.measured(13.3e9)(question)
        monkeypatch.setattr(os, "tcgetpgrp", lambda descriptor: os.getpgrp() + 1)
        trial.answer("yes\n")

    shown = trial.run(ask_then_leave, 1)
    assert trial.told == [limit("300 GB")] and "in the background: monthly_traffic = 300 GB" in shown
    assert trial.typed() == "yes\n"


@pytest.mark.parametrize(
    ("typed", "request_", "settings"),
    [
        ("yes\n", limit("880 GB"), {}),
        ("500 GB\n", limit("500 GB"), {}),
        ("lots\nunlimited\n", limit("unlimited"), {}),
        ("no\n", {"verb": "leave"}, {}),
        ("\n", limit("1 TB"), {"unasked_traffic": "1 TB", "schedule": "always"}),
    ],
)
def test_the_operator_answers_at_the_terminal(new: New, typed: str, request_: dict[str, Any], settings: dict[str, Any]) -> None:
    trial = new(has_terminal=True, **settings)
    trial.answer(typed)
    day_bytes = 13.3e9 if not settings else 50e9
    shown = trial.run(trial.measured(day_bytes), 1)
    assert trial.told == [request_]
    assert "a month? Answer yes, no" in shown
    assert ("'lots' is no size" in shown) is ("lots" in typed)


def test_a_yes_is_asked_for_again_only_when_more_is_measured(new: New) -> None:
    trial = new(has_terminal=True)
    asked: list[CostQuestion] = []

    def first(question: CostQuestion) -> None:
        asked.append(question)
        trial.measured(13.3e9)(question)

    trial.answer("yes\n")
    trial.run(first, 1)
    asked[0].look(status(14e9, is_measured=True))
    assert trial.lines.getvalue().count("a month?") == 1
    trial.answer("yes\n")
    trial.run(lambda _: asked[0].look(status(60e9, is_measured=True)), 2)
    assert trial.lines.getvalue().count("a month?") == 2
    assert trial.told[1] == limit("4 TB")


@pytest.mark.parametrize(
    "settings", [{"monthly_traffic": "unlimited"}, {"monthly_traffic": "900 GB"}, {"unasked_traffic": "1 TB"}, {"schedule": "00:00-06:00"}]
)
def test_a_decided_or_low_cost_is_said_and_not_asked_for(new: New, settings: dict[str, Any]) -> None:
    trial = new(has_terminal=True, **settings)
    shown = trial.run(trial.measured(13.3e9), 0)
    assert "cost: about" in shown and "a month?" not in shown and not trial.told


@pytest.mark.parametrize("size", ["unlimited", "900 GB"])
def test_a_limit_that_the_operator_sets_meanwhile_is_kept(new: New, tmp_path: Path, size: str) -> None:
    trial = new(has_terminal=False)

    def looks(question: CostQuestion) -> None:
        save_settings(Home(tmp_path), {"monthly_traffic": size})
        trial.measured(13.3e9)(question)

    assert "holds from now on" not in trial.run(looks, 0) and not trial.told


LOW_USE = {"day_received": 13.2e9, "day_hops": 13e9, "use": 0.04}


def low_use(day_bytes: float = 1e9) -> Status:
    found = status(day_bytes, is_measured=True)
    return replace(found, expected_traffic=found.expected_traffic | LOW_USE)


def test_a_line_that_feeds_little_of_the_device_ends_the_peer_where_nobody_can_be_asked(new: New) -> None:
    trial = new(has_terminal=False)
    shown = trial.run(lambda question: question.look(low_use()), 1)
    assert trial.told == [{"verb": "leave"}]
    assert "this line feeds only 4 % of this device" in shown and "--least-use 0 joins nevertheless" in shown


@pytest.mark.parametrize(
    ("typed", "request_"), [("maybe\nyes\n", {"verb": "set", "key": "least_use", "value": "0"}), ("no\n", {"verb": "leave"})]
)
def test_the_operator_answers_whether_little_use_is_enough(new: New, typed: str, request_: dict[str, Any]) -> None:
    trial = new(has_terminal=True)
    trial.answer(typed)
    shown = trial.run(lambda question: question.look(low_use()), 1)
    assert trial.told == [request_]
    assert "Train nevertheless? Answer yes, or no" in shown and ("answer yes or no" in shown) is ("maybe" in typed)


@pytest.mark.parametrize("settings", [{"least_use": 0}, {"least_use": 0.02}, {"listen": "127.0.0.1"}])
def test_little_use_that_is_allowed_is_not_asked_for(new: New, settings: dict[str, Any]) -> None:
    trial = new(has_terminal=False, **settings)
    trial.run(lambda question: question.look(low_use()), 0)
    assert not trial.told


def test_one_question_is_asked_after_the_other(new: New) -> None:
    trial = new(has_terminal=True)
    trial.answer("yes\n")
    assert trial.run(trial.measured(20e9, **LOW_USE), 1).count("Answer yes") == 1


def test_both_directions_are_in_the_cost(new: New) -> None:
    trial = new(has_terminal=False, least_use=0)
    shown = trial.run(trial.measured(14e9, **LOW_USE), 1)
    assert "cost: about 14.0 GB a day up and 13.2 GB down, 816 GB a month, 93 % of it by micro-batches, the rest by meetings" in shown


def test_a_peer_on_loopback_costs_nothing(new: New) -> None:
    trial = new(has_terminal=True, listen="127.0.0.1")
    assert trial.run(trial.measured(13.3e9), 0) == ""


def test_the_cost_is_said_again_when_it_has_changed_much(new: New) -> None:
    trial = new(has_terminal=False, monthly_traffic="unlimited")
    assert trial.run(trial.measured(10e9, 11e9, 15e9, 40e9, 5e9), 0).count("cost: ") == 3


@pytest.mark.parametrize(("value", "rounded"), [(797.0, 880.0), (1.0, 1.1), (4212.0, 4700.0), (0.0, 0.0)])
def test_an_offer_is_rounded_up_with_a_reserve(value: float, rounded: float) -> None:
    assert round_up(value) == pytest.approx(rounded)


@pytest.mark.parametrize(("month_bytes", "words"), [(798e9, "880 GB"), (3.19e12, "3.6 TB")])
def test_an_offer_has_the_unit_of_the_cost(month_bytes: float, words: str) -> None:
    assert offered(month_bytes) == words
