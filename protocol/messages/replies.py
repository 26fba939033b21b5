"""The replies about addresses, members and the run's curve; the signature of the reply's header covers them."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import ClassVar, Self

from gossamer.protocol import limits
from gossamer.protocol.errors import BadMessage
from gossamer.protocol.messages.frames import read_unframed, write_unframed

SEEN_BYTES = 256  # upper bound of a PeerList without members
LISTED_BYTES = limits.RECORD_BYTES + 3  # of each member in it: the largest record with its tag and length
PEER_LIST_BYTES = limits.MAX_LISTED * LISTED_BYTES + SEEN_BYTES  # upper bound
CURVE_BYTES = 8 * limits.KIB  # upper bound: seven numbers a point, of nine bytes at most, and the tags


class _Reply(limits.Bounded):
    __slots__ = ()
    MOST_BYTES: ClassVar[int]

    def to_bytes(self) -> bytes:
        """Return the encoded reply."""
        return write_unframed(self)

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """Parse a reply. Raises BadMessage. Member records in it are not parsed."""
        return read_unframed(cls, data, "a reply", cls.MOST_BYTES)


@dataclass(frozen=True, slots=True)
class PeerList(_Reply):
    """Members that the sender knows, so that the requester no longer depends on one bootstrap node; and what it sees of the requester.

    A request for SEEN_BYTES gets no members: it costs its sender less than the requester.
    """

    MOST_BYTES = PEER_LIST_BYTES

    members: tuple[bytes, ...]  # at most 16 member records as their peers signed them, including the sender's own
    unix_ms: int  # the sender's clock: Unix milliseconds
    observed: str = ""  # multiaddr of the requester's end of the connection, including its port; empty if unknown


@dataclass(frozen=True, slots=True)
class RunCurve(_Reply):
    """What the sender itself has seen of the run, the oldest point first, in lists of one length. It is shown, and no peer acts on it."""

    MOST_BYTES = CURVE_BYTES

    times_s: tuple[int, ...] = ()  # Unix seconds, increasing
    steps: tuple[int, ...] = ()  # the global step of the run
    losses_milli: tuple[int, ...] = ()  # median loss in thousandths, plus one; 0: none
    lows_milli: tuple[int, ...] = ()  # and its range
    highs_milli: tuple[int, ...] = ()
    lives: tuple[int, ...] = ()  # live members
    trained: tuple[int, ...] = ()  # tokens that all members have trained

    def __post_init__(self) -> None:
        limits.Bounded.__post_init__(self)
        for name, most in limits.CURVE_FIELDS.items():
            values = getattr(self, name)
            if len(values) != len(self.times_s):
                raise BadMessage(f"{len(values)} {name} at {len(self.times_s)} times")
            for value in values:
                limits.need_count(name, value, most)
        if any(later <= sooner for sooner, later in itertools.pairwise(self.times_s)):
            raise BadMessage("the times of a curve do not increase")
        if any(not low <= loss <= high for low, loss, high in zip(self.lows_milli, self.losses_milli, self.highs_milli, strict=True)):
            raise BadMessage("a loss outside its range")
