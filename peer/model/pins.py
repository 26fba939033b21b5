"""`python -m gossamer.peer.model.pins`: read a manifest from stdin and print the digests of its layout and its tokenizer as JSON.

The host pins both digests before it signs. This is a process of its own because it loads torch and transformers.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from gossamer.peer.model.model import parameter_shapes
from gossamer.peer.text.tokenizer import load_tokenizer
from gossamer.protocol.errors import GossamerError
from gossamer.protocol.run.layout import layout_digest
from gossamer.protocol.run.manifest import Manifest

if __name__ == "__main__":
    try:
        manifest, folder = Manifest.from_toml(sys.stdin.read()), Path(sys.argv[1]) if len(sys.argv) > 1 else None
        tokenizer = load_tokenizer(manifest.tokenizer, folder).digest
        reply = {"layout": layout_digest(parameter_shapes(manifest.model)), "tokenizer": tokenizer}
    except GossamerError as error:
        reply = {"error": str(error), "hint": error.hint}
    sys.stdout.write(json.dumps(reply))
