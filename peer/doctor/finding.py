"""The finding of a check: level, text, and what to do."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from gossamer.protocol.errors import ExitCode, GossamerError


class Level(Enum):
    """OK: a peer runs well. SKIP: not checked. WARN: it runs with a restriction. FAIL: it cannot take part."""

    OK = "ok"
    SKIP = "skip"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class Finding:
    """What a check found, in one sentence, and what to do about it in another; empty for OK and SKIP."""

    level: Level
    found: str
    way_out: str = ""
    exit_code: ExitCode = ExitCode.DONE  # of the command, when this is the first that failed


def ok(found: str) -> Finding:
    """Return a finding of level OK."""
    return Finding(Level.OK, found)


def skipped(found: str) -> Finding:
    """Return a finding of level SKIP, with why nothing was checked."""
    return Finding(Level.SKIP, found)


def warn(found: str, way_out: str) -> Finding:
    """Return a finding of level WARN: a peer runs with a restriction."""
    return Finding(Level.WARN, found, way_out)


def fail(found: str, way_out: str, exit_code: ExitCode = ExitCode.BAD_INPUT) -> Finding:
    """Return a finding of level FAIL: a peer cannot take part."""
    return Finding(Level.FAIL, found, way_out, exit_code)


def failed_by(error: GossamerError) -> Finding:
    """Return an error as a finding, with its hint and exit code."""
    return fail(str(error), error.hint, error.exit_code)
