"""The door: the one handler of inbound streams, from the first moment of the process to its last.

It opens in steps. At first it tells everybody to come back later. Once the run is known it gives the manifest, and the directory holds the
records of members alone; a peer without a trainer stays so. With the node it answers meetings and gives weights too. Whoever breaks the
rules of whatever it asks for is banned here, and not let in again (`is_banned` is asked by the transport before it hands us a stream).
"""

from __future__ import annotations

from contextlib import suppress

from gossamer.peer.node.meetings import Meetings, say
from gossamer.peer.swarm.address_book import AddressBook, loop_s
from gossamer.peer.sync.server import FetchServer
from gossamer.protocol.errors import PeerMisbehaved, RefusalCode, Refused, TransportError
from gossamer.protocol.identity import PeerId
from gossamer.protocol.messages.messages import refusal_of
from gossamer.protocol.messages.records import MemberRecord
from gossamer.protocol.messages.terms import check_member
from gossamer.protocol.streams.transport import Purpose, Stream


class Door:
    """Who may come in, and who answers. `not_yet` is said to those for whom it is not open."""

    def __init__(self, book: AddressBook, not_yet: str) -> None:
        self._book = book
        self._not_yet = not_yet
        self._server: FetchServer | None = None
        self._meetings: Meetings | None = None

    def open(self, server: FetchServer, meetings: Meetings | None = None) -> None:
        """Serve fetches with this server from now on, and meetings where there are any."""
        self._server, self._meetings = server, meetings

    def is_member(self, record: MemberRecord) -> bool:
        """Say whether a record is a member's; nobody is known to be one before we have the run's manifest."""
        if self._server is None:
            return False
        with suppress(Refused):
            check_member(record.peer_id, record.credential, self._server.terms, self._server.now_s())
            return True
        return False

    def is_banned(self, partner: PeerId) -> bool:
        """Say whether a peer is to be turned away."""
        return self._book.is_banned(partner, loop_s())

    async def answer(self, purpose: Purpose, stream: Stream) -> None:
        """Serve an inbound stream, which its transport closes. Raises PeerMisbehaved, for the log, when the partner broke the rules."""
        try:
            answering = self._meetings if purpose is Purpose.MEET else self._server
            if answering is None:
                raise Refused(RefusalCode.NOT_READY, self._not_yet)
            await answering.answer(stream)
        except Refused as refusal:
            await say(stream, refusal_of(refusal))
        except PeerMisbehaved as error:
            self._book.ban(stream.partner, loop_s())
            await say(stream, refusal_of(error))
            raise
        except (TransportError, TimeoutError):
            return
