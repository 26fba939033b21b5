"""Access check for folders that hold keys, sockets and checkpoints: only their owner may enter them."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from gossamer.protocol.errors import BadSettings


def need_private(folder: Path, what: str) -> None:
    """Raise BadSettings unless the current user owns `folder` and no other user may enter it. `what` names it in the message."""
    found = folder.stat()
    if found.st_uid != os.getuid():
        raise BadSettings(f"{what} {folder} belongs to another user", hint="choose a folder of your own, or run as the user who owns it")
    if stat.S_IMODE(found.st_mode) & 0o077:
        raise BadSettings(f"other users may enter {what} {folder}", hint=f"chmod 700 {folder}, or choose another folder")
