"""The pipes of a program that starts its own supervisor and trains as its guest: the library's side of peer/supervisor/guest.py.

The supervisor gets a session of its own: Ctrl-C reaches the program alone. The end of the program, however it ends, closes the supervisor's
stdin, and that ends the peer. A child that the program forks, such as a worker of a DataLoader, must not hold the pipes open, so they are
closed there.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from typing import Final

from gossamer.peer.machine.child import GuestRequest, SupervisorPipes, is_readable, own_environment
from gossamer.peer.machine.events import ENDED, ProcessReported
from gossamer.peer.machine.home import Home, private
from gossamer.protocol import errors
from gossamer.protocol.errors import GossamerError

PROGRAM: Final = "gossamer.peer.supervisor"
END_S: Final = 30.0  # for the node to end its meetings, before the supervisor is killed


class OwnSupervisor(SupervisorPipes):
    """A supervisor that this program has started. The constructor returns once training may be prepared: the run's manifest is in the home.

    Raises OperatorError with the reason for which the peer cannot run, and GossamerError for a bug.
    """

    def __init__(self, request: GuestRequest) -> None:
        home = Home(request.config.home)
        to_us, settings_fd = os.pipe()
        events_fd, from_us = os.pipe()
        with os.fdopen(private(str(home.log), os.O_APPEND | os.O_CREAT | os.O_WRONLY), "ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", PROGRAM], stdin=events_fd, stdout=settings_fd, stderr=log, start_new_session=True,
                env=own_environment(),
            )  # fmt: skip
        os.close(settings_fd)
        os.close(events_fd)
        self._open_fds = [to_us, from_us]
        os.register_at_fork(after_in_child=self._close_pipes)
        try:
            with contextlib.suppress(BrokenPipeError):  # it has ended at once: so does the pipe that is read next
                os.write(from_us, request.to_line())
            super().__init__(to_us, from_us)
        except EOFError:
            self._wait()
            raise self.failure(home) from None
        except BaseException:  # Ctrl-C, while it looks for the swarm
            self._wait()
            raise

    def close(self, reason: str, failure: BaseException | None = None) -> None:
        """Report how the program's training has ended, and wait until the peer has left the swarm."""
        if not self._open_fds:
            return
        if failure is None:
            self.emit(ProcessReported(ENDED, reason))
        self.end(failure)
        self._wait()

    def failure(self, home: Home) -> GossamerError:
        """Return the error that has ended the supervisor."""
        if not self.error and self._process.returncode == 0:
            return GossamerError("the peer was asked to leave before training began", hint="start the program again")
        if not self.error:
            return GossamerError(f"the supervisor has ended with exit code {self._process.returncode}", hint=f"see {home.log}")
        return errors.from_description(self.error)

    def _wait(self) -> None:
        """Close the pipe to the supervisor, and read its last words until it has ended."""
        os.close(self._open_fds.pop())
        until_s = time.monotonic() + END_S
        while is_readable(self._settings_fd, max(0.0, until_s - time.monotonic())) and self.read_settings():
            pass
        self._close_pipes()
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _close_pipes(self) -> None:
        while self._open_fds:
            with contextlib.suppress(OSError):
                os.close(self._open_fds.pop())
