"""`python -m gossamer.peer.trainer.pins`: read a manifest from stdin, try it, and print the digests that the host pins, as JSON.

The host tries a run before it signs the manifest: model and tokenizer are built without weights, and the first text is read, so that an
error is said before an invite is printed. It pins the digests of the layout, of the tokenizer, and of its chat template. Of a fine-tuning
run, the weights under the adapter are tried too. This is a process of its own because it loads torch and transformers. Its arguments are
the folder of the model, the path of the text, each empty if there is none, and the devices setting, empty if only the manifest is tried.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from gossamer.peer.machine.room import held_bytes, memory_room
from gossamer.peer.model.accelerator import choose_devices
from gossamer.peer.model.model import check_fit, model_config, parameter_shapes
from gossamer.peer.model.start import need_base
from gossamer.peer.text.tokenizer import BYTES, Tokenizer, load_tokenizer
from gossamer.protocol.errors import GossamerError
from gossamer.protocol.run.fine_tuning import FineTuningDataSection
from gossamer.protocol.run.layout import layout_digest
from gossamer.protocol.run.manifest import FineTuningManifest, Manifest


def pins(manifest: Manifest, folder: Path | None, data: Path | None, devices: str) -> dict[str, str]:
    """Return the digests of a run, empty where there is none, by the names that `with_pins` gives them. Raises OperatorError.

    `devices`: as in the settings; empty: neither devices nor text are tried. What is slow to import is imported last: most errors are found
    before.
    """
    chosen = choose_devices(devices)[0] if devices else ()
    need_base(manifest.model, folder)
    config = model_config(manifest.model)
    tokenizer = load_tokenizer(manifest.tokenizer, folder)
    check_fit(config, tokenizer.vocab_size, manifest.inner.sequence_length)
    if devices:
        _try_text(manifest, tokenizer, data)
    _try_model(manifest, chosen)
    if isinstance(manifest, FineTuningManifest):
        _try_weights(manifest, folder)
    if tokenizer.name == BYTES and not isinstance(manifest, FineTuningManifest):
        return {"layout": "", "tokenizer": "", "template": ""}
    return {
        "layout": layout_digest(parameter_shapes(manifest.model)),
        "tokenizer": tokenizer.digest,
        "template": _template(manifest, tokenizer),
    }


def _try_model(manifest: Manifest, devices: Sequence[torch.device]) -> None:
    """Build the model on the meta device and let it compute; with devices, the least that it needs must fit."""
    from gossamer.peer.model.accelerator import has_own_memory
    from gossamer.peer.trainer.need import device_room, least_need, need_device_memory, need_memory

    kind = devices[0].type if devices else "cpu"
    room = device_room(devices) if has_own_memory(kind) else None
    need = least_need(manifest, kind, room)
    if devices:
        need_memory(need, memory_room(held_bytes(os.getpid())))
    if room is not None:
        need_device_memory(need, room)


def _try_text(manifest: Manifest, tokenizer: Tokenizer, data: Path | None) -> None:
    from gossamer.peer.text.batches import Draw
    from gossamer.peer.text.corpus import try_text

    try_text(manifest.data, tokenizer, Draw(manifest.run.seed, b"", manifest.inner.batch_size, manifest.inner.sequence_length), data)


def _try_weights(manifest: FineTuningManifest, folder: Path | None) -> None:
    from gossamer.peer.model.evaluation import mask_as_run
    from gossamer.peer.model.start import initial_model

    mask_as_run(initial_model(manifest, folder), manifest, folder)


def _template(manifest: Manifest, tokenizer: Tokenizer) -> str:
    from gossamer.peer.text.conversations import chat_template, template_digest

    is_chat = isinstance(manifest.data, FineTuningDataSection) and manifest.data.format == "chat"
    return template_digest(chat_template(tokenizer)) if is_chat else ""


if __name__ == "__main__":
    try:
        model, text, devices = sys.argv[1:4]
        reply = pins(Manifest.from_toml(sys.stdin.read()), Path(model) if model else None, Path(text) if text else None, devices)
    except GossamerError as error:
        reply = {"error": str(error), "hint": error.hint}
    sys.stdout.write(json.dumps(reply))
