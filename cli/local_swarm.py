"""Run several real peers as child processes: start them, ask for their status, stop them.

Each child is a whole `peer host` or `peer join` with its own home. Each gets its own session, so that Ctrl-C reaches only this process,
which then stops the children in order.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from gossamer.cli.parent_exit import exits_with_this_process
from gossamer.peer.machine.control_socket import ask
from gossamer.peer.machine.home import Home, private
from gossamer.peer.machine.process_group import kill_group
from gossamer.peer.supervisor.children import ChildFailed
from gossamer.protocol.errors import BadSettings, ExitCode

STOP_S = 15.0  # a peer ends within 10 s of SIGTERM
INVITE_S = 180.0  # on a busy machine: a peer imports torch and hivemind first
POLL_S = 0.2
NUM_LOG_LINES = 15


class LocalPeer:
    """One peer as a child process. `status` holds its last answer, also after it has ended."""

    def __init__(self, name: str, home: Path, arguments: Sequence[str]) -> None:
        self.name = name
        self.home = home
        self.status: dict[str, Any] = {}
        home.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._output = home / "stdout.txt"
        self._log = home / "stderr.txt"
        command = [sys.executable, "-P", "-m", "gossamer.cli.main", *arguments, "--home", str(home)]
        with open(self._output, "wb", opener=private) as output, open(self._log, "wb", opener=private) as log:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=log, start_new_session=True,
                env=os.environ | exits_with_this_process(),
            )  # fmt: skip

    def refresh(self) -> bool:
        """Ask for the status; return whether the process still runs. Raises ChildFailed if it ended badly."""
        code = self._process.poll()
        if code is None:
            with suppress(BadSettings):  # not listening yet, or no longer
                self.status = ask(self.home, {"verb": "status"})
            return True
        if code != ExitCode.DONE:
            raise self._death(code)
        self.status = Home(self.home).last_status() or self.status
        return False

    def invite(self) -> str:
        """Wait for the invite that `peer host` prints. Raises ChildFailed if the process ends first, or prints nothing within INVITE_S."""
        deadline_s = time.monotonic() + INVITE_S
        while time.monotonic() < deadline_s:
            line, newline, _ = self._output.read_text().partition("\n")
            if newline:
                return line
            if not self.refresh():
                break
            time.sleep(POLL_S)
        raise self._failed("printed no invite")

    def ask_to_stop(self) -> None:
        """Send SIGTERM, which a peer takes as `peer leave`."""
        if self._process.poll() is None:
            self._process.terminate()

    def wait_stopped(self) -> None:
        """Wait until the process is gone, and end it and all of its children by force if it takes too long."""
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self.kill()

    def kill(self) -> None:
        """End the process and all of its children by force."""
        kill_group(self._process.pid)
        self._process.wait()

    def _death(self, code: int) -> ChildFailed:
        """Return the child's own error if the operator can correct it, else an error that names its log."""
        printed = dict(line.split(": ", 1) for line in self._log_lines(2) if line.startswith(("error: ", "hint: ")))
        if code != ExitCode.OUR_FAULT and "error" in printed:
            return ChildFailed(f"{self.name}: {printed['error']}", hint=printed.get("hint", ""), exit_code=code)
        return self._failed(f"stopped with exit code {code}")

    def _failed(self, how: str) -> ChildFailed:
        tail = "\n".join(f"  {line}" for line in self._log_lines(NUM_LOG_LINES)) or "  nothing"
        hint = f"its folder is {self.home}"
        return ChildFailed(f"{self.name} {how}; the end of its log:\n{tail}", hint=hint, exit_code=ExitCode.OUR_FAULT)

    def _log_lines(self, most: int) -> list[str]:
        return self._log.read_text(errors="replace").splitlines()[-most:]


class LocalSwarm:
    """The children, in the order of their start."""

    def __init__(self, folder: Path) -> None:
        self.peers: list[LocalPeer] = []
        self._folder = folder

    def start(self, name: str, arguments: Sequence[str]) -> LocalPeer:
        """Start `peer ARGUMENTS` with a home of its own."""
        peer = LocalPeer(name, self._folder / name, arguments)
        self.peers.append(peer)
        return peer

    def refresh(self) -> bool:
        """Ask all for their status; return whether any still runs. Raises ChildFailed."""
        return any([peer.refresh() for peer in self.peers])

    def stop(self) -> None:
        """Stop all at the same time, and wait; a Ctrl-C while waiting ends them by force."""
        for peer in self.peers:
            peer.ask_to_stop()
        try:
            for peer in self.peers:
                peer.wait_stopped()
        except KeyboardInterrupt:
            for peer in self.peers:
                peer.kill()
            raise


@contextmanager
def local_swarm(folder: Path) -> Iterator[LocalSwarm]:
    """Yield an empty swarm; stop every peer that was started in it when the context ends, also after an error."""
    swarm = LocalSwarm(folder)
    with _signals_interrupt():
        try:
            yield swarm
        finally:
            swarm.stop()


@contextmanager
def _signals_interrupt() -> Iterator[None]:
    """Treat SIGTERM and a closed terminal as Ctrl-C, so that the children are stopped. Under nohup SIGHUP stays ignored."""
    handled = [number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, signal.default_int_handler) for number in handled}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
