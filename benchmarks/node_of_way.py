"""A node process that requests weights in one of the ways that `transfer_cost` compares. All else is the real node's."""

from __future__ import annotations

import math
import sys
from typing import Final

from gossamer.peer.machine.child import Child, run_child
from gossamer.peer.node.__main__ import run
from gossamer.peer.sync import transfer

WAY: Final = "way"  # a file in the home folder
PIECES, CHUNKS, BULK = "pieces", "chunks", "bulk"
WAYS: Final = (PIECES, CHUNKS, BULK)


def run_in_way(child: Child) -> None:
    """Run the node in the way that its home folder names."""
    way = (child.settings.config.home / WAY).read_text()
    if way != BULK:
        transfer.BULK_WORTH_BYTES = math.inf  # type: ignore[assignment]
    if way == PIECES:
        transfer.RUNS_UNDER_WAY = 1 << 30
    run(child)


if __name__ == "__main__":
    sys.exit(run_child(run_in_way))
