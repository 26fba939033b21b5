"""This machine: what is installed, whether torch computes on it, what its limits are."""

from __future__ import annotations

import importlib.metadata
import platform
import resource
import subprocess
import sys
from collections.abc import Callable, Sequence

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from gossamer.peer.doctor.case import Case
from gossamer.peer.doctor.finding import Finding, fail, ok, warn

PACKAGE = "gossamer-peer"
DEVICE_S = 17.0  # for torch to come up and to compute
UP = "torch is loaded"  # as peer/doctor/matmul.py says
OPEN_FILES = 1024  # 64 streams, their sockets on both sides, model files, and room


def versions(case: Case) -> Finding:
    """Check interpreter and packages against what this package asks for."""
    try:
        ours = importlib.metadata.distribution(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        return warn(f"{PACKAGE} is not installed, so nobody knows which versions it wants", "`pip install .` in its folder")
    return version_facts(ours.metadata["Requires-Python"] or "", ours.requires or (), _installed)


def version_facts(python: str, requirements: Sequence[str], installed: Callable[[str], str | None]) -> Finding:
    """Judge this interpreter, and the packages whose versions `installed` tells (None: it is not there)."""
    if not SpecifierSet(python).contains(platform.python_version(), prereleases=True):
        return fail(f"this is Python {platform.python_version()}; wanted is {python}", "install Gossamer with such a Python")
    wanted = [one for one in map(Requirement, requirements) if one.marker is None or one.marker.evaluate({"extra": ""})]
    wrong = []
    for one in wanted:
        there = installed(one.name)
        if there is None or not one.specifier.contains(there, prereleases=True):
            wrong.append(f"{one.name} is {there or 'missing'}, wanted is {one.specifier}")
    if wrong:
        return fail("; ".join(wrong), "install Gossamer again, into a virtual environment of its own")
    return ok(f"Python {platform.python_version()}, and {len(wanted)} packages as wanted")


def _installed(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def device(case: Case) -> Finding:
    """Have torch compute something whose result is known, in a process of its own: a driver may hang or crash."""
    command = [sys.executable, "-m", "gossamer.peer.doctor.matmul", case.devices]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=DEVICE_S, check=False)
    except subprocess.TimeoutExpired as late:
        return device_facts(case.devices, None, str(late.stdout or b"", errors="replace"))
    return device_facts(case.devices, done.returncode, done.stdout + done.stderr)


def device_facts(name: str, code: int | None, said: str) -> Finding:
    """Judge what the process that computes said, and how it ended; None: it had not ended in time."""
    lines = said.strip().splitlines() or ["nothing"]
    if code is None and lines[-1] != UP:
        return warn(f"not known: torch did not even load within {DEVICE_S:.0f} s", "try again when the machine is less busy")
    if code is None:
        return fail(f"torch did not compute anything on {name} within {DEVICE_S:.0f} s", "check the driver, or use --devices cpu")
    if code:
        lines = [f"torch died on {name} by signal {-code}"] if code < 0 else lines
        return fail(lines[-1], "use --devices auto or --devices cpu; `nvidia-smi` tells whether the driver sees a GPU")
    return ok(lines[-1])


def open_files(case: Case) -> Finding:
    """Check how many files and connections one process may have open."""
    return open_files_facts(resource.getrlimit(resource.RLIMIT_NOFILE)[0])


def open_files_facts(most: int) -> Finding:
    """Judge the limit of open files."""
    if most == resource.RLIM_INFINITY or most >= OPEN_FILES:
        return ok("no limit" if most == resource.RLIM_INFINITY else f"{most} at once")
    way_out = f"`ulimit -n {OPEN_FILES}` before the peer starts"
    if most < OPEN_FILES // 4:
        return fail(f"only {most} at once: connections would break", way_out)
    return warn(f"only {most} at once; a peer with many partners may need {OPEN_FILES}", way_out)
