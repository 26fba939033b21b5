"""The checks of `peer doctor`, each in a thread of its own, within one time limit.

A check is a function of plain facts that returns a `Finding`. CHECKS maps the shown name of each check to a call with facts of the `Case`.
An error that a check raises becomes a failed finding.
"""

from __future__ import annotations

import resource
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING

from gossamer.peer.doctor import home_checks, machine_checks, network_checks, stage_checks
from gossamer.peer.doctor.case import Case
from gossamer.peer.doctor.finding import Finding, Level, fail, failed_by, skipped, warn
from gossamer.peer.machine.bill import STEP_S
from gossamer.peer.machine.extras import installed_version
from gossamer.peer.machine.room import disk_room, free_files
from gossamer.protocol.errors import ExitCode, GossamerError

if TYPE_CHECKING:
    from gossamer.peer.trainer.need import Need

LIMIT_S = 20.0  # for all checks together; the start and the end of Python come on top, and the command ends within 30 s

NOT_COUNTED = skipped("not known: the run's program has many tensors, and has saved no checkpoint here yet")

Check = Callable[[Case], Finding]


def _counted(check: Callable[[Case, Need], Finding]) -> Check:
    """Return a check of what the run needs, for as long as that can be counted."""

    def counted(case: Case) -> Finding:
        need = case.need()
        return NOT_COUNTED if need is None else check(case, need)

    return counted


def _cost(case: Case, need: Need) -> Finding:
    """Report the cost of the run, of its busiest stage if it has stages."""
    line, inner_steps, measured_s = case.visit().line, case.manifest().outer.inner_steps, case.measured_step_s()
    plan, step_s = need.plan, STEP_S
    if (busiest := stage_checks.busiest(case)) is not None:
        stage, on_line = busiest
        plan, step_s = stage.plan, stage.step_s(on_line)
    if measured_s is not None:
        step_s = measured_s
    return network_checks.cost(line, plan, inner_steps, case.settings, step_s, is_measured=measured_s is not None)


CHECKS: Mapping[str, Check] = {
    "versions": lambda case: machine_checks.versions(*machine_checks.requirements(), installed_version),
    "device": lambda case: machine_checks.device(case.settings.devices, *case.computed()),
    "open files": lambda case: machine_checks.open_files(resource.getrlimit(resource.RLIMIT_NOFILE)[0]),
    "run": home_checks.run,
    "memory": _counted(lambda case, need: machine_checks.memory(need, case.memory_room())),
    "device memory": _counted(lambda case, need: machine_checks.device_memory(need, case.device_room)),
    "disk": _counted(lambda case, need: machine_checks.disk(need, case.disk_room(), free_files(case.home.path))),
    "shared memory": _counted(lambda case, need: machine_checks.shared_memory(need, case.payload_folder(), disk_room)),
    "home": lambda case: home_checks.home(case.home.path),
    "key": home_checks.key,
    "settings": home_checks.settings,
    "other peer": home_checks.other_peer,
    "port": home_checks.port,
    "invite": home_checks.invite,
    "bootstraps": lambda case: network_checks.bootstraps(case.visit()) if case.is_about_a_run else network_checks.NO_RUN,
    "membership": lambda case: network_checks.membership(case.visit()) if case.is_about_a_run else network_checks.NO_RUN,
    "clock": lambda case: network_checks.clock([call.clock_ahead_s for call in case.answered()]),
    "reachable": lambda case: network_checks.reachable(case.answered()),
    "router": lambda case: network_checks.router(
        [call.observed for call in case.answered()], network_checks.own_addresses(), network_checks.ask_router()
    ),
    "line": _counted(
        lambda case, need: network_checks.line(
            case.visit().line, lambda: (need.plan, case.manifest().outer.max_clock_gap_steps), case.measured_step_s()
        )
    ),
    "cost": _counted(_cost),
    "device use": _counted(lambda case, need: stage_checks.device_use(case)),  # counted first: two threads must not import at once
}


def examine(case: Case, checks: Mapping[str, Check] = CHECKS, limit_s: float = LIMIT_S) -> Iterator[tuple[str, Finding]]:
    """Yield each check's name and finding, in their order, as soon as it is known. Ends within `limit_s`."""
    ends_s = time.monotonic() + limit_s
    running = {name: _begun(name, check, case) for name, check in checks.items()}
    for name, future in running.items():
        try:
            yield name, future.result(max(0.0, ends_s - time.monotonic()))
        except TimeoutError:
            yield name, warn(f"not known: it took longer than {limit_s:.0f} s", "try again; the machine may be busy, or a disk may hang")


def exit_code(findings: Sequence[Finding]) -> ExitCode:
    """Return the exit code of the first check that failed; DONE where none did."""
    return next((finding.exit_code for finding in findings if finding.level is Level.FAIL), ExitCode.DONE)


def _begun(name: str, check: Check, case: Case) -> Future[Finding]:
    """Run a check in a thread that does not keep the command from ending when it hangs."""
    future: Future[Finding] = Future()
    threading.Thread(target=lambda: future.set_result(_finding(check, case)), name=f"check {name}", daemon=True).start()
    return future


def _finding(check: Check, case: Case) -> Finding:
    try:
        return check(case)
    except GossamerError as error:
        return failed_by(error)
    except OSError as error:
        return fail(f"{error.filename or 'the system'}: {error.strerror or error}", "make it readable for you, or choose another home")
    except Exception as error:
        return fail(f"the check itself failed: {error!r}", "this is a bug; please report it", ExitCode.OUR_FAULT)
