"""Every check at once, each in a thread of its own, and none waited for longer than the whole may take.

A check is a function that looks at a `Case` and returns a `Finding`; to add one, write it and name it in CHECKS. Where it judges something
that is hard to bring about, the judging is a function of plain facts beside it, for the tests. What it raises counts as failed.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future

from gossamer.peer.doctor import home_checks, line_checks, machine_checks, room_checks, swarm_checks
from gossamer.peer.doctor.case import Case
from gossamer.peer.doctor.finding import Finding, Level, fail, failed_by, warn
from gossamer.protocol.errors import ExitCode, GossamerError

LIMIT_S = 20.0  # for all of them together; Python's own start and end come on top, and the command shall end within 30 s

Check = Callable[[Case], Finding]

CHECKS: tuple[Check, ...] = (
    machine_checks.versions,
    machine_checks.device,
    machine_checks.open_files,
    room_checks.memory,
    room_checks.device_memory,
    room_checks.disk,
    room_checks.shared_memory,
    home_checks.home,
    home_checks.key,
    home_checks.settings,
    home_checks.other_peer,
    home_checks.port,
    home_checks.invite,
    swarm_checks.bootstraps,
    swarm_checks.membership,
    line_checks.clock,
    line_checks.reachable,
    line_checks.router,
    line_checks.line,
)


def examine(case: Case, checks: Sequence[Check] = CHECKS, limit_s: float = LIMIT_S) -> Iterator[tuple[str, Finding]]:
    """Yield each check's name and finding, in their order, as soon as it is known. Ends within `limit_s`."""
    ends_s = time.monotonic() + limit_s
    running = [(check.__name__.replace("_", " "), _begun(check, case)) for check in checks]
    for name, future in running:
        try:
            yield name, future.result(max(0.0, ends_s - time.monotonic()))
        except TimeoutError:
            yield name, warn(f"not known: it took longer than {limit_s:.0f} s", "try again; the machine may be busy, or a disk may hang")


def exit_code(findings: Sequence[Finding]) -> ExitCode:
    """Return the exit code of the first check that failed; DONE where none did."""
    return next((finding.exit_code for finding in findings if finding.level is Level.FAIL), ExitCode.DONE)


def _begun(check: Check, case: Case) -> Future[Finding]:
    """Run a check in a thread that does not keep the command from ending when it hangs."""
    future: Future[Finding] = Future()
    threading.Thread(target=lambda: future.set_result(_finding(check, case)), name=f"check {check.__name__}", daemon=True).start()
    return future


def _finding(check: Check, case: Case) -> Finding:
    try:
        return check(case)
    except GossamerError as error:
        return failed_by(error)
    except OSError as error:
        return fail(f"{error.filename or 'the system'}: {error.strerror or error}", "make it readable for you, or choose another home")
    except Exception as error:
        return fail(f"the check itself failed: {error!r}", "this is our fault; please report it", ExitCode.OUR_FAULT)
