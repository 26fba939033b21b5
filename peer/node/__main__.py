"""`python -m peer.node`: the node process."""

from __future__ import annotations

import logging
import sys

import uvloop

from peer.machine.child import Child, run_child
from peer.node.process import run_node


def run(child: Child) -> None:
    """Run the node process."""
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(name)s: %(message)s", stream=sys.stderr)
    uvloop.run(run_node(child))


if __name__ == "__main__":
    sys.exit(run_child(run))
