"""One peer that runs from this shell: its settings, and its progress on stderr, until its run ends, it leaves, or it cannot go on."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from cli.figures import loss_text
from cli.screen import Screen, screen
from peer.machine.config import PeerConfig, peer_config
from peer.machine.home import Home
from peer.machine.port import keep_port, need_port, usual_port
from peer.machine.status import Status
from peer.supervisor.supervisor import run_peer
from protocol.identity import Identity
from protocol.run.invite import Invite
from protocol.run.manifest import SignedManifest

Also = Callable[[Status, Screen], None]


def settings(
    home: Path,
    data: Path | None = None,
    device: str = "auto",
    threads: int = 0,
    *,
    listen: str,
    port: int | None,
    announce: list[str] | None,
    checkpoint_every_s: float | None = None,
    trains: bool = True,
) -> PeerConfig:
    """Check the options that make up a peer's local settings. Raises BadSettings."""
    home = home.expanduser().absolute()
    if port is None:
        port = usual_port(Home(home), listen)
    need_port(listen, port)
    values: dict[str, object] = {
        "home": home,
        "data": data.expanduser().absolute() if data else None,
        "device": device,
        "num_threads": threads,
        "listen_host": listen,
        "listen_port": port,
        "announce": tuple(announce or ()),
        "trains": trains,
    }
    if checkpoint_every_s is not None:
        values |= {"checkpoint_interval_s": checkpoint_every_s, "checkpoint_interval_steps": None}
    return peer_config(values)


def hold_session(
    config: PeerConfig,
    identity: Identity,
    manifest: SignedManifest | None,
    invite: Invite | None,
    also: Also | None = None,
    metrics: str | None = None,
) -> None:
    """Run the peer, draw its status after each change, and call `also` with it. Raises what `run_peer` raises.

    `metrics`: where Prometheus may ask for it too, as `--metrics` says it.
    """
    newest = Status()
    with screen(sys.stderr) as drawn, showing_metrics(metrics, lambda: newest):

        def watch(status: Status) -> None:
            nonlocal newest
            newest = status
            drawn.show(status.peer_id[-6:], status.to_json())
            keep_port(config, status.addresses)
            if also is not None:
                also(status, drawn)

        status = asyncio.run(run_peer(config, identity, manifest, invite, watch))
    print(farewell(status, config), file=sys.stderr)


@contextlib.contextmanager
def showing_metrics(text: str | None, status: Callable[[], Status]) -> Iterator[None]:
    """Answer Prometheus while inside, if asked to. Raises BadSettings."""
    if text is None:
        yield
        return
    from peer.machine.metrics import place, serving_metrics  # prometheus_client: only for who wants it

    with serving_metrics(*place(text), status):
        yield


def farewell(status: Status, config: PeerConfig) -> str:
    """Return the last sentence: how it ended, and what can be done next."""
    if not config.trains:
        return "the seed has left"
    figures = f"step {status.step} of {status.total_steps}, loss {loss_text(status.loss)}"
    if status.state == "done":
        return f"the run is over: {figures}\nhint: `peer export FOLDER --home {config.home}` writes the model"
    return f"left the run: {figures}\nhint: the same command, or `peer join --home {config.home}`, goes on from here"
