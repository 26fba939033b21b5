"""The stand-in for the trainer: `python -m tests.peer.stand_in_trainer`."""

from __future__ import annotations

import sys

from tests.peer.stand_ins import main

if __name__ == "__main__":
    sys.exit(main("trainer"))
