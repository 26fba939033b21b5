"""Importing hivemind changes no global state and loads no unneeded package."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

PROGRAM = """
import logging, os, sys, warnings
before = logging.getLevelName(logging.WARNING), dict(os.environ)
warnings.simplefilter("error")
filters = list(warnings.filters)
import gossamer.protocol.libp2p.hivemind_imports
assert list(warnings.filters) == filters, "warning filters"
assert not {"torch", "scipy", "hivemind.averaging", "hivemind.moe"} & set(sys.modules), "unneeded modules"
assert logging.getLevelName(logging.WARNING) == before[0] == "WARNING", "level name"
assert dict(os.environ) == before[1], "environment"
assert not logging.getLogger("hivemind").handlers and logging.getLogger("hivemind").propagate, "log handlers"
assert not logging.getLogger().handlers, "root log handlers"
"""


def test_import_changes_no_global_state() -> None:
    root = Path(__file__).parents[3]
    result = subprocess.run([sys.executable, "-c", PROGRAM], cwd=root, capture_output=True, text=True, timeout=50, check=False)
    assert result.returncode == 0, result.stderr
    assert not result.stderr
