"""Tests on an accelerator made in Python (python_device.py), in a process of their own, because torch cannot lose a device again.

By hand: `GOSSAMER_TEST_DEVICE=pygpu python -m pytest tests/device/trainer_checks.py`, or any other test whose replicas are `small_replica`.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TRAINER = ("exchange", "exchange_order", "exchange_thread", "saver", "adoption", "inner_loop", "probe")
FILES = (
    "tests/device/device_checks.py",
    "tests/device/trainer_checks.py",
    *(f"tests/peer/trainer/test_{name}.py" for name in TRAINER),
)


@pytest.mark.timeout(300)
def test_on_a_device_made_in_python() -> None:
    environment = os.environ | {"GOSSAMER_TEST_DEVICE": "pygpu", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-P", "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *FILES]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout
