"""The line and the router, as those whom we called see them: clock, reachability, kind of router, rate, and what that means for the run."""

from __future__ import annotations

import ipaddress
import re
import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING

import psutil

from gossamer.peer.doctor.case import Case
from gossamer.peer.doctor.finding import Finding, fail, ok, warn
from gossamer.peer.doctor.router import Router, ask_router
from gossamer.peer.doctor.visit import Call, CallRound
from gossamer.peer.meeting.line import transfer_s
from gossamer.protocol.limits import CLOCK_SKEW_S

if TYPE_CHECKING:
    from gossamer.protocol.messages.terms import ModelPlan

NOBODY = "nobody could be asked"
CLOCK_WARN_S = 5.0
STEP_S = 1.0  # an inner step, where nobody has measured one
SET_CLOCK = "set it by network time: `sudo timedatectl set-ntp true`"
OPEN_PORT = "forward a TCP port in the router and name it with --port; without one, a peer is reached through a relay, if the run has one"
_HOST_PORT = re.compile(r"/ip[46]/([^/]+)/tcp/(\d+)")
_SHARED = ipaddress.ip_network("100.64.0.0/10")  # of providers that put many customers behind one address


def clock(case: Case) -> Finding:
    """Compare this machine's clock with those of the peers that were reached."""
    return clock_facts([call.clock_ahead_s for call in _answered(case)])


def clock_facts(ahead_s: Sequence[float]) -> Finding:
    """Judge by how much the others' clocks are ahead of ours."""
    if not ahead_s:
        return ok(NOBODY)
    middle_s = statistics.median(ahead_s)
    said = (
        f"{abs(middle_s):.1f} s {'behind' if middle_s > 0 else 'ahead of'} that of {len(ahead_s)} peers"
        if len(ahead_s) > 1
        else (f"{abs(middle_s):.1f} s {'behind' if middle_s > 0 else 'ahead of'} the one peer that was asked")
    )
    if abs(middle_s) > CLOCK_SKEW_S:
        return warn(f"this clock is {said}; a running peer goes by theirs, once it has heard enough of them", SET_CLOCK)
    return warn(f"this clock is {said}", SET_CLOCK) if abs(middle_s) > CLOCK_WARN_S else ok(said)


def reachable(case: Case) -> Finding:
    """Find out whether others reach this peer's port."""
    return reachable_facts(_answered(case))


def reachable_facts(answered: Sequence[Call]) -> Finding:
    """Judge what those said who tried."""
    yes = [call.name for call in answered if call.is_open is True]
    no = [call.name for call in answered if call.is_open is False]
    if yes and no:
        return warn(f"from {', '.join(yes)}, and not from {', '.join(no)}", OPEN_PORT)
    if yes:
        return ok(f"from {', '.join(yes)}")
    if no:
        return warn(f"not from {', '.join(no)}", OPEN_PORT)
    return ok(f"not known: {'those on the same network do not try' if answered else NOBODY}")


def router(case: Case) -> Finding:
    """Find out what stands between this machine and the internet."""
    own = {address.address for addresses in psutil.net_if_addrs().values() for address in addresses}
    return router_facts([call.observed for call in _answered(case)], own, ask_router())


def router_facts(observed: Sequence[str], own: set[str], found: Router | None) -> Finding:
    """Judge the addresses under which others saw us, this machine's own ones, and what the router says."""
    seen = [(match[1], match[2]) for match in map(_HOST_PORT.fullmatch, observed) if match]
    can_ask = "it speaks UPnP, so a peer asks it to open its port" if found else "it does not speak UPnP"
    outside = [(host, port) for host, port in seen if ipaddress.ip_address(host).is_global]
    if outside and {host for host, _ in outside} <= own:
        return ok("none: this machine has an address of its own on the internet")
    if found and found.outer_ip and _is_shared(found.outer_ip, outside):
        return warn(
            f"the provider shares one address among customers (the router has {found.outer_ip}): no port can be opened",
            "ask the provider for an address of your own; until then others reach this peer through a relay, if the run has one",
        )
    if len(outside) < 2:
        return ok(f"{can_ask}; its kind is not known, as {len(outside)} peers outside this network were asked, and it takes two")
    if len(set(outside)) > 1:
        return warn(f"it shows each partner another port of this peer (symmetric); {can_ask}", OPEN_PORT)
    return ok(f"it shows all partners the same port of this peer; {can_ask}")


def _is_shared(outer_ip: str, outside: Sequence[tuple[str, str]]) -> bool:
    ip = ipaddress.ip_address(outer_ip)
    return ip in _SHARED or bool(outside) and outer_ip not in {host for host, _ in outside}


def line(case: Case) -> Finding:
    """Measure what the line carries, and say what that means for the run."""
    visit = case.visit() if case.is_about_a_run else CallRound()
    return line_facts(visit.line, case.need().plan, case.manifest().outer.max_clock_gap_steps) if visit.line else ok(NOBODY)


def line_facts(rates: tuple[float, float], plan: ModelPlan, gap_steps: int) -> Finding:
    """Judge the rates up and down, in bytes a second, for a run with this plan, whose clocks may be so far apart."""
    from gossamer.peer.trainer.estimate import estimate  # torch: slow to import
    from gossamer.peer.trainer.interval import LONGEST_STEPS

    up, down = rates
    largest = max(fragment.slow_bytes for fragment in plan.fragments)
    found = estimate(plan, gap_steps, min(rates), STEP_S)
    join_s, interval = estimate(plan, gap_steps, down, STEP_S).join_s, found.interval_steps
    said = (
        f"{_megabits(up)} up, {_megabits(down)} down: about {_span(join_s)} to join, {_span(found.meeting_s)} for a meeting, a meeting of "
        f"each part about every {interval} steps of {STEP_S:.0f} s, and {1e-9 * found.day_bytes:.3g} GB a day each way"
    )
    longest_s = transfer_s(largest)
    if largest / min(rates) > longest_s:
        return fail(f"too slow: {said}; others wait for {_span(longest_s)}", "end other transfers, or use another line")
    if interval >= LONGEST_STEPS:
        return warn(f"slow for this run: {said}", "this peer will train mostly alone; a run with a smaller model suits this line")
    return ok(said)


def _answered(case: Case) -> list[Call]:
    return [call for call in case.visit().reached if call.manifest] if case.is_about_a_run else []


def _megabits(bytes_per_s: float) -> str:
    return f"{8e-6 * bytes_per_s:.3g} Mbit/s"


def _span(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
