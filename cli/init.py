"""`peer init`: write a manifest that explains every key, to edit before hosting."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from gossamer.cli.generated_options import Given, takes
from gossamer.cli.manifests import RunOptions, changed
from gossamer.cli.options import DEFAULT_HOME, HomeFolder
from gossamer.peer.machine.home import Home
from gossamer.protocol.errors import BadSettings
from gossamer.protocol.identity import Identity
from gossamer.protocol.run.manifest import Manifest

ManifestFile = Annotated[Path, typer.Argument(metavar="FILE", help="Where to write it.")]
From = Annotated[
    Path | None,
    typer.Option(
        "--from", metavar="FOLDER", exists=True, file_okay=False, help="Start from the model in this folder, as transformers saves it."
    ),
]
DEFAULT_FILE = Path("gossamer.toml")


@takes("changes", RunOptions)
def init(file: ManifestFile = DEFAULT_FILE, home: HomeFolder = DEFAULT_HOME, *, changes: Given, start: From = None) -> None:
    """Write a manifest for a new run.

    The file explains every key. This peer becomes the one that can invite others.
    With --from, training continues from an existing model: digests pin its weights, tokenizer and layout.
    """
    from gossamer.peer.model.plan import need_abilities  # torch: slow to import, and needed only now

    folder = Home(home)
    folder.create()
    peer_id = Identity.load_or_create(folder.identity).peer_id
    base = Manifest() if start is None else continue_from_folder(start, changes.get("steps"))
    manifest = changed(base, changes).with_host(peer_id)
    need_abilities(manifest)
    try:
        with file.open("x", encoding="utf-8") as out:
            out.write(manifest.to_toml())
    except FileExistsError as error:
        raise BadSettings(f"{file} is already there", hint="give another file name; a manifest is never overwritten") from error
    except OSError as error:
        raise BadSettings(f"cannot write {file}: {error.strerror}", hint="give another file name") from error
    print(f"wrote {file}; edit it, then `peer host {file}{f' --model {start}' if start else ''}`", file=sys.stderr)


def continue_from_folder(start: Path, steps: int | None) -> Manifest:
    """Return the manifest of a run that starts from the model in a folder. Raises BadManifest."""
    from gossamer.peer.model.start import started_from  # transformers: slow to import

    plain = Manifest()
    return Manifest.checked(started_from(start, steps or plain.run.total_steps, plain.inner.learning_rate))
