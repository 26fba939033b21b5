"""The two seams between a peer and the world: `Transport` (streams to partners) and `Directory` (who is there).

Each has exactly two implementations: over libp2p (`tunnel.py`, `directory.py`) and in memory (`memory.py`), where the tests
script delay, loss and death under a virtual clock. Nothing above these interfaces knows which one it drives.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from enum import Enum
from typing import Protocol

from protocol.identity import PeerId
from protocol.messages.messages import Message
from protocol.messages.records import MemberRecord


class Purpose(Enum):
    """What a stream is for; the value is the gRPC method."""

    MEET = "Meet"
    FETCH = "Fetch"


class Stream(Protocol):
    """One conversation with one partner: ordered, reliable, both ways until it breaks.

    `send` and `receive` may run at the same time in two tasks; both are cancel-safe in that a cancelled stream can only be closed.
    """

    @property
    def partner(self) -> PeerId:
        """The other end, as the lane proved it (not as it claims)."""
        ...

    @property
    def lane(self) -> str:
        """How the partner is reached, for the status page: "libp2p", "memory", ..."""
        ...

    async def send(self, message: Message) -> None:
        """Send one message; wait while the partner is slow to read.

        Raises PeerGone when the stream has ended.
        """
        ...

    async def receive(self) -> Message:
        """Return the partner's next message.

        Raises PeerGone when the stream has ended, BadMessage when what came is not a message.
        """
        ...

    async def close(self) -> None:
        """End the stream in both directions; what was sent before is still delivered if the network allows. Idempotent."""
        ...

    @property
    def bytes_sent(self) -> int:
        """Serialized bytes handed to the lane so far."""
        ...

    @property
    def bytes_received(self) -> int:
        """Serialized bytes taken from the lane so far."""
        ...


StreamHandler = Callable[[Purpose, Stream], Awaitable[None]]


class Transport(Protocol):
    """Open streams to partners, and hand inbound ones to the handler given at construction."""

    async def connect(self, partner: PeerId, addresses: Sequence[str], purpose: Purpose) -> Stream:
        """Open a stream to `partner`; `addresses` are hints (multiaddrs) and may be empty.

        Bounded by the caller's `asyncio.timeout`. Raises Unreachable.
        """
        ...


class Directory(Protocol):
    """Who may be there. A hint, never truth: every record is signed, and identity is proven on connect."""

    async def announce(self, record: MemberRecord) -> None:
        """Publish this peer's own record; a later call replaces it. Raises TransportError when nobody took it."""
        ...

    async def members(self) -> list[MemberRecord]:
        """Return the verified, unexpired records that can be found now, own record included or not."""
        ...
