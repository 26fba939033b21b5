"""`python -m peer.node`: the node process."""

from __future__ import annotations

import logging
import sys
import traceback

import uvloop

from peer.machine.child import Child
from peer.node.process import NodeProcess
from protocol.errors import GossamerError


def main() -> int:
    """Run the node process."""
    child = Child()
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(name)s: %(message)s", stream=sys.stderr)
    try:
        uvloop.run(NodeProcess(child).run())
        return 0
    except Exception as error:
        first = _first(error)
        if not isinstance(first, GossamerError):
            traceback.print_exc()
        return child.fail(first)


def _first(error: BaseException) -> BaseException:
    """Return the error inside task groups' groups."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


if __name__ == "__main__":
    sys.exit(main())
