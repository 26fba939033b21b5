"""How many streams a partner may have open to us at once: a few per purpose, and so many in all.

Counts only; the transports ask before they accept a stream, whoever is behind it.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from protocol.identity import PeerId
from protocol.transport import Purpose


@dataclass(frozen=True, slots=True)
class StreamCaps:
    """Inbound streams at once; a retry may overlap the stream that it replaces, hence two."""

    per_purpose: int = 2  # from one partner
    total: int = 32


class Admission:
    """The inbound streams of one transport."""

    def __init__(self, caps: StreamCaps) -> None:
        self._caps = caps
        self._open: Counter[tuple[PeerId, Purpose]] = Counter()

    def enter(self, partner: PeerId, purpose: Purpose) -> bool:
        """Count one more stream, or return False when that would be too many."""
        if self._open[partner, purpose] >= self._caps.per_purpose or self._open.total() >= self._caps.total:
            return False
        self._open[partner, purpose] += 1
        return True

    def leave(self, partner: PeerId, purpose: Purpose) -> None:
        """Count one stream less."""
        self._open[partner, purpose] -= 1
        self._open += Counter()  # drop what stands at zero
