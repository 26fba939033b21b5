"""The signed manifest of the run that a home holds."""

from __future__ import annotations

from typing import Final

from gossamer.peer.machine.home import Home
from gossamer.protocol.errors import BadSettings
from gossamer.protocol.run.manifest import SignedManifest

NO_RUN: Final = "`peer host` or `peer join` starts one; --home DIR names another folder"


def held_manifest(home: Home) -> SignedManifest | None:
    """Read a home's manifest; None if the home holds no run. Raises BadManifest, or BadSettings if it cannot be read."""
    try:
        return SignedManifest.from_bytes(home.manifest.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise BadSettings(f"{home.manifest} cannot be read: {error.strerror}", hint=NO_RUN) from error


def need_manifest(home: Home) -> SignedManifest:
    """Read a home's manifest. Raises BadManifest, or BadSettings if the home holds no run or it cannot be read."""
    if (held := held_manifest(home)) is None:
        raise BadSettings(f"{home.path} holds no run", hint=NO_RUN)
    return held
