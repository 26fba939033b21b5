"""The names of events and fields in the logs of earlier releases: old logs stay readable."""

from __future__ import annotations

from typing import Final

# What 0.1 wrote until 2026-11-24, and the names of today.
_RENAMED: Final = (
    (b'"clock_steps":', b'"global_step":'), (b'"lane":', b'"route":'), (b'"donors":', b'"sources":'), (b'"donor":', b'"source":'),
    (b'"event":"StateCloned"', b'"event":"StateTransferred"'), (b'"event":"FragmentPulled"', b'"event":"FragmentSynced"'),
    (b'"state":"seeding"', b'"state":"serving"'),
)  # fmt: skip


def renamed(line: bytes) -> bytes:
    """Return a line of an event log with the names of today."""
    for before, today in _RENAMED:
        line = line.replace(before, today)
    return line
