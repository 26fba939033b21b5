"""What a check says: how bad, what it found, and the way out."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from gossamer.protocol.errors import ExitCode, GossamerError


class Level(Enum):
    """How bad it is: a peer runs well, runs with less than it could have, or cannot take part."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class Finding:
    """What a check found, in one sentence; the way out in another, unless all is well."""

    level: Level
    found: str
    way_out: str = ""
    exit_code: ExitCode = ExitCode.DONE  # of the command, when this is the first that failed


def ok(found: str) -> Finding:
    """Say that all is well."""
    return Finding(Level.OK, found)


def warn(found: str, way_out: str) -> Finding:
    """Say that a peer runs, with less than it could have."""
    return Finding(Level.WARN, found, way_out)


def fail(found: str, way_out: str, exit_code: ExitCode = ExitCode.BAD_INPUT) -> Finding:
    """Say that a peer cannot take part like this."""
    return Finding(Level.FAIL, found, way_out, exit_code)


def failed_by(error: GossamerError) -> Finding:
    """Say what an error says."""
    return fail(str(error), error.hint, error.exit_code)
