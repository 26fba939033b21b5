"""Say what a run costs in a day, and ask once before it costs much: on a terminal the operator, elsewhere a limit answers."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Final, TextIO

from gossamer.cli.screen import Screen
from gossamer.cli.terminal_question import TerminalQuestion
from gossamer.peer.machine.bill import DAYS, SAID_FACTOR, Bill, bill
from gossamer.peer.machine.config import PeerConfig, saved_settings
from gossamer.peer.machine.events import TrafficExpected
from gossamer.peer.machine.home import Home
from gossamer.peer.machine.status import Status
from gossamer.peer.machine.units import percent_text, size_bytes
from gossamer.protocol.errors import BadSettings

LOOPBACK: Final = ("127.", "::1")  # a peer that listens there meets only peers of this machine
LIFT: Final = "`peer config monthly_traffic unlimited` lifts the limit, and `peer config monthly_traffic SIZE` sets another"
STEADY_S: Final = 60.0  # with meetings, before a figure counts: first steps are slow, and meetings set the interval
LOW_USE: Final = "a smaller model that each peer holds whole would use the device better"


class CostQuestion:
    """Watches a peer's status on its event loop. `stdin` is read only if it is the terminal of a command in the foreground."""

    def __init__(self, config: PeerConfig, drawn: Screen, stdin: TextIO = sys.stdin, now_s: Callable[[], float] = time.monotonic) -> None:
        self._config = config
        self._drawn = drawn
        self._question = TerminalQuestion(config.home, drawn, stdin)
        self._now_s = now_s
        self._met_s: float | None = None  # when a measured figure was first seen after a meeting
        self._said: Bill | None = None
        self._is_settled = not config.is_unasked
        self._is_use_settled = not config.least_use
        self._allowed_bytes = size_bytes(config.unasked_traffic)  # of a month
        self._taken = ""  # the limit that came of the last answer

    def look(self, status: Status) -> None:
        """Say the cost when it is first known and when it has changed much; settle once whether it may be so high, for so little use."""
        if not status.expected_traffic or self._config.alone or self._config.listen.startswith(LOOPBACK):
            return
        expected = TrafficExpected(**{name: value for name, value in status.expected_traffic.items() if value is not None})
        found = bill(expected, self._config)
        is_steady = found.is_measured and self._has_met_for_long(status)
        is_told = self._said is not None and 1 / SAID_FACTOR < found.day_bytes / max(1.0, self._said.day_bytes) < SAID_FACTOR
        if (is_steady or not found.is_measured) and not is_told:
            self._said = found
            self._drawn.print_line(f"cost: {found.sentence()}")
        if self._question.is_open:
            return
        if not self._is_use_settled and expected.use < self._config.least_use:  # false where it is not known
            self._settle_use(expected.use)
        elif is_steady and not self._is_settled and found.month_bytes > self._allowed_bytes:
            self._settle(found)

    def _has_met_for_long(self, status: Status) -> bool:
        """Return whether the figures rest on a minute with meetings: an assumed one, a first one, one of a peer alone is far off."""
        if self._met_s is None and (status.meetings["completed"] or status.hops.get("sent")):
            self._met_s = self._now_s()
        return self._met_s is not None and self._now_s() - self._met_s >= STEADY_S

    # ------------------------------------------------------------------ bytes

    def _settle(self, found: Bill) -> None:
        if self._has_operator_decided():
            self._is_settled = True
            return
        if not self._question.can_ask:
            self._is_settled = True
            self._take_limit(f"more than {self._config.unasked_traffic} a month, and there is no terminal to ask on")
            return
        offer = offered(found.month_bytes)

        def hear(line: str) -> str:
            match answer := line.lower():
                case "y" | "yes":
                    self._allowed_bytes = size_bytes(offer)  # if more is measured, the question comes again
                    self._limit(offer)
                case "n" | "no":
                    self._leave()
                case "":
                    self._take_limit("no answer")
                case _ if trouble := _size_trouble(line):
                    return f"{trouble}; answer yes, no, or a size"
                case _:
                    self._limit(line)
            self._is_settled = answer not in ("y", "yes")
            return ""

        self._question.ask(
            f"use up to {offer} a month? Answer yes, no (leave the run), or another limit, like 300 GB or unlimited. "
            "The peer goes on until you answer:",
            hear,
            self._take_background,
        )

    def _has_operator_decided(self) -> bool:
        """Return whether `peer config` has set a limit since the start; one of an answer here is asked about again when it is too low."""
        with suppress(BadSettings):  # of a file that cannot be read, which `peer config` reports
            return saved_settings(Home(self._config.home)).get("monthly_traffic") not in (None, self._taken)
        return False

    def _take_background(self) -> None:
        self._is_settled = True
        self._take_limit("in the background")

    def _take_limit(self, why: str) -> None:
        self._limit(self._config.unasked_traffic, f"{why}: ")

    def _limit(self, size: str, why: str = "") -> None:
        self._taken = size
        days = self._said.days_of(size_bytes(size)) if self._said else DAYS
        lasts = f", which lasts {days:.2g} days of a month at this rate" if days < DAYS else ""
        said = f"{why}monthly_traffic = {size} holds from now on{lasts}; {LIFT}"
        self._question.request({"verb": "set", "key": "monthly_traffic", "value": size}, said)

    def _leave(self, why: str = "") -> None:
        self._question.request({"verb": "leave"}, f"{why}leaving")

    # ------------------------------------------------------------------ use of the device

    def _settle_use(self, use: float) -> None:
        self._is_use_settled = True
        words = f"this line feeds only {percent_text(use)} of this device with micro-batches: {LOW_USE}"
        if not self._question.can_ask:
            self._leave(f"{words}; --least-use 0 joins nevertheless, and there is no terminal to ask on: ")
            return

        def hear(line: str) -> str:
            match line.lower():
                case "y" | "yes":
                    said = "least_use = 0 holds from now on: this peer trains, however little of the device the line feeds"
                    self._question.request({"verb": "set", "key": "least_use", "value": "0"}, said)
                case "n" | "no":
                    self._leave()
                case _:
                    return "answer yes or no"
            return ""

        self._question.ask(
            f"{words}. Train nevertheless? Answer yes, or no (leave the run). The peer goes on until you answer:",
            hear,
            lambda: self._leave("in the background: "),
        )


def offered(num_bytes: float) -> str:
    """Return a limit for so many bytes, with a reserve, as the operator may write it too."""
    gigabytes = round_up(num_bytes / 1e9)
    return f"{gigabytes:g} GB" if gigabytes < 1000 else f"{gigabytes / 1000:g} TB"


def round_up(value: float) -> float:
    """Round up to two digits, with a reserve of a tenth."""
    scale = 10.0 ** (math.floor(math.log10(max(value, 1.0))) - 1)
    return math.ceil(1.1 * value / scale) * scale


def _size_trouble(text: str) -> str:
    try:
        size_bytes(text)
    except ValueError as error:
        return f"{text!r} is no size: {error}"
    return ""
