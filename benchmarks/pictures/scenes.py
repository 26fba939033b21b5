"""Simulated peers in each state, from generated events; their control sockets answer as those of real peers."""

from __future__ import annotations

import asyncio
import json
import math
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.pictures.members import run_of
from gossamer.peer.machine import events
from gossamer.peer.machine.config import LocalSettings, PeerConfig
from gossamer.peer.machine.control_socket import serving
from gossamer.peer.machine.home import Home
from gossamer.peer.machine.run_view import RunView
from gossamer.peer.machine.runtime_folder import runtime_folder
from gossamer.peer.machine.states import ALONE, changed
from gossamer.peer.machine.status import Status, of_events
from gossamer.protocol.identity import Identity
from gossamer.protocol.run.manifest import Manifest, SignedManifest

PARTNERS = ("12D3KooWa7pQ3dVxT2", "12D3KooWa7pQ9kMnRb", "12D3KooWa7pQzW4hLc", "12D3KooWa7pQ5sJyGe")
ROUTES = ("local", "direct", "direct", "relayed")
MINUTES, STEP_S = 40, 2.0
EARLIER = {
    "joined": 0.0,
    "seconds": 190_000.0,
    "train_seconds": 170_000.0,
    "meetings": 8_123,
    "sent": 3.4e9,
    "received": 3.5e9,
    "watt_hours": 2_310.0,
}


RUN_ID = "3d09e9b23cf5f6c969df693c41d9f5d40e5652eabdd0ee17b7af7e7c993a6465"
RUN: dict[str, Any] = {"name": "Tales of many machines", "access": "open", "total_steps": 6000}


def begun(peer: str, start_s: float) -> Iterator[events.Event]:
    """Yield the first events of every peer of a run."""
    yield events.PeerStarted(peer, EARLIER | {"joined": start_s - 260_000}, ts=start_s)
    yield events.RunKnown(RUN_ID, 4000, name=RUN["name"], ts=start_s)


def trained(start_s: float, meets: bool) -> Iterator[events.Event]:
    """Yield the events of MINUTES of training."""
    rng = random.Random(4)
    yield events.ModelBuilt(824_448, 4.18, ts=start_s)
    if meets:
        yield events.ConnectionsChanged(dict(zip(PARTNERS, ROUTES, strict=True)), ts=start_s)
        yield events.PeersSeen(len(PARTNERS), ts=start_s)
        yield events.IntervalSet(10, "10 % of the processor time", ts=start_s)
    for step in range(1, int(MINUTES * 60 / STEP_S)):
        now_s = start_s + step * STEP_S
        loss = 1.45 + 4.0 * math.exp(-step / 190) + rng.gauss(0, 0.03)
        rate = 5200 + rng.gauss(0, 130) - (1500 if 500 < step < 560 else 0)
        train_s = step * STEP_S
        yield events.StepDone(
            step, 600 + step, 512 * step * 4, loss, 0.01, rate, train_s, 0.006 * train_s, train_s, 0.05 * train_s, ts=now_s
        )
        if meets and step % 5 == 0:
            outcome = "completed" if rng.random() < 0.92 else rng.choice(("busy", "failed"))
            partner = rng.choice(PARTNERS)
            round_trip_s = 0.004 + 0.03 * PARTNERS.index(partner) + rng.random() / 100
            yield events.MeetingDone(partner, 0, outcome, "the line broke", "libp2p", 431_000, 431_000, 0.6, round_trip_s, ts=now_s)
        if step % 100 == 0:
            yield events.EvalDone(step, loss + 0.02, 8, ts=now_s)
    yield events.EnergyUsed(14.6, "estimated", ts=start_s + MINUTES * 60)


def joining(now_s: float) -> Iterator[events.Event]:
    """Yield the events of a peer that downloads the state."""
    yield from begun("12D3KooWa7pQj0in3r", now_s - 75)
    yield events.PeersSeen(4, ts=now_s - 60)
    reason = "downloading weights from 3 peers: 62 %, 1.3 of 2.1 GB, 11.8 MB/s, about 70 s left"
    yield events.StateChanged("joining", reason, changed("joining").way_out, ts=now_s - 70)
    yield events.ProgressMade("downloading weights", 0.62, ts=now_s)


def training(now_s: float) -> Iterator[events.Event]:
    """Yield the events of a peer that trains with others."""
    start_s = now_s - 60 * MINUTES
    yield from begun("12D3KooWa7pQtra1n5", start_s)
    yield replace(changed("training"), ts=start_s)
    yield from trained(start_s, meets=True)


def paused(now_s: float) -> Iterator[events.Event]:
    """Yield the events of a peer that is paused by its schedule."""
    yield from training(now_s - 600)
    yield events.StepDone(1199, 1800, 2_455_552, math.nan, math.nan, 0.0, 2400.0, 14.0, 2400.0, 120.0, ts=now_s - 590)
    yield events.StateChanged(
        "paused", "the schedule says 22:00-07:00", "ends at 22:00, or with `peer config schedule always`", ts=now_s - 590
    )


def alone(now_s: float) -> Iterator[events.Event]:
    """Yield the events of a peer that may not meet others."""
    start_s = now_s - 60 * MINUTES
    yield from begun("12D3KooWa7pQa10n3x", start_s)
    yield replace(changed("training", "training alone (--alone)", ALONE), ts=start_s)
    yield from trained(start_s, meets=False)


def failed(now_s: float) -> Iterator[events.Event]:
    """Yield the events of a peer that failed."""
    yield from training(now_s - 300)
    yield events.Warned("disk", "the disk of ~/.gossamer is nearly full: 12 MB are free", ts=now_s - 290)
    reason, way_out = "the trainer failed 3 times: no space left on device", "make room, then start it again with the same command"
    yield events.StateChanged("failed", reason, way_out, ts=now_s - 280)


RUNS = {"run": 60, "small-run": 4}  # pages of a whole run, with so many members

SCENES: dict[str, Callable[[float], Iterator[events.Event]]] = {
    "joining": joining, "training": training, "paused": paused, "alone": alone, "failed": failed,
}  # fmt: skip


async def play(folder: Path, ready: threading.Event) -> None:
    """Serve a peer of each scene from its own home in `folder`, until cancelled; `ready` when all do. A failed one has its record."""
    async with AsyncExitStack() as stack:
        for name, num_members in RUNS.items():
            home, manifest = Home(folder / name), Manifest.checked({"run": RUN})
            home.create()
            home.manifest.write_bytes(SignedManifest.sign(manifest, Identity.load_or_create(home.identity)).to_bytes())
            view = await asyncio.to_thread(run_of, num_members, manifest)
            runtime = stack.enter_context(runtime_folder(0))
            await stack.enter_async_context(serving(home, runtime, partial(showing, view)))
        for name, scene in SCENES.items():
            home = Home(folder / name)
            home.create()
            status = of_events(scene(time.time()))
            home.status.write_text(json.dumps(status.to_json()))
            if name != "failed":
                runtime = stack.enter_context(runtime_folder(0))
                await stack.enter_async_context(serving(home, runtime, answering(status)))
        ready.set()
        await asyncio.Event().wait()


def showing(view: RunView, request: dict[str, Any]) -> dict[str, Any]:
    """Answer a control request for the whole run."""
    return view.to_json(time.time()) if request["verb"] == "run" else {"error": f"a picture cannot {request['verb']}"}


def answering(status: Status) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Return a control handler for a peer with this status."""

    def answer(request: dict[str, Any]) -> dict[str, Any]:
        match request["verb"]:
            case "status":
                return status.to_json()
            case "peers":
                return {"peers": [asdict(partner) for partner in status.partners.values()]}
            case "history":
                return status.history.to_json()
            case "config":
                return PeerConfig(home=Path("~/.gossamer")).model_dump(mode="json", include=set(LocalSettings.model_fields))
        return {"error": f"a picture cannot {request['verb']}"}

    return answer
