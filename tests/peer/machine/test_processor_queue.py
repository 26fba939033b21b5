from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

from gossamer.peer.machine.processor_queue import queued_clock

CROWDED = """
import os, sys, time
from gossamer.peer.machine.processor_queue import queued_clock
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
rival = os.fork()
if not rival:
    while os.getppid() != 1:
        pass
    os._exit(0)
try:
    queued_s, start_s = queued_clock(), time.monotonic()
    while queued_s() < 0.05:
        assert time.monotonic() - start_s < 30.0, "two that never sleep have one processor, and neither waits for it"
    print("waited")
finally:
    os.kill(rival, 9)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel counts it on Linux only")
def test_the_clock_advances_while_the_thread_waits_for_a_processor() -> None:
    ran = subprocess.run([sys.executable, "-c", CROWDED], capture_output=True, text=True, check=False, timeout=50)
    assert ran.stdout == "waited\n", ran.stderr


def test_the_clock_is_never_faster_than_real_time() -> None:
    queued_s = queued_clock()
    start_s, before_s = time.monotonic(), queued_s()
    while time.monotonic() - start_s < 0.02:
        pass
    assert 0.0 <= queued_s() - before_s <= time.monotonic() - start_s


def test_the_clock_closes_its_file() -> None:
    num_files = len(os.listdir("/proc/self/fd")) if sys.platform == "linux" else 0
    clock = queued_clock()
    clock()
    del clock
    assert not num_files or len(os.listdir("/proc/self/fd")) == num_files
