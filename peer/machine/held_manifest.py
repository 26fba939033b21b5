"""The signed manifest of the run that a home holds."""

from __future__ import annotations

from typing import Final

from gossamer.peer.machine.home import Home
from gossamer.protocol.errors import BadSettings
from gossamer.protocol.run.manifest import SignedManifest

NO_RUN: Final = "`peer host` or `peer join` starts one; --home DIR names another folder"


def held_manifest(home: Home) -> SignedManifest | None:
    """Read a home's manifest; None if the home holds no run. Raises BadManifest, OSError."""
    return SignedManifest.from_bytes(home.manifest.read_bytes()) if home.manifest.exists() else None


def need_manifest(home: Home) -> SignedManifest:
    """Read a home's manifest. Raises BadManifest, or BadSettings if the home holds no run."""
    try:
        return SignedManifest.from_bytes(home.manifest.read_bytes())
    except FileNotFoundError as error:
        raise BadSettings(f"{home.path} holds no run", hint=NO_RUN) from error
    except OSError as error:
        raise BadSettings(f"{home.manifest} cannot be read: {error.strerror}", hint=NO_RUN) from error
