"""Run one peer in this shell: read its settings, draw its progress on stderr, until the run ends, the peer leaves, or it fails."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from gossamer.cli.figures import loss_text
from gossamer.cli.screen import Screen, screen
from gossamer.peer.machine.config import LocalSettings, PeerConfig, peer_config, saved_settings
from gossamer.peer.machine.home import Home
from gossamer.peer.machine.port import keep_port, last_port, need_port
from gossamer.peer.machine.room import held_bytes, memory_room, need_program_memory
from gossamer.peer.machine.status import Status
from gossamer.peer.supervisor.supervisor import run_peer
from gossamer.protocol.identity import Identity
from gossamer.protocol.run.invite import Invite
from gossamer.protocol.run.manifest import SignedManifest

Also = Callable[[Status, Screen], None]


def settings(home: Path, given: Mapping[str, object], *, trains: bool = True) -> PeerConfig:
    """Return the settings of this start: those `given` on the command line, else those of `config.toml`, else the defaults.

    A given checkpoint interval in seconds switches the interval in steps off. Raises BadSettings, also if the machine lacks the memory to
    load the peer's programs.
    """
    need_program_memory(trains, memory_room(held_bytes(os.getpid())))
    folder = Home(home)
    values: dict[str, object] = saved_settings(folder) | dict(given)
    if "checkpoint_interval_s" in given:
        values["checkpoint_interval_steps"] = 0
    listen = str(values.get("listen", LocalSettings.model_fields["listen"].default))
    port = values.get("port")
    if port is None:
        values["port"] = port = last_port(folder, listen)
    if isinstance(port, int):
        need_port(listen, port)
    for key in ("data", "model"):
        if isinstance(path := values.get(key), Path):
            values[key] = path.expanduser().absolute()
    return peer_config(values | {"home": folder.path, "trains": trains})


def hold_session(
    config: PeerConfig,
    identity: Identity,
    manifest: SignedManifest | None,
    invite: Invite | None,
    also: Also | None = None,
    metrics: str | None = None,
) -> None:
    """Run the peer, draw its status after each change, and call `also` with it. Raises what `run_peer` raises.

    `metrics`: the address and port for Prometheus, as `--metrics` takes them; None serves no metrics.
    """
    newest = Status()
    with screen(sys.stderr) as drawn, serving_metrics_if_asked(metrics, lambda: newest):

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
def serving_metrics_if_asked(text: str | None, status: Callable[[], Status]) -> Iterator[None]:
    """Serve metrics inside the context unless `text` is None. Raises BadSettings."""
    if text is None:
        yield
        return
    from gossamer.peer.machine.metrics import place, serving_metrics  # prometheus_client: loaded only with --metrics

    with serving_metrics(*place(text), status):
        yield


def farewell(status: Status, config: PeerConfig) -> str:
    """Return the last line: how the session ended, and what the operator can do next."""
    if not config.trains:
        return "the bootstrap node has left"
    figures = f"step {status.step} of {status.total_steps}, loss {loss_text(status.loss)}"
    if status.state == "done":
        return f"the run is over: {figures}\nhint: `peer export FOLDER --home {config.home}` writes the model"
    return f"left the run: {figures}\nhint: the same command, or `peer join --home {config.home}`, goes on from here"
