"""Say what a run costs in a day, and ask once before it costs much: on a terminal the operator, elsewhere a limit answers."""

from __future__ import annotations

import asyncio
import math
import os
import sys
from functools import partial
from pathlib import Path
from typing import Final, TextIO

from gossamer.cli.screen import Screen
from gossamer.peer.machine.bill import SAID_FACTOR, Bill, bill
from gossamer.peer.machine.config import PeerConfig
from gossamer.peer.machine.control_socket import ask
from gossamer.peer.machine.status import Status
from gossamer.peer.machine.units import size_bytes
from gossamer.protocol.errors import BadSettings

LOOPBACK: Final = ("127.", "::1")  # a peer that listens there meets only peers of this machine
LIFT: Final = "`peer config monthly_traffic unlimited` lifts the limit, and `peer config monthly_traffic SIZE` sets another"


class CostQuestion:
    """Watches a peer's status on its event loop. `stdin` is read only if it is the terminal of a command in the foreground."""

    def __init__(self, config: PeerConfig, drawn: Screen, stdin: TextIO = sys.stdin) -> None:
        self._config = config
        self._drawn = drawn
        self._stdin = stdin
        self._said: Bill | None = None
        self._is_settled = not config.is_unasked
        self._allowed_bytes = size_bytes(config.unasked_traffic)  # of a month
        self._offer = ""  # the size that a yes allows
        self._work: list[asyncio.Future[object]] = []  # requests to the peer, which answers on this loop

    def look(self, status: Status) -> None:
        """Say the cost when it is first known and when it has changed much; settle once whether it may be so high."""
        if not status.expected_traffic or self._config.alone or self._config.listen.startswith(LOOPBACK):
            return
        expected = status.expected_traffic
        found = bill(expected["day_bytes"], expected["inner_steps"], expected["step_s"], self._config, is_measured=expected["is_measured"])
        if self._said is None or not 1 / SAID_FACTOR < found.day_bytes / max(1.0, self._said.day_bytes) < SAID_FACTOR:
            self._said = found
            self._drawn.print_line(f"cost: {found.sentence()}")
        if not self._is_settled and found.month_bytes > self._allowed_bytes and not self._offer:
            self._settle(found)

    def _settle(self, found: Bill) -> None:
        if not _is_in_foreground(self._stdin):
            if found.is_measured:  # an assumed duration of a step is no reason for a limit that stays
                self._is_settled = True
                self._take_limit(f"more than {self._config.unasked_traffic} a month, and there is no terminal to ask on")
            return
        self._offer = f"{round_up(found.month_bytes / 1e9):g} GB"
        self._drawn.hold()
        self._drawn.print_line(
            f"use up to {self._offer} a month? Answer yes, no (leave the run), or another limit, like 300 GB or unlimited. "
            "The peer goes on until you answer:"
        )
        asyncio.get_running_loop().add_reader(self._stdin.fileno(), self._read_answer)

    def _read_answer(self) -> None:
        if not _is_in_foreground(self._stdin):  # Ctrl-Z and bg since the question: the shell reads the line
            self._close(is_settled=True)
            self._take_limit("in the background")
            return
        line = self._stdin.readline()
        answer, offer = line.strip().lower(), self._offer
        if answer not in ("y", "yes", "n", "no", "") and (trouble := _size_trouble(line.strip())):
            self._drawn.print_line(f"{trouble}; answer yes, no, or a size")
            return
        self._close(is_settled=answer not in ("y", "yes"))
        match answer:
            case "y" | "yes":
                self._allowed_bytes = size_bytes(offer)  # if more is measured, the question comes again
                self._limit(offer)
            case "n" | "no":
                self._ask({"verb": "leave"}, "leaving")
            case "":
                self._take_limit("no answer")
            case _:
                self._limit(line.strip())

    def _close(self, *, is_settled: bool) -> None:
        asyncio.get_running_loop().remove_reader(self._stdin.fileno())
        self._drawn.go_on()
        self._offer, self._is_settled = "", is_settled

    def _take_limit(self, why: str) -> None:
        self._limit(self._config.unasked_traffic, f"{why}: ")

    def _limit(self, size: str, why: str = "") -> None:
        said = f"{why}monthly_traffic = {size} holds from now on; {LIFT}"
        self._ask({"verb": "set", "key": "monthly_traffic", "value": size}, said)

    def _ask(self, request: dict[str, object], said: str) -> None:
        """Ask the peer of this process, from another thread: it answers on this loop."""
        self._drawn.print_line(said)
        self._work.append(asyncio.get_running_loop().run_in_executor(None, partial(_tell, self._config.home, request)))


def round_up(value: float) -> float:
    """Round up to two digits, with a reserve of a tenth."""
    scale = 10.0 ** (math.floor(math.log10(max(value, 1.0))) - 1)
    return math.ceil(1.1 * value / scale) * scale


def _tell(home: Path, request: dict[str, object]) -> None:
    try:
        ask(home, request)
    except BadSettings as error:
        print(f"warning: {error}", file=sys.stderr)


def _size_trouble(text: str) -> str:
    try:
        size_bytes(text)
    except ValueError as error:
        return f"{text!r} is no size: {error}"
    return ""


def _is_in_foreground(stdin: TextIO) -> bool:
    """Return whether this is a terminal that this process may read: a read in the background would stop it."""
    try:
        return stdin.isatty() and os.tcgetpgrp(stdin.fileno()) == os.getpgrp()
    except (OSError, ValueError):  # closed, or not our terminal
        return False
