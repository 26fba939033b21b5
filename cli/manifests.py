"""Manifests of the command line: from a file or the default, with the changes of the options."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from gossamer.peer.machine.config import PeerConfig, Setting, WithOptions
from gossamer.peer.machine.extras import need_extra
from gossamer.peer.model.abilities import need_abilities
from gossamer.protocol.errors import BadManifest, why_unreadable
from gossamer.protocol.limits import MANIFEST_BYTES
from gossamer.protocol.run.manifest import Manifest


def _inner_steps(text: str) -> int | str:
    """Read a number of steps, or `auto`; other text is left to the check of the manifest, which says what is legal."""
    return int(text) if text.isdecimal() else text


START_AGAIN = "start that program again with this home folder: it continues the run"


class RunOptions(WithOptions):
    """What options change in a manifest."""

    steps: Annotated[int | None, Setting("N")] = Field(None, ge=1)
    """Length of the run in inner steps."""
    seed: Annotated[int | None, Setting("N")] = Field(None, ge=0)
    """Seed of the run's random numbers."""
    codec: Annotated[str | None, Setting("NAME")] = None
    """Codec for the weights that peers exchange, like fp32, int8 or modulo4."""
    method: Annotated[str | None, Setting("NAME")] = None
    """Outer optimizer: noloco."""
    inner_steps: Annotated[Any, Setting("N|auto", parser=_inner_steps)] = None
    """Mean number of inner steps between two meetings on a fragment; auto: each peer finds its own."""
    stages: Annotated[int | None, Setting("N")] = Field(None, ge=1)
    """Cut a model that fits no single machine into N stages; each peer holds one. Text and hidden states then leave the machine."""


KEYS = {
    "steps": ("run", "total_steps"), "seed": ("run", "seed"), "codec": ("codec", "name"), "method": ("outer", "method"),
    "inner_steps": ("outer", "inner_steps"), "stages": ("stages", "count"),
}  # fmt: skip


PINS = {  # section and key
    "layout": ("model", "layout"), "tokenizer": ("tokenizer", "digest"), "template": ("data", "template"), "blocks": ("stages", "blocks"),
}  # fmt: skip


def read_manifest(path: Path | None, *, own_text: bool = False) -> Manifest:
    """Return the manifest in a TOML file, else the small run of the demo: on each peer's own text, or on Python's standard library.

    Raises BadManifest.
    """
    if path is None:
        return Manifest.checked({"data": {"source": "text"}} if own_text else {})
    try:
        with path.open(encoding="utf-8") as file:
            return Manifest.from_toml(file.read(MANIFEST_BYTES + 1))
    except (OSError, UnicodeDecodeError) as error:
        raise BadManifest(f"cannot read the manifest {path}: {why_unreadable(error)}", hint="`peer init FILE` writes one") from error


def changed(manifest: Manifest, changes: Mapping[str, object]) -> Manifest:
    """Return the manifest with these fields of RunOptions changed. Raises BadManifest if the result is not valid."""
    values = manifest.model_dump(exclude_unset=True)  # what follows from a value that changes must follow again
    for name, value in changes.items():
        section, key = KEYS[name]
        values.setdefault(section, {})[key] = value
    if changes.get("stages") == 1:
        del values["stages"]
    return Manifest.checked(values)


def with_pins(manifest: Manifest, pins: Mapping[str, Any]) -> Manifest:
    """Return the manifest with these digests, and the cut of a staged model, by name in PINS, where it has none of its own."""
    values = manifest.model_dump()
    for name, (section, key) in PINS.items():
        if key in values.get(section, {}):
            values[section][key] = values[section][key] or pins[name] or None
    return Manifest.checked(values)


def pins_of(manifest: Manifest) -> dict[str, Any]:
    """Return what a manifest pins, by name in PINS."""
    values = manifest.model_dump()
    return {name: values.get(section, {}).get(key) for name, (section, key) in PINS.items()}


def tried(manifest: Manifest, folder: Path | None, config: PeerConfig | None = None) -> Manifest:
    """Try a run, and return its manifest with the digests of its layout and tokenizer, where the tokenizer is not just bytes.

    `folder` may hold the tokenizer, and must hold the weights under an adapter. With the host's settings, its text is tried too, and
    whether its machine has room for the run, as its trainer counts it.
    A process of its own does it: torch and transformers take much memory. Raises BadManifest for a run that cannot train here; names that
    do not exist are found first, without that process.
    """
    need_abilities(manifest)
    need_extra("text")
    return with_pins(manifest, _reply_to({"model": str(folder) if folder else None}, manifest, config))


def need_fit(manifest: Manifest, config: PeerConfig) -> None:
    """Raise BadManifest, in the words of the trainer, for a run that has no room on the machine of a host with these settings."""
    _reply_to({"room_only": True}, manifest, config)


def _reply_to(trial: dict[str, Any], manifest: Manifest, config: PeerConfig | None) -> dict[str, Any]:
    """Have another process try a run; return its reply. Raises BadManifest."""
    trial |= {"manifest": manifest.to_toml(), "config": None if config is None else config.model_dump(mode="json")}
    print("trying the run, which takes some seconds", file=sys.stderr, flush=True)
    found: dict[str, Any] = json.loads(_from_process(json.dumps(trial)))
    if "error" in found:
        raise BadManifest(found["error"], hint=found["hint"])
    return found


def _from_process(trial: str) -> str:
    """Pass a trial to a process of its own; return what it prints."""
    program = [sys.executable, "-P", "-m", "gossamer.peer.trainer.trial"]
    done = subprocess.run(program, input=trial, capture_output=True, text=True, check=False)  # noqa: S603
    if done.returncode:
        sys.stderr.write(done.stderr)  # with the traceback that a report of this bug needs
        done.check_returncode()
    return done.stdout
