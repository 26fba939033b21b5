"""`peer status`: what the running peer does, and why."""

from __future__ import annotations

import json
import sys
import time
from contextlib import suppress
from typing import Annotated, Any

import typer

from cli.figures import Status, bytes_text, loss_text, meetings_text, sentence, share_text
from cli.options import DEFAULT_HOME, HomeFolder, Json
from peer.machine.control_socket import NobodyRuns, ask
from peer.machine.home import Home
from protocol.errors import BadSettings, GossamerError

WATCH_EVERY_S = 1.0


class Unhealthy(GossamerError):
    """The peer does not run, or is of no use as it is; exit code 1, which is what programs that watch over others expect."""


Healthy = Annotated[
    bool,
    typer.Option("--healthy", help="Only tell whether it works, waits or is on its way to, by the exit code: 0, or 1 with the reason."),
]
Watch = Annotated[bool, typer.Option("--watch", help="Keep showing it, until the peer stops or you press Ctrl-C.")]


def status(home: HomeFolder = DEFAULT_HOME, as_json: Json = False, watch: Watch = False, healthy: Healthy = False) -> None:
    """Show what the running peer does, and why."""
    if watch and as_json:
        raise BadSettings("--watch and --json do not go together", hint="--json prints one object; call it as often as you like")
    folder = Home(home)
    if healthy:
        need_health(folder)
        return
    if watch:
        _watch(folder)
        return
    answer = ask(folder.path, {"verb": "status"})
    print(json.dumps(answer) if as_json else description(answer))


def need_health(folder: Home) -> None:
    """Raise Unhealthy unless a peer runs from this home, answers, and is of use as it is."""
    try:
        trouble = ask(folder.path, {"verb": "health"})["trouble"]
    except BadSettings as error:
        raise Unhealthy(str(error), hint=error.hint) from error
    if trouble:
        raise Unhealthy(trouble, hint="`peer status` says what would end it")


def _watch(folder: Home) -> None:
    from cli.screen import screen  # rich: slow to import, and needed only now

    answer: dict[str, Any] = ask(folder.path, {"verb": "status"})
    with screen(sys.stdout) as drawn, suppress(NobodyRuns):  # it stopped in the pause: that is the end
        while True:
            drawn.show(answer["peer_id"][-6:], answer)
            time.sleep(WATCH_EVERY_S)
            answer = ask(folder.path, {"verb": "status"})


def description(answer: Status) -> str:
    """Return the status for people: one sentence, then a few lines."""
    rows = {
        "run": answer["run_id"],
        "peer": answer["peer_id"],
        "step": f"{answer['step']} of {answer['total_steps']}, {answer['tokens']} tokens, {answer['tokens_per_second']:.0f} tokens/s",
        "loss": loss_text(answer["loss"]),
        "peers seen": str(answer["peers_seen"]),
        "meetings": meetings_text(answer["meetings"]),
        "interval": interval_text(answer["inner_steps"], answer["inner_steps_reason"]),
        "traffic": f"{bytes_text(answer['bytes']['sent'])} up, {bytes_text(answer['bytes']['received'])} down",
        "blocked": f"{share_text(answer['blocked_seconds'], answer['train_seconds'])} of training time",
        "addresses": ", ".join(answer["addresses"]) or "none known yet",
        "version": answer["version"],
    }
    return "\n".join([sentence(answer, time.time()), "", *(f"{name:<11}{value}" for name, value in rows.items())])


def interval_text(inner_steps: int, reason: str) -> str:
    """Return how often the peer asks for a meeting, and what sets that."""
    return f"about {inner_steps} steps ({reason})" if inner_steps else "not known yet"
