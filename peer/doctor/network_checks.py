"""Checks of the network, from the answers of the peers that were called and of the router. They ask, and change nothing."""

from __future__ import annotations

import ipaddress
import math
import statistics
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

import miniupnpc
import psutil

from gossamer.peer.doctor.finding import Finding, fail, failed_by, ok, skipped, warn
from gossamer.peer.doctor.visit import Call, CallRound
from gossamer.peer.machine.bill import STEP_S, bill
from gossamer.peer.machine.config import LocalSettings
from gossamer.peer.machine.units import bytes_text, rate_bytes_per_s, rate_text, size_bytes, steps_text
from gossamer.peer.meeting.line import transfer_s
from gossamer.peer.sync.client import as_final
from gossamer.protocol.addresses import host_of, port_of, read_address, route
from gossamer.protocol.errors import ExitCode
from gossamer.protocol.limits import CLOCK_SKEW_S

if TYPE_CHECKING:
    from gossamer.protocol.messages.terms import ModelPlan

NO_RUN = skipped("no invite and no run in the home: no peer was called")
NOBODY = "no peer could be asked"
CLOCK_WARN_S = 5.0
ASK_MS = 2000
SET_CLOCK = "set it by network time: `sudo timedatectl set-ntp true`"
OPEN_PORT = "forward a TCP port in the router and name it with --port; without one, a peer is reached through a relay, if the run has one"
_SHARED = ipaddress.ip_network("100.64.0.0/10")  # of providers that put many customers behind one address


def bootstraps(visit: CallRound) -> Finding:
    """Report which peers that lead to the swarm were reached, and how fast."""
    if visit.trouble:
        return warn(visit.trouble, visit.way_out)
    if not visit.calls:
        return skipped("no invite was given, and the home holds no run: there is nobody to call")
    there = ", ".join(f"{call.name} in {1000 * (call.round_trip_s or call.connect_s):.0f} ms" for call in visit.reached)
    missing = ", ".join(f"{call.name} ({call.trouble})" for call in visit.calls if call.trouble)
    if not there:
        return fail(
            f"none was reached: {missing}",
            "check that this machine is online and that one of them runs; else ask for a newer invite",
            ExitCode.SWARM_UNREACHABLE,
        )
    if missing:
        return warn(f"reached {there}; not reached {missing}", "one is enough to join; the others may be offline")
    return ok(f"reached {there}")


def membership(visit: CallRound) -> Finding:
    """Return whether the run's members accept this peer."""
    if not visit.reached:
        return skipped(NOBODY)
    if visit.manifest:
        return ok("the run lets this peer in")
    refusals = [call.refused for call in visit.reached if call.refused]
    final = next((error for refusal in refusals if (error := as_final(refusal))), None)
    if final and visit.under_own_name:
        return failed_by(final)
    sentence = "; ".join(sorted({str(call.refused or "no answer") for call in visit.reached}))
    return warn(f"not known: {sentence}", "retry in a minute; `peer join` retries by itself")


def clock(ahead_s: Sequence[float]) -> Finding:
    """Compare this machine's clock with those of the peers that answered: by how much theirs are ahead."""
    if not ahead_s:
        return skipped(NOBODY)
    middle_s = statistics.median(ahead_s)
    theirs = f"that of {len(ahead_s)} peers" if len(ahead_s) > 1 else "the one peer that was asked"
    sentence = f"{abs(middle_s):.1f} s {'behind' if middle_s > 0 else 'ahead of'} {theirs}"
    if abs(middle_s) > CLOCK_SKEW_S:
        return warn(
            f"this clock is {sentence}; a running peer uses the time of its partners instead, once enough of them have reported it",
            SET_CLOCK,
        )
    return warn(f"this clock is {sentence}", SET_CLOCK) if abs(middle_s) > CLOCK_WARN_S else ok(sentence)


def reachable(answered: Sequence[Call]) -> Finding:
    """Check that the peers that answered can open a connection to this peer's port."""
    yes = [call.name for call in answered if call.is_open is True]
    no = [call.name for call in answered if call.is_open is False]
    if yes and no:
        return warn(f"from {', '.join(yes)}, and not from {', '.join(no)}", OPEN_PORT)
    if yes:
        return ok(f"from {', '.join(yes)}")
    if no:
        return warn(f"not from {', '.join(no)}", OPEN_PORT)
    return skipped(f"not known: {'peers on the same network do not try' if answered else NOBODY}")


def router(observed: Sequence[str], own: set[str], found: str | None) -> Finding:
    """Report the kind of router from the multiaddrs that other peers observe, this machine's own IP addresses, and `ask_router`."""
    can_ask = "it does not speak UPnP" if found is None else "it speaks UPnP, so a peer asks it to open its port"
    outside = [(host_of(address), port_of(address)) for address in observed if _is_outside(address)]
    if outside and {host for host, _ in outside} <= own:
        return ok("none: this machine has an address of its own on the internet")
    if found and _is_shared(found, outside):
        return warn(
            f"the provider shares one address among customers (the router has {found}): no port can be opened",
            "ask the provider for an address of your own; until then others reach this peer through a relay, if the run has one",
        )
    if len(outside) < 2:
        return skipped(f"{can_ask}; its kind is not known: that takes two peers outside this network, and {len(outside)} were asked")
    if len(set(outside)) > 1:
        return warn(f"it shows each partner another port of this peer (symmetric); {can_ask}", OPEN_PORT)
    return ok(f"it shows all partners the same port of this peer; {can_ask}")


def own_addresses() -> set[str]:
    """Return the IP addresses of this machine's interfaces."""
    return {address.address for addresses in psutil.net_if_addrs().values() for address in addresses}


def ask_router() -> str | None:
    """Return the outer address of a router that speaks UPnP, empty where unknown; None where none answers. Blocks for seconds."""
    client = miniupnpc.UPnP()
    client.discoverdelay = ASK_MS
    try:
        client.discover()
        client.selectigd()
        return str(client.externalipaddress() or "")
    except Exception:  # the library raises plain Exception
        return None


def _is_outside(observed: str) -> bool:
    """Return whether an address that another peer observes, which may be no address at all, is an IP address on the internet."""
    with suppress(ValueError):
        read_address(observed)
        return observed.startswith("/ip") and route(observed) == "direct"
    return False


def _is_shared(outer_ip: str, outside: Sequence[tuple[str, int]]) -> bool:
    ip = ipaddress.ip_address(outer_ip)
    return ip in _SHARED or bool(outside) and outer_ip not in {host for host, _ in outside}


def line(rates: tuple[float, float] | None, plan_and_gap: Callable[[], tuple[ModelPlan, int]], step_s: float | None = None) -> Finding:
    """Report what the rates up and down, in bytes a second, mean for a run with this plan and this largest gap between clocks, in steps.

    `step_s`: measured duration of an inner step, None if it is not known.
    """
    if rates is None:
        return skipped(NOBODY)
    plan, gap_steps = plan_and_gap()  # first: it imports what the next lines import, and two threads must not do so at once
    from gossamer.peer.trainer.interval import LONGEST_STEPS, estimate

    up, down = rates
    largest = max(fragment.slow_bytes for fragment in plan.fragments)
    assumed_s = STEP_S if step_s is None else step_s
    found = estimate(plan, gap_steps, min(rates), assumed_s)
    join_s, interval = estimate(plan, gap_steps, down, assumed_s).join_s, found.interval_steps
    sentence = (
        f"{rate_text(up)} up, {rate_text(down)} down: about {_span(join_s)} to join, {_span(found.meeting_s)} for a meeting, a meeting of "
        f"each part about every {steps_text(interval)} of {assumed_s:.2g} s ({'assumed' if step_s is None else 'measured'})"
    )
    longest_s = transfer_s(largest)
    if largest / min(rates) > longest_s:
        return fail(f"too slow: {sentence}; others wait for {_span(longest_s)}", "end other transfers, or use another line")
    if interval >= LONGEST_STEPS:
        return warn(f"slow for this run: {sentence}", "this peer will train mostly alone; a run with a smaller model suits this line")
    return ok(sentence)


def cost(
    rates: tuple[float, float] | None,
    plan: ModelPlan,
    inner_steps: int | str,
    settings: LocalSettings,
    step_s: float = STEP_S,
    *,
    is_measured: bool = False,
) -> Finding:
    """Report what this run uses in a day on a line of these rates, None if they are not known, with the operator's limits.

    `is_measured`: whether `step_s`, the duration of an inner step, is.
    """
    from gossamer.peer.trainer.interval import traffic_expected

    limits = rate_bytes_per_s(settings.max_upload), rate_bytes_per_s(settings.max_download)
    expected = traffic_expected(plan, inner_steps, min(*limits, *(rates or ())), step_s, is_measured=is_measured)
    found = bill(expected, settings)
    line = "" if rates is not None else "; the line is not measured"
    cap = min(size_bytes(settings.monthly_traffic), size_bytes(settings.unasked_traffic) if settings.is_unasked else math.inf)
    if found.month_bytes > cap:
        hint = (
            "`peer join` asks before it uses more; monthly_traffic sets your own limit" if settings.is_unasked else "the peer pauses then"
        )
        return warn(f"{found.sentence()}{line}; the limit of a month is {bytes_text(cap)}", hint)
    return ok(found.sentence() + line)


def _span(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
