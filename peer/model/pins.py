"""`python -m peer.model.pins`: from a manifest on stdin, what its host pins before it signs: the digests of layout and tokenizer, as JSON.

A process of its own, for it takes torch and transformers, and whoever asks lives on beside a trainer.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from peer.model.model import layout_digest, parameter_shapes
from peer.text.tokenizer import load_tokenizer
from protocol.errors import GossamerError
from protocol.run.manifest import Manifest


def _pins(manifest: Manifest, folder: Path | None) -> dict[str, str]:
    """Return the digests of the model's layout and of the tokenizer, from a folder or by its name. Raises BadManifest."""
    return {"layout": layout_digest(parameter_shapes(manifest.model)), "tokenizer": load_tokenizer(manifest.tokenizer, folder).digest}


if __name__ == "__main__":
    try:
        said = _pins(Manifest.from_toml(sys.stdin.read()), Path(sys.argv[1]) if len(sys.argv) > 1 else None)
    except GossamerError as error:
        said = {"error": str(error), "hint": error.hint}
    sys.stdout.write(json.dumps(said))
