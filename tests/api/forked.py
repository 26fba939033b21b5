"""Programs as forks of one process that has imported torch: to start Python and import it takes longer than most programs of the tests run.

`python -P forked.py` is that process. It has one thread, forks a program for each request on its stdin, and ends with its stdin.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.peer.waiting import wait_until

ROOT = Path(__file__).parents[2]


def environment() -> dict[str, str]:
    """Return the variables of a program that imports this tree and computes on one thread."""
    return os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


class ForkedProgram:
    """A running program, as a subprocess.Popen."""

    def __init__(self, forks: Forks, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._forks = forks

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = self._forks.ask(wait=self.pid)
        return self.returncode

    def wait(self, timeout: float = 60.0) -> int:
        wait_until(lambda: self.poll() is not None, f"end of program {self.pid}", timeout)
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Forks:
    """The process that forks."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def start(self, command: Sequence[str], environment: Mapping[str, str], printed: Path, typed: Path) -> ForkedProgram:
        """Run a script with its arguments and a file as stdin; what it prints goes to a file, which is there at once."""
        printed.touch()
        asked = {"command": list(command), "environment": dict(environment), "printed": str(printed), "typed": str(typed)}
        return ForkedProgram(self, self.ask(**asked))

    def load(self, *modules: str) -> None:
        """Import more modules than every program does."""
        assert self.ask(load=modules) == 1, "a fork would lack the other threads"

    def ask(self, **request: Any) -> Any:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())


@contextmanager
def forking() -> Iterator[Forks]:
    command = [sys.executable, "-P", __file__]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment(), text=True) as process:
        yield Forks(process)


def serve() -> None:
    """Answer requests until stdin ends. A forked program returns from here, or raises, when it has run."""
    while line := sys.stdin.readline():
        request = json.loads(line)
        if "wait" in request:
            reply = exit_code(request["wait"])
        elif "load" in request:
            reply = load(*request["load"])
        elif not (reply := os.fork()):
            become(**request)
            return
        sys.stdout.write(json.dumps(reply) + "\n")
        sys.stdout.flush()


def exit_code(pid: int) -> int | None:
    ended, status = os.waitpid(pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if ended else None


def become(command: list[str], environment: dict[str, str], printed: str, typed: str) -> None:
    """Run a script in this process as Python would run it."""
    out, given = os.open(printed, os.O_WRONLY), os.open(typed, os.O_RDONLY)
    for source, descriptor in ((given, 0), (out, 1), (out, 2)):
        os.dup2(source, descriptor)
    os.close(given)
    os.close(out)
    os.environ.update(environment)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.argv = command
    runpy.run_path(command[0], run_name="__main__")


def load(*modules: str) -> int:
    """Import modules; return the number of this process's threads."""
    gc.disable()
    for module in modules:
        importlib.import_module(module)
    gc.freeze()
    gc.enable()
    return len(os.listdir("/proc/self/task"))


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # torch imports torch._dynamo with the first optimizer
    assert load("torch._dynamo", "torch.distributed.fsdp", "torch.nn.parallel", "gossamer.swarm") == 1, "a fork would lack other threads"
    serve()
