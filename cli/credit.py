"""`peer credit`: a signed statement of this peer's own part in its run, and the check of such a statement."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from gossamer.cli.figures import age_text, number_text
from gossamer.cli.options import DEFAULT_HOME, HomeFolder, Json
from gossamer.peer.machine.control_socket import newest_status
from gossamer.peer.machine.credit import Credit, signed_credit, verified_credit
from gossamer.peer.machine.held_manifest import need_manifest
from gossamer.peer.machine.home import Home
from gossamer.peer.machine.units import bytes_text
from gossamer.protocol.errors import BadSettings
from gossamer.protocol.identity import Identity

Verify = Annotated[Path | None, typer.Option("--verify", metavar="FILE", help="Check a statement, and print what it says.")]


def credit(home: HomeFolder = DEFAULT_HOME, verify: Verify = None, as_json: Json = False) -> None:
    """Print a signed statement of this peer's part in the run, as JSON: `peer credit > credit.json`.

    The statement is this peer's own claim. Its signature shows whose it is, and that nobody has changed it.
    """
    if verify is not None:
        stated = verified_credit(verify)
        print(stated.model_dump_json() if as_json else words(stated, time.time()))
        return
    folder = Home(home)
    manifest = need_manifest(folder).manifest()
    status = newest_status(folder)
    if status.get("run_id") != manifest.run_id.hex():
        raise BadSettings(f"the peer in {folder.path} has no part in its run yet", hint="start it with `peer join`")
    signed = signed_credit(status, manifest.run.name, Identity.load_or_create(folder.identity), time.time())
    print(json.dumps(signed.model_dump(), indent=None if as_json else 1))
    print("anybody can check it: peer credit --verify FILE", file=sys.stderr)


def words(stated: Credit, now_s: float) -> str:
    """Return a checked statement in words."""
    return (
        f"signed by {stated.peer_id} {age_text(now_s - stated.signed_s)} ago, and unchanged\n"
        f"it states its own part in the run {stated.run} ({stated.run_id[:12]}): {number_text(stated.tokens)} {stated.unit} in "
        f"{stated.own_steps} steps and {stated.meetings} meetings, {bytes_text(stated.sent_bytes)} up, {bytes_text(stated.received_bytes)} "
        f"down, {stated.seconds / 3600:.1f} hours, {stated.watt_hours} Wh, since it joined {age_text(now_s - stated.joined_s)} ago\n"
        "nobody else has confirmed these figures"
    )
