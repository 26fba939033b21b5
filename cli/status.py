"""`peer status`: the state of the running peer and the reason for it."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from typing import Annotated, Any

import typer

from gossamer.cli.figures import Status, age_text, bytes_text, loss_text, meetings_text, sentence, share_text
from gossamer.cli.options import DEFAULT_HOME, HomeFolder, Json
from gossamer.peer.machine.control_socket import NobodyRuns, ask
from gossamer.peer.machine.home import Home
from gossamer.protocol.errors import BadSettings, GossamerError

FLAT = 0.0005  # nats in 100 steps: less is no change


class Unhealthy(GossamerError):
    """The peer does not run or does not work; exit code 1, as health checks expect."""


Healthy = Annotated[
    bool,
    typer.Option("--healthy", help="Report by the exit code only: 0 if the peer works, waits or starts normally, else 1 with the reason."),
]


def status(home: HomeFolder = DEFAULT_HOME, as_json: Json = False, healthy: Healthy = False) -> None:
    """Show the state of the running peer: since when, why, and what ends it."""
    folder = Home(home)
    if healthy:
        need_health(folder)
        return
    try:
        answer = ask(folder.path, {"verb": "status"})
    except NobodyRuns as nobody:
        raise NobodyRuns(str(nobody) + last_word(folder), hint=nobody.hint) from nobody
    print(json.dumps(answer) if as_json else description(answer, time.time()))


def need_health(folder: Home) -> None:
    """Raise Unhealthy unless a peer runs from this home, answers, and works."""
    try:
        trouble = ask(folder.path, {"verb": "health"})["trouble"]
    except BadSettings as error:
        raise Unhealthy(str(error), hint=error.hint) from error
    if trouble:
        raise Unhealthy(trouble, hint="`peer status` shows the reason and what ends it")


def last_word(folder: Home) -> str:
    """Return the last state that the peer of this home recorded, empty if there is none."""
    status = folder.last_status()
    return f"; its last state: {sentence(status, time.time())}" if status else ""


def description(answer: Status, now_s: float) -> str:
    """Return the status as text: one sentence, then the rows."""
    shown = rows(answer, now_s) | {"warnings": "\n           ".join(answer["warnings"]) or "none"}
    return "\n".join([sentence(answer, now_s), "", *(f"{name:<11}{value}" for name, value in shown.items())])


def rows(answer: Status, now_s: float) -> dict[str, str]:
    """Return the rows below the sentence, by name."""
    return {
        "run": run_text(answer, now_s),
        "loss": trend_text(answer),
        "my part": part_text(answer, now_s),
        "blocked": f"{share_text(answer['blocked_seconds'], answer['train_seconds'])} of training time, waiting for synchronization",
        "meetings": f"{meetings_text(answer['meetings'])}; {interval_text(answer['inner_steps'], answer['inner_steps_reason'])}",
        "partners": partners_text(answer["peers_seen"], answer["routes"]),
        "traffic": traffic_text(answer["bytes"], answer["month_bytes"]),
        "limits": ", ".join(f"{key.replace('_', ' ')} {value}" for key, value in answer["limits"].items()) or "none",
        "costs": costs_text(answer["lifetime"], answer["energy"]),
        "warnings": "; ".join(answer["warnings"]) or "none",
        "addresses": ", ".join(answer["addresses"]) or "none known yet",
        "run id": answer["run_id"],
        "peer id": answer["peer_id"],
        "version": answer["version"],
    }


def run_text(answer: Status, now_s: float) -> str:
    """Return how far the run is, and when it ends."""
    ends = f", ends in about {age_text(answer['ends'] - now_s)}" if answer["ends"] and answer["ends"] > now_s else ""
    return f"step {answer['step']} of {answer['total_steps']} ({share_text(answer['step'], answer['total_steps'])}){ends}"


def trend_text(answer: Status) -> str:
    """Return the loss and its trend."""
    held_out = f", held-out {loss_text(answer['eval_loss'])}" if answer["eval_loss"] is not None else ""
    trend = answer["loss_trend"]
    if trend is None:
        return loss_text(answer["loss"]) + held_out
    way = "flat" if abs(trend) < FLAT else f"{'falling' if trend < 0 else 'rising'} by {abs(trend):.3f} in 100 steps"
    return f"{loss_text(answer['loss'])} nats per token, {way}{held_out}"


def part_text(answer: Status, now_s: float) -> str:
    """Return what this peer has contributed to the run, over all its starts."""
    lifetime = answer["lifetime"]
    share = answer["token_share"]
    of_all = f" ({share_text(share, 1)} of what the peers in sight report)" if share is not None and answer["peers_seen"] else ""
    return (
        f"{answer['tokens']} tokens{of_all} in {answer['own_steps']} steps, {lifetime['meetings']:.0f} meetings since it joined "
        f"{age_text(now_s - lifetime['joined'])} ago; {answer['tokens_per_second']:.0f} tokens/s now"
    )


def partners_text(peers_seen: int, routes: Mapping[str, int]) -> str:
    """Return the number of peers in sight and the routes of open connections."""
    connected = ", ".join(f"{number} {route}" for route, number in sorted(routes.items()))
    return f"{peers_seen} in sight" + (f"; connected: {connected}" if connected else "")


def traffic_text(meetings: Mapping[str, int], month_bytes: int) -> str:
    """Return the traffic of meetings in this start, and all traffic of this month."""
    in_meetings = f"{bytes_text(meetings['sent'])} up, {bytes_text(meetings['received'])} down in meetings, in this start"
    return f"{in_meetings}; {bytes_text(month_bytes)} in all this month"


def costs_text(lifetime: Mapping[str, float], energy: Mapping[str, Any]) -> str:
    """Return running time, traffic and energy of this peer, over all its starts."""
    hours = f"{lifetime['seconds'] / 3600:.1f} hours, {bytes_text(lifetime['sent'] + lifetime['received'])} in meetings"
    return hours + (f", {lifetime['watt_hours']:.1f} Wh ({energy['how']})" if energy["how"] else "")


def interval_text(inner_steps: int, reason: str) -> str:
    """Return how often the peer starts a meeting, and what sets that interval."""
    return f"one in about {inner_steps} steps ({reason})" if inner_steps else "how often is not known yet"
