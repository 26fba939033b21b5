"""Ask a peer for a header alone."""

from __future__ import annotations

from gossamer.peer.sync.client import FetchClient
from gossamer.protocol.identity import PeerId
from gossamer.protocol.messages.messages import Contents, ContentsKind


async def header_of(client: FetchClient, peer: PeerId, kind: ContentsKind) -> Contents:
    """Open a stream, and request the header of a content on it."""
    async with client.source(peer, ()) as source:
        return await source.header(kind)
