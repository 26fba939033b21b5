"""Export of a trained model as a folder with a model card: of a text run as transformers loads it, of a program run its tensors by name.

The default is the fast weights: early in a run they are better (docs/log.md), and at a peer that trains alone the slow ones never move.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Final

from safetensors.torch import save_file
from torch import Tensor

from gossamer.optim.fragments import STATISTICS
from gossamer.peer.machine.home import Home
from gossamer.peer.model.card import CardSource, MeasuredLoss, is_adapter, model_card
from gossamer.peer.model.weights import Show, Trained, fast_weights, load_trained, show_nothing, slow_weights, writing
from gossamer.protocol.errors import BadSettings
from gossamer.protocol.run.manifest import Manifest, StagedManifest

MARK: Final = "gossamer.json"  # marks a folder as an export and lists its files
WEIGHTS: Final = "model.safetensors"  # of a program run


def export_model(
    home: Home,
    folder: Path,
    use_slow_weights: bool = False,
    data: Path | None = None,
    num_tokens: int | None = None,
    show: Show = show_nothing,
    merges: bool = False,
    others: Sequence[Home] = (),
) -> MeasuredLoss:
    """Write a home's newest checkpoint to `folder`, which must be new, empty, or an earlier export; returns the loss on its card.

    Of a run with an adapter that is the adapter, in peft's format; with `merges` the model into which it is merged.
    Of a staged run, `others` are homes with the other stages; homes of one stage are averaged.
    The loss is that of the exported weights. `data` is the operator's text, if the run needs one. With 0 tokens nothing is measured.
    Raises BadSettings or BadManifest; when the disk refuses, an earlier export is unchanged.
    """
    _refuse_foreign(folder)
    trained = load_trained(home, show)
    if merges and not is_adapter(trained.manifest):
        raise BadSettings("--merge has no effect: this run trains the model itself, no adapter", hint="leave it out")
    if others and not isinstance(trained.manifest, StagedManifest):
        raise BadSettings("--with has no effect: each peer of this run holds the whole model", hint="leave it out")
    weights = slow_weights(trained) if use_slow_weights else fast_weights(trained.checkpoint)
    sources = [CardSource.of(home, trained)]
    if isinstance(manifest := trained.manifest, StagedManifest):
        from gossamer.peer.model.staged_export import measure_stages, write_stages
        from gossamer.peer.model.staged_weights import load_parts, whole_weights

        parts = load_parts(home, trained, others, show)
        stages = whole_weights(parts, use_slow_weights)
        sources = [CardSource.of(part.home, part.trained, part.stage + 1) for part in parts]
        measured = measure_stages(stages, manifest, home, data, num_tokens, show)
        write = partial(write_stages, stages, manifest, home)
    elif isinstance(manifest, Manifest):
        from gossamer.peer.model.text_export import measure, text_model, write_model  # transformers: for text runs only

        model = text_model(manifest, home, weights)
        measured = measure(model, manifest, home, data, num_tokens, show)
        write = partial(write_model, model, manifest, home, merges)
    else:
        measured = _measured_by_program(data, num_tokens)
        write = partial(_write_tensors, weights)
    card = model_card(sources, "slow" if use_slow_weights else "fast", measured, merges=merges)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        unfinished = folder / f".writing-{os.getpid()}"
        try:
            write(unfinished)
            (unfinished / "README.md").write_text(card, encoding="utf-8")
            _replace(folder, unfinished, trained)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
    except OSError as error:
        raise BadSettings(
            f"cannot write to {folder}: {error.strerror or error}", hint="choose another folder, or free some space"
        ) from error
    return measured


def _measured_by_program(data: Path | None, num_tokens: int | None) -> MeasuredLoss:
    """Return that this run's program measures its loss. Raises BadSettings for options that ask us to."""
    if data is not None or num_tokens:
        raise BadSettings("a program run has no text to measure a loss on", hint="leave out --data and --tokens")
    return MeasuredLoss(None, reason="the program measures it")


def _write_tensors(weights: Mapping[str, Tensor], folder: Path) -> None:
    """Write tensors by their names in the program's model. Raises OSError when the disk refuses."""
    folder.mkdir()
    with writing():
        save_file({name.removeprefix(STATISTICS): tensor for name, tensor in weights.items()}, folder / WEIGHTS, metadata={"format": "pt"})


def _refuse_foreign(folder: Path) -> None:
    if folder.exists() and not folder.is_dir():
        raise BadSettings(f"{folder} is not a folder", hint="choose another one")
    if folder.is_dir() and any(folder.iterdir()) and not (folder / MARK).is_file():
        raise BadSettings(f"{folder} holds files that are not an earlier export", hint="choose a new or an empty folder")


def _replace(folder: Path, unfinished: Path, trained: Trained) -> None:
    """Move finished files into place, the mark first: so an interrupted export is recognized as one."""
    files = sorted(path.name for path in unfinished.iterdir())
    earlier: list[str] = []
    with contextlib.suppress(FileNotFoundError, ValueError):  # none, or one that a power cut has left empty
        earlier = json.loads((folder / MARK).read_bytes())["files"]
    mark = {"run_id": trained.manifest.run_id.hex(), "step": trained.checkpoint.step, "files": files}
    (unfinished / MARK).write_text(json.dumps(mark, indent=1) + "\n")
    for name in (MARK, *files):
        (unfinished / name).replace(folder / name)
    for name in {Path(name).name for name in earlier} - {*files}:
        (folder / name).unlink(missing_ok=True)
