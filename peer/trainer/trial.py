"""`python -m gossamer.peer.trainer.trial`: read a Trial from stdin, try its run, and print what the host pins, as JSON.

A process of its own because torch and transformers take much memory. An error is printed too, with its hint.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from gossamer.peer.machine.config import PeerConfig
from gossamer.protocol.errors import GossamerError
from gossamer.protocol.run.manifest import Manifest


class Trial(BaseModel):
    """What is tried."""

    manifest: str  # as TOML
    model: Path | None = None  # the folder with the tokenizer, and with the weights under an adapter
    config: PeerConfig | None = None  # of the host; None: only the manifest is tried, with neither text nor machine
    room_only: bool = False  # whether the host continues a run that was tried before, so only the machine is


def reply_to(trial: Trial) -> dict[str, Any]:
    """Try a run; return its pins, or the error that it has."""
    from gossamer.peer.trainer.pins import pins, try_room  # torch

    try:
        manifest = Manifest.from_toml(trial.manifest)
        if trial.config is not None and trial.room_only:
            try_room(manifest, trial.config)
            return {}
        return pins(manifest, trial.model, trial.config)
    except GossamerError as error:
        return {"error": str(error), "hint": error.hint}


if __name__ == "__main__":
    gc.disable()  # to scan what torch and transformers load, again and again and at the end, would take a third of the time
    sys.stdout.write(json.dumps(reply_to(Trial.model_validate_json(sys.stdin.read()))))
    sys.stdout.flush()
    os._exit(0)
