"""`peer init`: write a manifest that explains every key, to edit before hosting."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from gossamer.cli.generated_options import Given, takes
from gossamer.cli.manifests import RunOptions, changed, tried
from gossamer.cli.options import DEFAULT_HOME, HomeFolder
from gossamer.peer.machine.extras import need_extra
from gossamer.peer.machine.home import Home
from gossamer.peer.model.abilities import need_abilities
from gossamer.protocol.errors import BadSettings, OperatorError
from gossamer.protocol.identity import Identity
from gossamer.protocol.run.manifest import Manifest

ManifestFile = Annotated[Path, typer.Argument(metavar="FILE", help="Where to write it.")]
From = Annotated[
    Path | None,
    typer.Option(
        "--from", metavar="FOLDER", exists=True, file_okay=False, help="Start from the model in this folder, as transformers saves it."
    ),
]
Lora = Annotated[
    int | None,
    typer.Option("--lora", metavar="RANK", min=1, help="With --from: train a LoRA adapter of this rank, the model stays as it is."),
]
DataFormat = Annotated[
    Literal["text", "chat", "pairs"] | None,
    typer.Option(
        "--format",
        help="With --from: what each peer's --data holds. chat: lists of messages; pairs: prompts with completions. Default: text.",
    ),
]
DEFAULT_FILE = Path("gossamer.toml")


@takes("changes", RunOptions)
def init(
    file: ManifestFile = DEFAULT_FILE,
    home: HomeFolder = DEFAULT_HOME,
    *,
    changes: Given,
    start: From = None,
    lora: Lora = None,
    data_format: DataFormat = None,
) -> None:
    """Write a manifest for a new run.

    The file explains every key. This peer becomes the one that can invite others.
    With --from, training continues from an existing model: digests pin its weights, tokenizer and layout. With --lora or --format, the run
    fine-tunes it: an adapter in place of all weights, answers in place of all tokens.
    """
    if start is None and (lora or data_format):
        raise BadSettings("--lora and --format fine-tune a model that exists", hint="name its folder with --from FOLDER")
    if file.exists():
        raise BadSettings(f"{file} is already there", hint="give another file name; a manifest is never overwritten")
    if not os.access(file.absolute().parent, os.W_OK):
        raise BadSettings(f"{file} cannot be written", hint="name a file in a folder that this user may write to")
    base = Manifest() if start is None else continue_from_folder(start, changes.get("steps"), lora or 0, data_format or "text")
    wanted = changed(base, changes)
    try_run(wanted, start)  # nothing is written before
    folder = Home(home)
    folder.create()
    manifest = wanted.with_host(Identity.load_or_create(folder.identity).peer_id)
    try:
        with file.open("x", encoding="utf-8") as out:
            out.write(manifest.to_toml())
    except FileExistsError as error:
        raise BadSettings(f"{file} is already there", hint="give another file name; a manifest is never overwritten") from error
    except OSError as error:
        raise BadSettings(f"cannot write {file}: {error.strerror}", hint="give another file name") from error
    options = "".join([f" --model {start}" if start else "", " --data FILES" if lora or data_format else ""])
    print(f"wrote {file}; edit it, then `peer host {file}{options}`", file=sys.stderr)


def try_run(wanted: Manifest, start: Path | None) -> None:
    """Raise BadManifest for a run that cannot train. Where packages are missing, check only what needs none, and say so."""
    need_abilities(wanted)
    try:
        need_extra("text")
    except OperatorError as error:
        print(f"model and tokenizer were not tried: {error}; {error.hint}", file=sys.stderr)
        return
    tried(wanted, start)


def continue_from_folder(start: Path, steps: int | None, rank: int = 0, data_format: str = "text") -> Manifest:
    """Return the manifest of a run that starts from a folder's model, with an adapter of this rank; 0: without. Raises OperatorError."""
    from gossamer.peer.model.start import fine_tuned, started_from  # transformers: slow to import

    if rank:
        need_extra("lora")
    plain = Manifest()
    tables = started_from(start, steps or plain.run.total_steps, plain.inner.learning_rate)
    if not rank and data_format == "text":
        return Manifest.checked(tables)
    return fine_tuned(tables, start, rank, data_format)
