"""`python -m gossamer.peer.model.pins`: read a manifest from stdin, try it, and print the digests that the host pins, as JSON.

The host pins them before it signs: of the layout, of the tokenizer, and of its chat template. Of a fine-tuning run, the weights under the
adapter and the first conversations of the host's own files are tried too. This is a process of its own because it loads torch and
transformers. Its arguments are the folder of the model and the path of the text, each empty if there is none.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from gossamer.peer.model.evaluation import mask_as_run
from gossamer.peer.model.model import check_fit, parameter_shapes
from gossamer.peer.model.start import initial_model, need_base
from gossamer.peer.text.conversations import chat_template, template_digest
from gossamer.peer.text.corpus import need_answers
from gossamer.peer.text.tokenizer import Tokenizer, load_tokenizer
from gossamer.protocol.errors import GossamerError
from gossamer.protocol.run.layout import layout_digest
from gossamer.protocol.run.manifest import FineTuningManifest, Manifest


def pins(manifest: Manifest, folder: Path | None, data: Path | None) -> dict[str, str]:
    """Return the digests of a run, empty where there is none, by the names that `with_pins` gives them. Raises OperatorError."""
    need_base(manifest.model, folder)
    tokenizer = load_tokenizer(manifest.tokenizer, folder)
    found = {"layout": layout_digest(parameter_shapes(manifest.model)), "tokenizer": tokenizer.digest, "template": ""}
    if isinstance(manifest, FineTuningManifest):
        _try(manifest, tokenizer, folder, data)
        if manifest.data.format == "chat":
            found["template"] = template_digest(chat_template(tokenizer))
    return found


def _try(manifest: FineTuningManifest, tokenizer: Tokenizer, folder: Path | None, data: Path | None) -> None:
    if manifest.data.has_prompts:
        need_answers(manifest.data, tokenizer, manifest.inner.sequence_length, data)
    model = initial_model(manifest, folder)
    check_fit(model.config, tokenizer.vocab_size, manifest.inner.sequence_length)
    mask_as_run(model, manifest, folder)


if __name__ == "__main__":
    try:
        reply = pins(Manifest.from_toml(sys.stdin.read()), *(Path(text) if text else None for text in sys.argv[1:3]))
    except GossamerError as error:
        reply = {"error": str(error), "hint": error.hint}
    sys.stdout.write(json.dumps(reply))
