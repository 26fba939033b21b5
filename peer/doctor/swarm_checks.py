"""Checks of the swarm: which of its peers answer, and whether they accept this peer."""

from __future__ import annotations

from gossamer.peer.doctor.finding import Finding, fail, failed_by, ok, warn
from gossamer.peer.doctor.visit import Call, CallRound
from gossamer.peer.sync.client import as_final
from gossamer.protocol.errors import ExitCode

NO_RUN = ok("no invite and no run in the home: no peer was called")


def bootstraps(visit: CallRound) -> Finding:
    """Tell which peers that lead to the swarm were reached, and how fast."""
    if visit.trouble:
        return warn(visit.trouble, visit.way_out)
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
    """Tell whether the run's members accept this peer."""
    if not visit.reached:
        return ok("nobody could be asked")
    if visit.manifest:
        return ok("the run lets this peer in")
    refusals = [call.refused for call in visit.reached if call.refused]
    final = next((error for refusal in refusals if (error := as_final(refusal))), None)
    if final and visit.under_own_name:
        return failed_by(final)
    said = "; ".join(sorted({_said(call) for call in visit.reached}))
    return warn(f"not known: {said}", "retry in a minute; `peer join` retries by itself")


def _said(call: Call) -> str:
    return str(call.refused) if call.refused else "no answer"
