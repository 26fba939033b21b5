"""Try a run before its host signs the manifest, and return the digests that the host pins.

Model and tokenizer are built without weights, and the first text is read, so that an error is said before an invite is printed. The host
pins the digests of the layout, of the tokenizer, and of its chat template. Of a fine-tuning run, the weights under the adapter are tried
too. trial.py is the process that does it.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from gossamer.peer.machine.config import PeerConfig
from gossamer.peer.machine.room import held_bytes
from gossamer.peer.machine.runtime_folder import PAYLOAD_BYTES, place_for
from gossamer.peer.model.accelerator import choose_devices
from gossamer.peer.model.model import check_fit, model_config, parameter_shapes
from gossamer.peer.model.start import need_base
from gossamer.peer.text.tokenizer import BYTES, Tokenizer, load_tokenizer
from gossamer.protocol.run.layout import layout_digest
from gossamer.protocol.run.manifest import Manifest, StagedManifest


def pins(manifest: Manifest, folder: Path | None, config: PeerConfig | None) -> dict[str, Any]:
    """Return the digests of a run, empty where there is none, and the blocks of each stage, by the names that `with_pins` gives them.

    Raises OperatorError. Arguments as in trial.py. What is slow to import is imported last: most errors are found before.
    """
    if config is not None:
        choose_devices(config.devices)
    need_base(manifest.model, folder)
    tokenizer = load_tokenizer(manifest.tokenizer, folder)
    check_fit(model_config(manifest.model), tokenizer.vocab_size, manifest.inner.sequence_length)
    if config is not None:
        _try_text(manifest, tokenizer, config.data)
    _try_model(manifest, config)
    if manifest.is_fine_tuning:
        _try_weights(manifest, folder)
    blocks = _cut(manifest) if isinstance(manifest, StagedManifest) else ()
    if tokenizer.name == BYTES and not manifest.is_fine_tuning:
        return {"layout": "", "tokenizer": "", "template": "", "blocks": blocks}
    return {
        "blocks": blocks,
        "layout": layout_digest(parameter_shapes(manifest.model)),
        "tokenizer": tokenizer.digest,
        "template": _template(manifest, tokenizer),
    }


def _try_model(manifest: Manifest, config: PeerConfig | None) -> None:
    """Build the model on the meta device and let it compute; with settings, the host's trainer must have room for it."""
    if config is not None:
        try_room(manifest, config)
    elif isinstance(manifest, StagedManifest):
        from gossamer.peer.trainer.stage_need import least_stage_need

        least_stage_need(manifest, "cpu", None)
    else:
        from gossamer.peer.trainer.need import least_need

        least_need(manifest, "cpu", None)


def try_room(manifest: Manifest, config: PeerConfig) -> None:
    """Raise BadSettings unless the trainer of a host with these settings has room for the run."""
    from gossamer.peer.trainer.fit import need_fit

    need_fit(manifest, config, place_for(PAYLOAD_BYTES, config.home), held_bytes(os.getppid()))


def _cut(manifest: StagedManifest) -> tuple[int, ...]:
    from gossamer.peer.model.stages import manifest_cuts

    return manifest_cuts(manifest)[0].blocks


def _try_text(manifest: Manifest, tokenizer: Tokenizer, data: Path | None) -> None:
    from gossamer.peer.text.batches import Draw
    from gossamer.peer.text.corpus import try_text

    try_text(manifest.data, tokenizer, Draw(manifest.run.seed, b"", manifest.inner.batch_size, manifest.inner.sequence_length), data)


def _try_weights(manifest: Manifest, folder: Path | None) -> None:
    from gossamer.peer.model.evaluation import mask_as_run
    from gossamer.peer.model.start import initial_model

    mask_as_run(initial_model(manifest, folder), manifest, folder)


def _template(manifest: Manifest, tokenizer: Tokenizer) -> str:
    from gossamer.peer.text.conversations import chat_template, template_digest

    return template_digest(chat_template(tokenizer)) if manifest.data.format == "chat" else ""
