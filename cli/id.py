"""`peer id`: print the id of this peer."""

from __future__ import annotations

import json
import sys

from gossamer.cli.options import DEFAULT_HOME, HomeFolder, Json
from gossamer.peer.machine.home import Home
from gossamer.protocol.identity import Identity


def identity(home: HomeFolder = DEFAULT_HOME, as_json: Json = False) -> None:
    """Print this peer's id.

    Creates the key if the home folder has none.
    """
    folder = Home(home)
    is_new = not folder.identity.exists()
    folder.create()
    peer_id = Identity.load_or_create(folder.identity).peer_id
    if is_new:
        print(f"created a new key, {folder.identity}; keep a secret copy: anyone with the key can act as this peer", file=sys.stderr)
    print(json.dumps({"peer_id": str(peer_id), "home": str(folder.path)}) if as_json else peer_id)
