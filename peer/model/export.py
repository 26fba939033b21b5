"""Export of a trained model as a Hugging Face folder: weights, config, tokenizer, and a model card with its origin.

The default is the fast weights: early in a run they are better (docs/log.md), and at a peer that trains alone the slow ones never move.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from gossamer.peer.machine.events import Event, MeetingDone, StateTransferred, read_events
from gossamer.peer.machine.home import Home
from gossamer.peer.machine.status import VERSION
from gossamer.peer.model.evaluation import measured_loss, open_corpus, reported_batches
from gossamer.peer.model.model import build_model, quiet_transformers
from gossamer.peer.model.weights import Show, Trained, fast_weights, load_trained, set_weights, show_nothing, slow_weights
from gossamer.peer.text.tokenizer import BYTES, load_tokenizer
from gossamer.protocol.errors import BadSettings
from gossamer.protocol.run.manifest import Manifest

if TYPE_CHECKING:
    from transformers import PreTrainedModel

MARK: Final = "gossamer.json"  # marks a folder as an export and lists its files
MAX_NAMED: Final = 64  # contributors
CARD: Final = """---
library_name: transformers
pipeline_tag: text-generation
tags:
- gossamer
- decentralized-training
---

# {title}

Trained by a swarm of peers that meet in pairs, without a coordinator. Load it with `AutoModelForCausalLM.from_pretrained`.

| | |
|---|---|
{table}

## Contributors

Peers whose weights were merged into this one's directly, as far as its log goes back. They carry the work of further peers:

{contributors}"""


@dataclass(frozen=True, slots=True)
class MeasuredLoss:
    """The held-out loss of the exported weights."""

    loss: float | None  # nats per token; None if it was not measured
    num_tokens: int = 0  # predicted
    reason: str = ""  # why there is no loss

    def __str__(self) -> str:
        return "not measured" if self.loss is None else f"{self.loss:.4f} nats per token, over {self.num_tokens} tokens"


def export_model(
    home: Home,
    folder: Path,
    use_slow_weights: bool = False,
    data: Path | None = None,
    num_batches: int | None = None,
    show: Show = show_nothing,
) -> MeasuredLoss:
    """Write a home's newest checkpoint to `folder`, which must be new, empty, or an earlier export; returns the loss on its card.

    The loss is that of the exported weights. `data` is the operator's text, if the run needs one. With 0 batches nothing is measured.
    Raises BadSettings or BadManifest; when the disk refuses, an earlier export is unchanged.
    """
    _refuse_foreign(folder)
    trained = load_trained(home, show)
    manifest = trained.manifest
    model = build_model(manifest.model, manifest.run.seed)
    set_weights(model, slow_weights(trained) if use_slow_weights else fast_weights(trained.checkpoint))
    num_batches = reported_batches(manifest) if num_batches is None else num_batches
    measured = measure(model, manifest, home, data, num_batches, show)
    card = model_card(trained, list(read_events(home.events)), "slow" if use_slow_weights else "fast", measured)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        unfinished = folder / f".writing-{os.getpid()}"
        try:
            _write_model(model, manifest, unfinished)
            (unfinished / "README.md").write_text(card, encoding="utf-8")
            _replace(folder, unfinished, trained)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
    except OSError as error:
        raise BadSettings(
            f"cannot write to {folder}: {error.strerror or error}", hint="choose another folder, or free some space"
        ) from error
    return measured


def measure(model: PreTrainedModel, manifest: Manifest, home: Home, data: Path | None, num_batches: int, show: Show) -> MeasuredLoss:
    """Measure the held-out loss of a model of the run, if there is text for it.

    Raises BadSettings when `data` is given and unusable; without `data`, an export does not fail for lack of text.
    """
    if num_batches == 0:
        return MeasuredLoss(None, reason="as asked")
    try:
        with closing(open_corpus(manifest, home, data)) as corpus:
            loss = measured_loss(model, manifest, corpus, num_batches, show)
    except BadSettings as error:
        if data is not None:
            raise
        return MeasuredLoss(None, reason=str(error))
    return MeasuredLoss(loss, num_batches * manifest.inner.batch_size * manifest.inner.sequence_length)


def _write_model(model: PreTrainedModel, manifest: Manifest, folder: Path) -> None:
    """Write the files of AutoModelForCausalLM and AutoTokenizer. Raises OSError when the disk refuses."""
    tokenizer = load_tokenizer(manifest.tokenizer)
    model.eval()
    if tokenizer.name == BYTES:  # an architecture's default token ids do not apply
        for config in (model.config, model.generation_config):
            config.bos_token_id = None
            config.eos_token_id = config.pad_token_id = tokenizer.document_end
    with quiet_transformers():
        try:
            model.save_pretrained(folder)
            tokenizer.save(folder)
        except Exception as error:  # safetensors and tokenizers raise their own types for a full disk
            raise OSError(str(error)) from error


def _refuse_foreign(folder: Path) -> None:
    if folder.exists() and not folder.is_dir():
        raise BadSettings(f"{folder} is not a folder", hint="choose another one")
    if folder.is_dir() and any(folder.iterdir()) and not (folder / MARK).is_file():
        raise BadSettings(f"{folder} holds files that are not an earlier export", hint="choose a new or an empty folder")


def _replace(folder: Path, unfinished: Path, trained: Trained) -> None:
    """Move finished files into place, the mark first: so an interrupted export is recognized as one."""
    files = sorted(path.name for path in unfinished.iterdir())
    earlier = json.loads((folder / MARK).read_text())["files"] if (folder / MARK).is_file() else []
    mark = {"run_id": trained.manifest.run_id.hex(), "step": trained.checkpoint.step, "files": files}
    (unfinished / MARK).write_text(json.dumps(mark, indent=1) + "\n")
    for name in (MARK, *files):
        (unfinished / name).replace(folder / name)
    for name in {Path(name).name for name in earlier} - {*files}:
        (folder / name).unlink(missing_ok=True)


def model_card(trained: Trained, events: Sequence[Event], weights: str, measured: MeasuredLoss) -> str:
    """Write the card (Markdown with a Hugging Face header) of a checkpoint; its contributors come from the peer's event log."""
    manifest, state = trained.manifest, trained.checkpoint.state
    partners = contributors(events)
    rows = {
        "run": f"{_plain(manifest.run.name)} `{manifest.run_id.hex()}` (the SHA-256 of its manifest)",
        "model": _plain(manifest.model.hub or manifest.model.architecture),
        "tokenizer": _plain(manifest.tokenizer.name),
        "data": _plain(manifest.data.name or manifest.data.source),
        "method": f"{manifest.outer.method}, codec {manifest.codec.name}, inner steps between meetings: {manifest.outer.inner_steps}",
        "clock": f"{state['clock_steps']} of {manifest.run.total_steps} steps",
        "this peer": f"{trained.checkpoint.step} inner steps, {state['tokens']} tokens",
        "weights": weights,
        "held-out loss": str(measured),
        "peers met": f"{len(partners)} at least" if partners else "none",
        "trained with": f"gossamer {VERSION}",
    }
    table = "\n".join(f"| {name} | {value} |" for name, value in rows.items())
    named = "".join(f"- `{partner}`\n" for partner in partners[:MAX_NAMED])
    more = f"- and {len(partners) - MAX_NAMED} more\n" if len(partners) > MAX_NAMED else ""
    return CARD.format(title=_plain(manifest.run.name), table=table, contributors=named + more or "None in this peer's log.\n")


def contributors(events: Sequence[Event]) -> list[str]:
    """Return the peers whose weights were merged into this one's directly, each once, in the order of meeting."""
    met: dict[str, None] = {}
    for event in events:
        match event:
            case MeetingDone(partner=partner, outcome="completed"):
                met[partner] = None
            case StateTransferred(sources=sources):
                met.update(dict.fromkeys(sources))
    return list(met)


def _plain(name: str) -> str:
    """Replace characters that Markdown could read as markup: names come from other people."""
    return "".join(letter if letter.isalnum() or letter in " -_./" else "?" for letter in name)
