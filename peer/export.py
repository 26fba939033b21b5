"""A trained model as a Hugging Face folder: weights, config, tokenizer and a card that says where it comes from.

Fast weights unless asked otherwise. Measured on the demo job (4 peers, NoLoCo, held-out nats per byte, mean over the peers, fast against
slow): step 100 2.51/2.64, 300 2.007/2.003, 500 1.757/1.754, 800 (the end) 1.620/1.621; so slow ones are a little ahead in the middle of a
run and far behind at its start, and after the last averaging both are the same. At a peer that trains alone the slow ones never move.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Final

from peer.card import HeldOut, model_card
from peer.evaluation import NUM_BATCHES, held_out_loss, open_corpus
from peer.events import read_events
from peer.home import Home
from peer.model import build_model, quiet_transformers
from peer.tokenizer import BYTES, Tokenizer, load_tokenizer
from peer.weights import Trained, fast_weights, load_trained, set_weights, slow_weights
from protocol.errors import BadSettings
from protocol.manifest import Manifest

if TYPE_CHECKING:
    from transformers import PreTrainedModel

MARK: Final = "gossamer.json"  # marks a folder as an export of ours, and lists its files


def export_model(
    home: Home, folder: Path, use_slow_weights: bool = False, data: Path | None = None, num_batches: int = NUM_BATCHES
) -> HeldOut:
    """Write a home's newest checkpoint to `folder`, which must be new, empty, or an earlier export; returns the loss on its card.

    The loss is that of the weights that are written; `data` is the operator's text where the run asks for one, and with no batches
    nothing is measured. Raises BadSettings (also when the disk refuses; an earlier export is then as it was) or BadManifest.
    """
    _refuse_foreign(folder)
    trained = load_trained(home)
    manifest = trained.manifest
    model = build_model(manifest.model, manifest.run.seed)
    set_weights(model, slow_weights(trained) if use_slow_weights else fast_weights(trained.checkpoint))
    held_out = measure(model, manifest, home, data, num_batches)
    card = model_card(trained, list(read_events(home.events)), "slow" if use_slow_weights else "fast", held_out)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        unfinished = folder / f".writing-{os.getpid()}"
        try:
            write_model(model, manifest, unfinished)
            (unfinished / "README.md").write_text(card, encoding="utf-8")
            _replace(folder, unfinished, trained)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
    except OSError as error:
        raise BadSettings(
            f"cannot write to {folder}: {error.strerror or error}", hint="choose another folder, or free some space"
        ) from error
    return held_out


def measure(model: PreTrainedModel, manifest: Manifest, home: Home, data: Path | None, num_batches: int) -> HeldOut:
    """Measure the held-out loss of a model of the run, where there is text for it.

    Raises BadSettings when `data` was given and will not do; without it, an export does not fail for the lack of text.
    """
    if num_batches == 0:
        return HeldOut(None, reason="as asked")
    try:
        corpus = open_corpus(manifest, home, data)
        try:
            loss = held_out_loss(model, corpus, num_batches)
        finally:
            corpus.close()
    except BadSettings as error:
        if data is not None:
            raise
        return HeldOut(None, reason=str(error))
    return HeldOut(loss, num_batches * manifest.inner.batch_size * manifest.inner.sequence_length)


def write_model(model: PreTrainedModel, manifest: Manifest, folder: Path) -> None:
    """Write what AutoModelForCausalLM and AutoTokenizer load. Raises OSError when the disk refuses."""
    tokenizer = load_tokenizer(manifest.tokenizer.name)
    model.eval()
    if tokenizer.name == BYTES:
        _end_with(model, tokenizer)
    with quiet_transformers():
        try:
            model.save_pretrained(folder)
            tokenizer.save(folder)
        except Exception as error:  # safetensors and tokenizers have errors of their own for a full disk
            raise OSError(str(error)) from error


def _end_with(model: PreTrainedModel, tokenizer: Tokenizer) -> None:
    """Let generation stop where documents end: an architecture's default ids mean nothing among bytes."""
    for config in (model.config, model.generation_config):
        config.bos_token_id = None
        config.eos_token_id = config.pad_token_id = tokenizer.document_end


def _refuse_foreign(folder: Path) -> None:
    if folder.exists() and not folder.is_dir():
        raise BadSettings(f"{folder} is not a folder", hint="choose another one")
    if folder.is_dir() and any(folder.iterdir()) and not (folder / MARK).is_file():
        raise BadSettings(f"{folder} holds something else than an earlier export", hint="choose a new or an empty folder")


def _replace(folder: Path, unfinished: Path, trained: Trained) -> None:
    """Move finished files into place, the mark first: should we be stopped midway, the folder is known as ours."""
    files = sorted(path.name for path in unfinished.iterdir())
    earlier = json.loads((folder / MARK).read_text())["files"] if (folder / MARK).is_file() else []
    mark = {"run_id": trained.manifest.run_id.hex(), "step": trained.checkpoint.step, "files": files}
    (unfinished / MARK).write_text(json.dumps(mark, indent=1) + "\n")
    for name in (MARK, *files):
        (unfinished / name).replace(folder / name)
    for name in {Path(name).name for name in earlier} - {*files}:
        (folder / name).unlink(missing_ok=True)
