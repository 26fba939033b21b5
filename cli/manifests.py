"""Manifests of the command line: from a file or the default, with the changes of the options."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from gossamer.protocol.errors import BadManifest
from gossamer.protocol.run.manifest import Manifest


def default_manifest(*, own_text: bool) -> Manifest:
    """Return the small run of the demo: on text of each peer's own, or on Python's standard library."""
    return Manifest.checked({"data": {"source": "text"}} if own_text else {})


def read_manifest(path: Path | None, *, own_text: bool = False) -> Manifest:
    """Return the manifest in a TOML file, or the default one. Raises BadManifest."""
    if path is None:
        return default_manifest(own_text=own_text)
    try:
        return Manifest.from_toml(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise BadManifest(f"cannot read the manifest {path}: {reason}", hint="`peer init FILE` writes one") from error


def changed(
    manifest: Manifest,
    *,
    steps: int | None = None,
    seed: int | None = None,
    codec: str | None = None,
    method: str | None = None,
    inner_steps: int | str | None = None,
) -> Manifest:
    """Return the manifest with the given values replaced. Raises BadManifest if the result is not valid."""
    values = manifest.model_dump(exclude_unset=True)  # what follows from a value that changes must follow again
    for section, key, value in (
        ("run", "total_steps", steps),
        ("run", "seed", seed),
        ("codec", "name", codec),
        ("outer", "method", method),
        ("outer", "inner_steps", inner_steps),
    ):
        if value is not None:
            values.setdefault(section, {})[key] = value
    return Manifest.checked(values)


def with_pins(manifest: Manifest, layout: str | None, tokenizer: str | None) -> Manifest:
    """Return the manifest with these digests where it has none of its own."""
    values = manifest.model_dump()
    values["model"]["layout"] = manifest.model.layout or layout
    values["tokenizer"]["digest"] = manifest.tokenizer.digest or tokenizer
    return Manifest.checked(values)


def pinned(manifest: Manifest, folder: Path | None) -> Manifest:
    """Return the manifest with the digests of its model's layout and of its tokenizer, where that is not just bytes.

    `folder` may hold the tokenizer. Found in a process of its own: torch and transformers take much memory. Raises BadManifest.
    """
    if manifest.tokenizer.name == "bytes" or (manifest.model.layout and manifest.tokenizer.digest):
        return manifest
    program = [sys.executable, "-P", "-m", "gossamer.peer.model.pins", *([str(folder)] if folder else [])]
    said = subprocess.run(program, input=manifest.to_toml(), capture_output=True, text=True, check=True).stdout  # noqa: S603
    found = json.loads(said)
    if "error" in found:
        raise BadManifest(found["error"], hint=found["hint"])
    return with_pins(manifest, found["layout"], found["tokenizer"])
