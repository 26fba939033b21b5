"""`peer status`: the state of the running peer and the reason for it."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from typing import Annotated

import typer

from gossamer.cli.figures import (
    StatusObject,
    age_text,
    fitted,
    holders_text,
    lanes_text,
    last_sentence,
    loss_text,
    meetings_text,
    sentence,
    share_text,
    stage_text,
    starved_text,
    text_read,
)
from gossamer.cli.options import DEFAULT_HOME, HomeFolder, Json
from gossamer.peer.machine.control_socket import NobodyRuns, ask
from gossamer.peer.machine.home import Home
from gossamer.peer.machine.units import bytes_text, percent_text, steps_text
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
        last = folder.last_status()
        raise NobodyRuns(
            f"{nobody}; its last state: {last_sentence(last, time.time())}" if last else str(nobody), hint=nobody.hint
        ) from nobody
    print(json.dumps(answer) if as_json else fitted(description(answer, time.time()), 11))


def need_health(folder: Home) -> None:
    """Raise Unhealthy unless a peer runs from this home, answers, and works."""
    try:
        trouble = ask(folder.path, {"verb": "health"})["trouble"]
    except BadSettings as error:
        raise Unhealthy(str(error), hint=error.hint) from error
    if trouble:
        raise Unhealthy(trouble, hint="`peer status` shows the reason and what ends it")


def description(answer: StatusObject, now_s: float) -> str:
    """Return the status as text: one sentence, then the rows."""
    shown = rows(answer, now_s) | {"warnings": "\n           ".join(answer["warnings"]) or "none"}
    if answer["lanes"]:
        shown["lanes"] = "\n           ".join(lanes_text(answer))
    return "\n".join([sentence(answer, now_s), "", *(f"{name:<11}{value}" for name, value in shown.items())])


def rows(answer: StatusObject, now_s: float) -> dict[str, str]:
    """Return the rows below the sentence, by name."""
    routes = ", ".join(f"{number} {route}" for route, number in sorted(answer["routes"].items()))
    in_meetings, hops, lifetime, energy = answer["bytes"], answer["hops"], answer["lifetime"], answer["energy"]
    interval = f"one in about {steps_text(answer['inner_steps'])} ({answer['inner_steps_reason']})"
    return {
        "run": run_text(answer, now_s),
        **({"program": answer["program"]} if answer["program"] else {}),
        **(stage_rows(answer) if answer["stage"] else {}),
        **({"text": text_read(answer["text"])} if answer["text"] else {}),
        "loss": trend_text(answer),
        "my part": part_text(answer, now_s),
        "blocked": f"{share_text(answer['blocked_seconds'], answer['train_seconds'])} of training time, waiting for synchronization",
        "meetings": f"{meetings_text(answer['meetings'])}; {interval if answer['inner_steps'] else 'how often is not known yet'}",
        **({"coding": answer["coding"]} if answer["coding"] else {}),
        "partners": f"{answer['peers_seen']} in sight" + (f"; connected: {routes}" if routes else ""),
        "traffic": f"{bytes_text(in_meetings['sent'])} up, {bytes_text(in_meetings['received'])} down in meetings, in this start; "
        + (f"{bytes_text(hops['sent'])} up, {bytes_text(hops['received'])} down with micro-batches; " if hops else "")
        + f"{bytes_text(answer['month_bytes'])} in all this month",
        **({"gpu power": power_text(answer["gpu_power"])} if answer["gpu_power"] else {}),
        "limits": ", ".join(limit_text(key, value) for key, value in answer["limits"].items()) or "none",
        "costs": f"{lifetime['seconds'] / 3600:.1f} hours, {bytes_text(lifetime['sent'] + lifetime['received'])} in meetings"
        + (" and with micro-batches" if hops else "")
        + (f", {lifetime['watt_hours']:.1f} Wh ({energy['how']})" if energy["how"] else "")
        + expected_text(answer),
        "warnings": "; ".join(answer["warnings"]) or "none",
        "addresses": ", ".join(answer["addresses"]) or "none known yet",
        "run id": answer["run_id"],
        "peer id": answer["peer_id"],
        "version": answer["version"],
    }


def stage_rows(answer: StatusObject) -> dict[str, str]:
    """Return the rows of a peer that holds a stage."""
    return {
        "stage": stage_text(answer),
        **({"holders": holders_text(answer)} if answer["stage_holders"] else {}),
        **({"lanes": "; ".join(lanes_text(answer))} if answer["lanes"] else {}),
        "starved": starved_text(answer),
        **({"moved": answer["stage_move"]} if answer["stage_move"] else {}),
        **({"lost": f"{answer['lost_steps']} steps of the only copy of this stage"} if answer["lost_steps"] else {}),
    }


def power_text(gpus: Sequence[Mapping[str, float | None]]) -> str:
    """Return what each GPU draws, and how much it may."""
    return ", ".join(f"{_watts(gpu['draw_watts'])} of {_watts(gpu['limit_watts'])} W" for gpu in gpus)


def _watts(watts: float | None) -> str:
    return "?" if watts is None else f"{watts:.0f}"


def limit_text(key: str, value: str) -> str:
    """Return a limit in words; one that is only on or off by its name."""
    name = key.replace("_", " ")
    return name if value == "True" else f"{name} {value}"


def expected_text(answer: StatusObject) -> str:
    """Return what a day of training takes at the present interval, as a clause; empty before it is measured."""
    expected = answer["expected_traffic"]
    if not expected or not expected["is_measured"]:
        return ""
    up, received = bytes_text(expected["day_bytes"]), expected["day_received"]
    down = up if received is None else bytes_text(received)
    use = "" if expected["use"] is None else f"; the line feeds {percent_text(expected['use'])} of the device"
    return f"; a whole day of training: {up} up and {'as much' if up == down else down} down{use}"


def run_text(answer: StatusObject, now_s: float) -> str:
    """Return how far the run is, and when it ends."""
    ends = f", ends in about {age_text(answer['ends'] - now_s)}" if answer["ends"] and answer["ends"] > now_s else ""
    name = f"{answer['run_name']}, " if answer["run_name"] else ""
    given_up = f", {answer['given_up_steps']} given up" if answer["given_up_steps"] else ""
    return f"{name}step {answer['step']} of {answer['total_steps']} ({share_text(answer['step'], answer['total_steps'])}){given_up}{ends}"


def trend_text(answer: StatusObject) -> str:
    """Return the loss and its trend."""
    if answer["loss"] is None:
        return "-"
    held_out = f", held-out {loss_text(answer['eval_loss'])}" if answer["eval_loss"] is not None else ""
    unit = "" if answer["program"] else " nats per token"
    return f"{loss_text(answer['loss'])}{unit}{_way_text(answer)}{held_out}"


def _way_text(answer: StatusObject) -> str:
    """Return where the loss goes, as a clause; of a peer that does not train, that the loss is not of now."""
    if answer["state"] != "training":
        return " when it last trained"
    trend = answer["loss_trend"]
    if trend is None:
        return ""
    return ", flat" if abs(trend) < FLAT else f", {'falling' if trend < 0 else 'rising'} by {abs(trend):.3f} in 100 steps"


def part_text(answer: StatusObject, now_s: float) -> str:
    """Return what this peer has contributed to the run, over all its starts."""
    lifetime = answer["lifetime"]
    share = answer["token_share"]
    of_all = f" ({share_text(share, 1)} of what the peers in sight report)" if share is not None and answer["peers_seen"] else ""
    return (
        f"{answer['tokens']} {answer['unit']}{of_all} in {answer['own_steps']} steps, {lifetime['meetings']:.0f} meetings since it joined "
        f"{age_text(now_s - lifetime['joined'])} ago; {answer['tokens_per_second']:.0f} {answer['unit']}/s now"
    )
