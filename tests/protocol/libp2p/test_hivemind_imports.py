"""hivemind is imported without a trace outside."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

PROGRAM = """
import logging, os, sys, warnings
import torch.multiprocessing
before = list(warnings.filters), torch.multiprocessing.get_sharing_strategy(), logging.getLevelName(logging.WARNING), dict(os.environ)
warnings.simplefilter("error")
filters = list(warnings.filters)
import protocol.libp2p.hivemind_imports
assert list(warnings.filters) == filters, "warning filters"
assert torch.multiprocessing.get_sharing_strategy() == before[1], "sharing strategy"
assert logging.getLevelName(logging.WARNING) == before[2] == "WARNING", "level name"
assert dict(os.environ) == before[3], "environment"
assert not logging.getLogger("hivemind").handlers and logging.getLogger("hivemind").propagate, "log handlers"
assert not logging.getLogger().handlers, "root log handlers"
"""


def test_import_leaves_the_process_as_it_was() -> None:
    root = Path(__file__).parents[3]
    result = subprocess.run([sys.executable, "-c", PROGRAM], cwd=root, capture_output=True, text=True, timeout=50, check=False)
    assert result.returncode == 0, result.stderr
    assert not result.stderr
