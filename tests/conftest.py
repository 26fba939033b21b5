"""What every test runs under: one torch thread, and nothing left behind: no thread, no child process, no socket."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

GRACE_S = 5.0

# Threads that libraries start once per process and keep on purpose.
KEPT_THREADS = ("tqdm_monitor", "ThreadPoolExecutor-hf", "pydantic")


@pytest.fixture(scope="session", autouse=True)
def one_torch_thread() -> None:
    import torch

    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    threads, children, sockets = set(threading.enumerate()), _children(), _sockets()
    yield
    left = [f"thread {thread.name}" for thread in _new_threads(threads)]
    left += [f"process {child.pid} ({child.name()})" for child in _new_children(children)]
    if _sockets() - sockets:
        gc.collect()
        left += [f"socket {name}" for name in _sockets() - sockets]
    assert not left, f"the test left behind: {', '.join(left)}"


def _new_threads(before: set[threading.Thread]) -> list[threading.Thread]:
    new = [thread for thread in threading.enumerate() if thread not in before and not thread.name.startswith(KEPT_THREADS)]
    for thread in new:
        thread.join(GRACE_S)
    return [thread for thread in new if thread.is_alive()]


def _children() -> set[psutil.Process]:
    return set(psutil.Process().children())


def _new_children(before: set[psutil.Process]) -> list[psutil.Process]:
    new = _children() - before
    return psutil.wait_procs(new, timeout=GRACE_S)[1] if new else []


def _sockets() -> set[str]:
    """Open sockets of this process, by inode; none where the system has no /proc."""
    names = set()
    for entry in Path("/proc/self/fd").glob("*"):
        try:
            target = entry.readlink()
        except OSError:  # the descriptor of this very listing
            continue
        if target.name.startswith("socket:"):
            names.add(target.name)
    return names
