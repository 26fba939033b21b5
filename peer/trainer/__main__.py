"""`python -m gossamer.peer.trainer`: the trainer process; see process.py."""

from __future__ import annotations

import os
import sys

from gossamer.peer.machine.child import Child, loading, run_child
from gossamer.peer.machine.extras import need_extra
from gossamer.peer.machine.home import Home
from gossamer.protocol.run.manifest import SignedManifest, need_text


def run(child: Child) -> None:
    """Load the program and run it."""
    need_text(SignedManifest.from_bytes(Home(child.settings.config.home).manifest.read_bytes()).manifest())
    need_extra("text")
    with loading():
        import transformers.modeling_utils  # noqa: F401 - each model needs it; a program run does not

        from gossamer.peer.trainer.process import build
    build(child).run()


if __name__ == "__main__":
    exit_code = run_child(run)
    sys.stderr.flush()
    os._exit(exit_code)  # all is saved and closed; taking torch down would cost another second or two
