"""`peer host`: be the first peer of a run, or go on as the one that was."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from gossamer.cli import options
from gossamer.cli.invite import doors
from gossamer.cli.manifests import changed, pinned, read_manifest, with_pins
from gossamer.cli.screen import Screen
from gossamer.cli.session import hold_session, settings
from gossamer.cli.setting_options import EVERY, Given, takes_settings
from gossamer.peer.machine.home import Home, write_whole
from gossamer.peer.machine.status import Status
from gossamer.protocol.errors import BadSettings
from gossamer.protocol.identity import Identity
from gossamer.protocol.run.invite import Invite
from gossamer.protocol.run.manifest import Manifest, SignedManifest

INVITE_LIFETIME_S = 30 * 24 * 3600

ManifestFile = Annotated[
    Path | None,
    typer.Argument(metavar="MANIFEST", help="What `peer init` wrote. Default: a small model on Python's own sources.", show_default=False),
]
WaitForPeers = Annotated[
    int, typer.Option("--wait-for-peers", metavar="N", min=0, help="Begin to train only when so many other peers are there.")
]
WriteInvite = Annotated[
    Path | None, typer.Option("--write-invite", metavar="FILE", help="Write the invite to this file too, at each start.")
]
Alone = Annotated[bool, typer.Option("--alone", help="Train without ever meeting anybody: a baseline to compare a swarm with.")]


@takes_settings(*EVERY)
def host(
    manifest: ManifestFile = None,
    home: options.HomeFolder = options.DEFAULT_HOME,
    *,
    given: Given,
    steps: options.Steps = None,
    seed: options.Seed = None,
    codec: options.Codec = None,
    method: options.Method = None,
    inner_steps: options.InnerSteps = None,
    metrics: options.Metrics = None,
    wait_for_peers: WaitForPeers = 0,
    write_invite: WriteInvite = None,
    alone: Alone = False,
) -> None:
    """Start a run as its first peer.

    Prints the invite for others as one line on stdout. In a home folder that holds a run of this peer, goes on with it.
    """
    config = settings(home, given, alone=alone, wait_for_peers=wait_for_peers)
    if write_invite is not None and not os.access(write_invite.absolute().parent, os.W_OK):
        raise BadSettings(f"the invite cannot be written to {write_invite}", hint="name a file in a folder that this user may write to")
    folder = Home(config.home)
    folder.create()
    identity = Identity.load_or_create(folder.identity)
    base = read_manifest(manifest, own_text="data" in given)
    wanted = changed(base, steps=steps, seed=seed, codec=codec, method=method, inner_steps=inner_steps)
    is_given = manifest is not None or any(choice is not None for choice in (steps, seed, codec, method, inner_steps))
    signed = run_to_host(folder, identity, wanted.with_host(identity.peer_id), config.model, must_match=is_given)
    if signed.manifest().model.weights and config.model is None and not any(folder.checkpoints.iterdir()):
        raise BadSettings(
            "this run starts from given weights, and its host is the first to have them", hint="name their folder with --model"
        )
    hold_session(config, identity, signed, None, invite_line(folder, identity, signed, write_invite), metrics)


def run_to_host(folder: Home, identity: Identity, wanted: Manifest, model: Path | None = None, *, must_match: bool) -> SignedManifest:
    """Return the run that the home holds, else `wanted`, pinned and signed. Raises BadSettings where it holds one that cannot be hosted.

    With `must_match`, the operator has asked for `wanted` by name, so a home that holds another run is refused.
    """
    if not folder.manifest.exists():
        return SignedManifest.sign(pinned(wanted, model), identity)
    held = SignedManifest.from_bytes(folder.manifest.read_bytes())
    if held.host != identity.peer_id:
        raise BadSettings(
            f"{folder.path} holds a run that this peer has joined, not one that it hosts",
            hint="go on with `peer join`, or start a run in another folder with --home DIR",
        )
    manifest = held.manifest()
    if must_match and with_pins(wanted, manifest.model.layout, manifest.tokenizer.digest).run_id != held.run_id:
        raise BadSettings(
            f"{folder.path} already holds another run, {held.run_id.hex()[:12]}",
            hint="`peer host` without a manifest or changes goes on with it; --home DIR gives a new run its own folder",
        )
    return held


def invite_line(folder: Home, identity: Identity, signed: SignedManifest, file: Path | None) -> Callable[[Status, Screen], None]:
    """Return what prints the invite, and writes it, once, as soon as the peer knows its addresses."""
    printed: list[str] = []

    def look(status: Status, drawn: Screen) -> None:
        if status.addresses and not printed:
            not_after_s = int(time.time()) + INVITE_LIFETIME_S
            addresses = doors(folder, identity.peer_id, tuple(status.addresses))
            printed.append(Invite.issue(identity, signed.run_id, addresses, None, not_after_s).to_text())
            drawn.say("invite for others, good for 30 days: peer join INVITE, with this as INVITE")
            drawn.data(printed[0])
            if file is not None:
                write_whole(file, printed[0].encode() + b"\n", private=True)

    return look
