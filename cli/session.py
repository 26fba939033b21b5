"""Run one peer in this shell: read its settings, draw its progress on stderr, until the run ends, the peer leaves, or it fails."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path

from gossamer.cli.cost_question import CostQuestion
from gossamer.cli.figures import loss_text, text_read
from gossamer.cli.screen import Screen, screen
from gossamer.peer.machine.config import PeerConfig, peer_config, save_settings, saved_settings, with_setting
from gossamer.peer.machine.export_text import export_text
from gossamer.peer.machine.extras import need_extra
from gossamer.peer.machine.home import Home, HomeInUse
from gossamer.peer.machine.port import address_and_port, free_port, keep_port
from gossamer.peer.machine.room import held_bytes, memory_room, need_program_memory
from gossamer.peer.machine.status import Status
from gossamer.peer.supervisor.supervisor import run_peer
from gossamer.protocol.errors import BadSettings, ExitCode, GossamerError
from gossamer.protocol.identity import Identity
from gossamer.protocol.run.invite import Invite
from gossamer.protocol.run.manifest import SignedManifest

Also = Callable[[Status, Screen], None]


def settings(home: Path, given: Mapping[str, object], *, trains: bool = True) -> PeerConfig:
    """Return the settings of this start: those `given` on the command line, else those of `config.toml`, else the defaults.

    A given checkpoint interval in seconds switches the interval in steps off. Raises BadSettings, also if the machine lacks the memory to
    load the peer's programs.
    """
    folder = Home(home)
    values: dict[str, object] = saved_settings(folder) | dict(given)
    if "checkpoint_interval_s" in given:
        values["checkpoint_interval_steps"] = 0
    for key in ("data", "model"):
        if isinstance(path := values.get(key), str | Path):  # a file that the operator edits may hold a tilde too
            values[key] = Path(path).expanduser().absolute()
    config = peer_config(values | {"home": folder.path, "trains": trains})
    need_program_memory(trains, memory_room(held_bytes(os.getpid()), config.max_memory))
    return config.model_copy(update={"port": free_port(folder, config.listen, config.port if "port" in values else None)})


@contextmanager
def undone_if_it_fails(folder: Home) -> Iterator[None]:
    """Where the body fails through no bug and has neither trained nor downloaded, remove the run that it began; a new home wholly.

    A new home in which the run's manifest has come keeps its key: the run may have counted the key as a use of its invite. A home from
    which an invite was issued, or from which another process runs, is left alone. After Ctrl-C only a new home from which no peer has
    run yet is removed: any other goes on at the next start.
    """
    is_new, held = not folder.path.exists(), folder.manifest.exists()
    try:
        yield
    except HomeInUse:
        raise  # the home is of the peer that runs, even if that one has ended meanwhile
    except GossamerError as error:
        if error.exit_code is not ExitCode.OUR_FAULT and not held and (is_new or folder.manifest.exists()):
            _undo(folder, is_new=is_new)
        raise
    except KeyboardInterrupt:
        if is_new and not (folder.manifest.exists() or folder.invite.exists()):
            _undo(folder, is_new=True)
        raise


def _undo(folder: Home, *, is_new: bool) -> None:
    """Remove the run that a home began, unless it has state or an invite is out; a new home wholly."""
    with suppress(BadSettings, OSError), folder.locked():  # the reason of the failure matters more
        has_state = any(place.exists() and any(place.iterdir()) for place in (folder.checkpoints, folder.downloads))
        if has_state or folder.invites.exists():
            return
        has_come = folder.manifest.exists()
        folder.manifest.unlink(missing_ok=True)
        if is_new:
            folder.clear(*((folder.identity, folder.credential) if has_come else ()))


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
    try:
        with screen(sys.stderr) as drawn, metrics_server(metrics, lambda: newest):
            cost = CostQuestion(config, drawn)

            def watch(status: Status) -> None:
                nonlocal newest
                for words in news(newest, status):
                    drawn.print_line(words)
                if status.text != newest.text:
                    try:
                        remember_text(config)
                    except BadSettings as error:  # a full disk: no reason to end the peer
                        drawn.print_line(f"the text is not remembered: {error}; name it with --data again at the next start")
                newest = status
                cost.look(status)
                drawn.show(status.peer_id[-6:], status.to_json())
                keep_port(config, status.addresses)
                if also is not None:
                    also(status, drawn)

            newest = asyncio.run(run_peer(config, identity, manifest, invite, watch))
    finally:
        if newest.state in ("left", "done"):  # after Ctrl-C too, which ends in KeyboardInterrupt
            with suppress(OSError):
                print(farewell(newest, config), file=sys.stderr, flush=True)


def news(before: Status, now: Status) -> Iterator[str]:
    """Yield a line for each thing that has happened between two statuses and that the table does not show."""
    if now.text and now.text != before.text:
        yield f"read {text_read(now.text)}"
    if (num_steps := now.given_up_steps - before.given_up_steps) > 0:
        yield f"{num_steps} steps given up, back at step {now.step}: too far ahead of all others to meet them; the weights stay"
    if now.stage_move and now.stage_move != before.stage_move:
        yield f"moves {now.stage_move}"
    if (num_steps := now.lost_steps - before.lost_steps) > 0:
        yield f"{num_steps} steps of this stage are lost: no other peer held it, and its checkpoint was older than the other stages"


def remember_text(config: PeerConfig) -> None:
    """Save the text that the peer trains on as its setting, so that later starts, `peer eval` and `peer export` have it."""
    home = Home(config.home)
    saved = saved_settings(home)
    if config.data is not None and saved.get("data") != str(config.data):
        save_settings(home, with_setting(saved, "data", str(config.data)))


def metrics_server(text: str | None, status: Callable[[], Status]) -> AbstractContextManager[None]:
    """Return a context that serves metrics, or nothing if `text` is None. Raises OperatorError."""
    if text is None:
        return nullcontext()
    need_extra("metrics")
    from gossamer.peer.machine.metrics import serving_metrics  # prometheus_client: loaded only with --metrics

    return serving_metrics(*address_and_port(text, "--metrics", "127.0.0.1"), status)


def farewell(status: Status, config: PeerConfig) -> str:
    """Return the last line: how the session ended, and what the operator can do next."""
    if not config.trains:
        return "the bootstrap node has left"
    figures = f"step {status.step} of {status.total_steps}, loss {loss_text(status.loss)}"
    if status.state == "done":
        return f"the run is over: {figures}\nhint: {export_text(str(config.home), is_staged=bool(status.stage))}"
    left = f"left the run: {figures}" if status.total_steps else "left before a member had sent the run's manifest"
    return f"{left}\nhint: the same command, or `peer join --home {config.home}`, goes on from here"
