"""`peer id`: who this peer is."""

from __future__ import annotations

import json
import sys

from gossamer.cli.options import DEFAULT_HOME, HomeFolder, Json
from gossamer.peer.machine.home import Home
from gossamer.protocol.identity import Identity


def identity(home: HomeFolder = DEFAULT_HOME, as_json: Json = False) -> None:
    """Print this peer's id.

    Makes its key if there is none yet.
    """
    folder = Home(home)
    is_new = not folder.identity.exists()
    folder.create()
    peer_id = Identity.load_or_create(folder.identity).peer_id
    if is_new:
        print(f"made a new key, {folder.identity}; keep a copy: whoever has it is this peer", file=sys.stderr)
    print(json.dumps({"peer_id": str(peer_id), "home": str(folder.path)}) if as_json else peer_id)
