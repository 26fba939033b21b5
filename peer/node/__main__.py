"""`python -m gossamer.peer.node`: the node process; see process.py."""

from __future__ import annotations

import sys

from gossamer.peer.machine.child import Child, loading, run_child


def run(child: Child) -> None:
    """Load the program and run it."""
    with loading():
        import uvloop

        from gossamer.peer.node.process import run_node
    uvloop.run(run_node(child))


if __name__ == "__main__":
    sys.exit(run_child(run))
