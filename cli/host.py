"""`peer host`: start a run as its first peer, or continue it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from gossamer.cli import options
from gossamer.cli.generated_options import EVERY, Given, takes
from gossamer.cli.invite import WITHOUT_INVITES, issued_to_anybody
from gossamer.cli.manifests import START_AGAIN, RunOptions, changed, need_fit, pins_of, read_manifest, tried, with_pins
from gossamer.cli.screen import Screen
from gossamer.cli.session import hold_session, settings, undone_if_it_fails
from gossamer.peer.machine.config import PeerConfig
from gossamer.peer.machine.extras import need_extra
from gossamer.peer.machine.held_manifest import held_manifest
from gossamer.peer.machine.held_stage import need_stage
from gossamer.peer.machine.home import Home, write_whole
from gossamer.peer.machine.status import Status
from gossamer.peer.swarm.issued_invites import USES
from gossamer.protocol.errors import BadSettings
from gossamer.protocol.identity import Identity
from gossamer.protocol.run.manifest import Manifest, SignedManifest, need_text

ManifestFile = Annotated[
    Path | None,
    typer.Argument(
        metavar="MANIFEST",
        help="Manifest file, as `peer init` writes it. Default: a small model, trained on the sources of Python's standard library.",
        show_default=False,
    ),
]
WriteInvite = Annotated[
    Path | None, typer.Option("--write-invite", metavar="FILE", help="Also write the invite to this file, at each start.")
]


@takes("changes", RunOptions)
@takes("given", PeerConfig, *EVERY, "wait_for_peers", "alone", "stage")
def host(
    manifest: ManifestFile = None,
    home: options.HomeFolder = options.DEFAULT_HOME,
    *,
    given: Given,
    changes: Given,
    metrics: options.Metrics = None,
    write_invite: WriteInvite = None,
    uses: options.Uses = None,
) -> None:
    """Start a run as its first peer.

    Prints an invite as one line on stdout. If the home folder holds a run that this peer hosts, continues that run.
    """
    config = settings(home, given)
    if write_invite is not None and not os.access(write_invite.absolute().parent, os.W_OK):
        raise BadSettings(f"the invite cannot be written to {write_invite}", hint="name a file in a folder that this user may write to")
    folder = Home(config.home)
    wanted = changed(read_manifest(manifest, own_text=config.data is not None), changes)
    with undone_if_it_fails(folder):
        folder.create()
        if is_new := not folder.manifest.exists():
            need_stage(wanted, folder, config.stage)
            wanted = tried(wanted, config.model, config)
        identity = Identity.load_or_create(folder.identity)
        wanted = wanted.with_host(identity.peer_id)
        signed = run_to_host(folder, identity, wanted, must_match=manifest is not None or bool(changes))
        need_stage(signed.manifest(), folder, config.stage)
        need_start(folder, config, signed)
        if not is_new and not folder.holder():
            need_fit(need_text(signed.manifest(), START_AGAIN), config)
        hold_session(config, identity, signed, None, invite_line(folder, identity, signed, write_invite, uses or USES), metrics)


def need_start(folder: Home, config: PeerConfig, signed: SignedManifest) -> None:
    """Raise BadSettings if the run starts from weights that its host lacks, OperatorError if packages are missing."""
    need_extra("text")
    if signed.manifest().model.weights and config.model is None and not any(folder.checkpoints.iterdir()):
        raise BadSettings(
            "this run starts from given weights, which its host must provide", hint="pass the folder of these weights with --model"
        )


def run_to_host(folder: Home, identity: Identity, wanted: Manifest, *, must_match: bool) -> SignedManifest:
    """Return the run that the home holds, else `wanted`, signed. Raises BadSettings if this peer cannot host the run it holds.

    `must_match`: the operator named `wanted` on the command line, so a home that holds another run is refused.
    """
    held = held_manifest(folder)
    if held is None:
        return SignedManifest.sign(wanted, identity)
    if held.host != identity.peer_id:
        raise BadSettings(
            f"{folder.path} holds a run that this peer joined, not one that it hosts",
            hint="continue with `peer join`, or start a run in another folder with --home DIR",
        )
    manifest = need_text(held.manifest(), START_AGAIN)
    if must_match and with_pins(wanted, pins_of(manifest)).run_id != held.run_id:
        raise BadSettings(
            f"{folder.path} already holds another run, {held.run_id.hex()[:12]}",
            hint="`peer host` without a manifest or changes continues it; --home DIR gives a new run its own folder",
        )
    return held


def invite_line(folder: Home, identity: Identity, signed: SignedManifest, file: Path | None, uses: int) -> Callable[[Status, Screen], None]:
    """Return a status watcher that prints and writes the invite once, when the peer first knows its addresses."""
    is_done = False

    def look(status: Status, drawn: Screen) -> None:
        nonlocal is_done
        if is_done or not status.addresses:
            return
        is_done = True
        try:
            text = issued_to_anybody(folder, identity, signed.run_id, tuple(status.addresses), uses).to_text()
            if file is not None:
                write_whole(file, text.encode() + b"\n")
        except OSError as error:
            drawn.print_line(f"no invite could be written: {error.strerror}; `peer invite` writes one as soon as the disk takes it")
            return
        whom = WITHOUT_INVITES.get(signed.manifest().run.access, f"for others, up to {uses} peers")
        drawn.print_line(f"invite {whom}, valid for 30 days; use it as INVITE in `peer join INVITE`")
        drawn.data(text)

    return look
