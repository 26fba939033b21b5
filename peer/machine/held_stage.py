"""The stage of a staged run that a home holds, and whether another one may be asked for."""

from __future__ import annotations

from pathlib import Path

from gossamer.peer.machine.home import Home
from gossamer.protocol.errors import BadSettings
from gossamer.protocol.run.manifest import AnyManifest


def held_stage(home: Home) -> int | None:
    """Return the stage of the last start, counted from one; None if there was none. Raises BadSettings for a file that is no number."""
    return _stage_in(home.stage, "the peer then chooses a stage again")


def left_stage(home: Home) -> int | None:
    """Return the stage that the peer has left for the one that it holds, counted from one. Raises BadSettings as `held_stage`."""
    return _stage_in(home.left_stage, "the peer then does not go back to it")


def has_moved(home: Home) -> bool:
    """Return whether the peer has moved to the stage that it holds, and has no checkpoint of it yet. Raises BadSettings as `held_stage`."""
    return left_stage(home) not in (None, held_stage(home))


def _stage_in(file: Path, then: str) -> int | None:
    if not file.exists():
        return None
    text = file.read_text().strip()
    if not text.isdecimal() or not int(text):
        raise BadSettings(f"{file} does not hold the number of a stage", hint=f"remove it: {then}")
    return int(text)


def need_stage(manifest: AnyManifest, home: Home, wanted: int | None) -> None:
    """Raise BadSettings unless the run has the stage that the operator wants, and the home has weights of no other one."""
    if wanted is None:
        return
    if manifest.num_stages == 1:
        raise BadSettings(f"--stage {wanted}: this run has no stages, every peer holds the whole model", hint="leave out --stage")
    if wanted > manifest.num_stages:
        raise BadSettings(
            f"there is no stage {wanted}: the model is cut into {manifest.num_stages} stages",
            hint=f"choose a stage from 1 to {manifest.num_stages}, or leave out --stage: the peer then takes the one that needs it most",
        )
    held = held_stage(home)
    if held not in (None, wanted) and home.checkpoints.exists() and any(home.checkpoints.iterdir()):
        raise BadSettings(
            f"{home.path} holds weights of stage {held}, not of stage {wanted}",
            hint=f"leave out --stage to go on with stage {held}, or hold stage {wanted} in another folder with --home DIR",
        )
