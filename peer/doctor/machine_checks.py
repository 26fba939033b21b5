"""Checks of this machine: installed versions, devices, limit of open files."""

from __future__ import annotations

import importlib.metadata
import platform
import resource
import subprocess
import sys
from collections.abc import Callable, Sequence

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from gossamer.peer.doctor.finding import Finding, fail, ok, warn

PACKAGE = "gossamer-peer"
DEVICE_S = 17.0  # for torch to come up and to compute
UP = "torch is loaded"  # as peer/doctor/matmul.py says
OPEN_FILES = 1024  # 64 streams, their sockets on both sides, model files, and room


def requirements() -> tuple[str, Sequence[str]]:
    """Return the Python and the packages that this package requires; nothing if it is not installed."""
    try:
        ours = importlib.metadata.distribution(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        return "", ()
    return ours.metadata["Requires-Python"] or "", ours.requires or ()


def installed(name: str) -> str | None:
    """Return the version of an installed package, None if it is missing."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def versions(python: str, requirements: Sequence[str], installed: Callable[[str], str | None]) -> Finding:
    """Check this interpreter and the `installed` packages against the requirements."""
    if not python:
        return warn(f"{PACKAGE} is not installed, so its requirements are not known", "`pip install .` in its folder")
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


def computed(devices: str) -> tuple[int | None, str]:
    """Have torch compute a known product in a process of its own, as a driver may hang or crash.

    Returns the exit code, None if the process does not end in time, and the output.
    """
    command = [sys.executable, "-m", "gossamer.peer.doctor.matmul", devices]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=DEVICE_S, check=False)
    except subprocess.TimeoutExpired as late:
        return None, str(late.stdout or b"", errors="replace")
    return done.returncode, done.stdout + done.stderr


def device(name: str, code: int | None, said: str) -> Finding:
    """Check how the process that computes on the device ended, and what it printed."""
    lines = said.strip().splitlines() or ["nothing"]
    if code is None and lines[-1] != UP:
        return warn(f"not known: torch did not even load within {DEVICE_S:.0f} s", "try again when the machine is less busy")
    if code is None:
        return fail(f"torch did not compute anything on {name} within {DEVICE_S:.0f} s", "check the driver, or use --devices cpu")
    if code:
        lines = [f"torch died on {name} by signal {-code}"] if code < 0 else lines
        return fail(lines[-1], "use --devices auto or --devices cpu; `nvidia-smi` tells whether the driver sees a GPU")
    return ok(lines[-1])


def open_files(most: int) -> Finding:
    """Check how many files and connections one process may have open."""
    if most == resource.RLIM_INFINITY or most >= OPEN_FILES:
        return ok("no limit" if most == resource.RLIM_INFINITY else f"{most} at once")
    way_out = f"`ulimit -n {OPEN_FILES}` before the peer starts"
    if most < OPEN_FILES // 4:
        return fail(f"only {most} at once: connections would break", way_out)
    return warn(f"only {most} at once; a peer with many partners may need {OPEN_FILES}", way_out)
