"""Global fixtures: one torch thread, a busy port, and a check that each test leaves no thread, child process or socket behind.

It also runs tests that are coroutines and, with several workers (`make test`), defines which tests run one after the other, and which
start first.
"""

from __future__ import annotations

import asyncio
import gc
import inspect
import os
import signal
import socket
import tempfile
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import settings

from gossamer.protocol.memory import virtual_time

settings.register_profile("same each time, on any machine", deadline=None, derandomize=True)
settings.load_profile("same each time, on any machine")

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

if os.environ.get("GOSSAMER_TEST_DEVICE") == "pygpu":
    from tests.device import python_device

    python_device.install()

gc.disable()  # until all tests are collected, because imports create no garbage

GRACE_S = 5.0
TASKS, DESCRIPTORS = "/proc/self/task", "/proc/self/fd"  # read as strings: paths would take half of a short test

# Threads that libraries start once per process and never end.
KEPT_THREADS = ("tqdm_monitor", "ThreadPoolExecutor-hf", "pydantic")

# Tests with real peers or daemons. Tests of one group never run at the same time, so that their processes do not compete for the CPU.
PEERS, DAEMONS = "peers", "daemons"
GROUPS = {"e2e": PEERS, "peer/supervisor/test_supervisor_real.py": PEERS, "peer/supervisor": DAEMONS, "protocol/libp2p": DAEMONS}
GROUPS |= {"peer/doctor/test_visit.py": DAEMONS, "cli/test_extras.py": DAEMONS}
# The longest tests must not start last.
FIRST = (
    PEERS,
    DAEMONS,
    "swarm",
    "device",
    "benchmarks",
    "peer/trainer",
    "peer/simulator",
    "api",
    "cli",
    "test_imports",
    "peer/model",
    "peer/doctor",
    "protocol",
)


def group_of(test: str) -> str:
    """Runs the tests of a group in one worker, one after the other. A file in no group is a group of its own."""
    file = test.partition("::")[0].removeprefix("tests/")
    return next((group for path, group in GROUPS.items() if file.startswith(path)), file)


def turn_of(test: str) -> int:
    return next((turn for turn, group in enumerate(FIRST) if group_of(test).startswith(group)), len(FIRST))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: turn_of(item.nodeid))


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Distribute tests by group. pytest 9.2 silently ignores xdist's own group marks (pytest-xdist issue 1386)."""
    from xdist.scheduler import LoadScopeScheduling

    class ByGroup(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return group_of(nodeid)

    return ByGroup(config, log)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a coroutine in virtual time, or in real time if it is marked so. A fixture that is an async context manager is entered."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    test = _with_entered(pyfuncitem.obj, {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames})
    if (real_time := pyfuncitem.get_closest_marker("real_time")) is None:
        virtual_time.run(test)
        return True
    with asyncio.Runner(**real_time.kwargs) as runner:
        runner.run(test)
    gc.collect()  # gRPC's thread ends with its last object, and asyncio keeps some in cycles
    return True


async def _with_entered(test: Callable[..., Coroutine[Any, Any, None]], given: dict[str, Any]) -> None:
    async with AsyncExitStack() as stack:
        for name, value in given.items():
            if isinstance(value, AbstractAsyncContextManager):
                given[name] = await stack.enter_async_context(value)
        await test(**given)
    if left := asyncio.all_tasks() - {asyncio.current_task()}:
        _, left = await asyncio.wait(left, timeout=GRACE_S)
    assert not left, f"tasks left behind: {[task.get_name() for task in left]}"


@pytest.fixture
def folder() -> Iterator[Path]:
    """Yield an empty folder for Unix sockets: the paths of `tmp_path` are too long for them."""
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


@pytest.fixture
def busy_port() -> Iterator[int]:
    """Yield a port of 127.0.0.1 on which another program listens."""
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        yield other.getsockname()[1]


@pytest.fixture
def no_umask() -> Iterator[None]:
    """Files are created with the mode that the program asks for: the umask hides nothing."""
    old = os.umask(0)
    yield
    os.umask(old)


@pytest.fixture
def signals_of_a_terminal() -> Iterator[None]:
    """Restore the default handlers of SIGHUP and SIGINT, which are ignored under `nohup` or in the background.

    Child processes inherit ignored signals, so a test whose child must receive such a signal uses this fixture too.
    """
    before = {number: signal.getsignal(number) for number in (signal.SIGHUP, signal.SIGINT)}
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    for number, disposition in before.items():
        signal.signal(number, disposition)


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
    ours = (thread for thread in threading.enumerate() if not isinstance(thread, threading._DummyThread))  # not what torch started
    new = [thread for thread in ours if thread not in before and not thread.name.startswith(KEPT_THREADS)]
    for thread in new:
        thread.join(GRACE_S)
    return [thread for thread in new if thread.is_alive()]


def _children() -> set[int]:
    """Return the pids of this process's children. psutil would read every process of the machine, twice per test."""
    if not os.path.isdir(TASKS):
        return {child.pid for child in psutil.Process().children()}
    children = set()
    for task in os.listdir(TASKS):
        with suppress(FileNotFoundError, ProcessLookupError), open(f"{TASKS}/{task}/children") as pids:  # the thread has just ended
            children |= set(map(int, pids.read().split()))
    return children


def _new_children(before: set[int]) -> list[psutil.Process]:
    new = []
    for pid in _children() - before:
        with suppress(psutil.NoSuchProcess):
            new.append(psutil.Process(pid))
    return psutil.wait_procs(new, timeout=GRACE_S)[1]


def _sockets() -> set[str]:
    """Return the open sockets of this process, by inode; none if the system has no /proc."""
    names = set()
    for descriptor in os.listdir(DESCRIPTORS) if os.path.isdir(DESCRIPTORS) else ():
        with suppress(OSError):  # the descriptor of this listing itself
            if (name := os.readlink(f"{DESCRIPTORS}/{descriptor}")).startswith("socket:"):
                names.add(name)
    return names
