"""Members whose meetings take long: by a slow line, or because they let each message take nearly as long as it may."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from gossamer.protocol.identity import PeerId
from gossamer.protocol.messages.messages import Hello, Message, Refusal
from gossamer.protocol.streams.transport import Purpose, Stream, Transport
from tests.swarm.world import Habits, Peer, Swarm

JUST_IN_TIME_S = 3.0  # a partner waits for a third of the tiny run's deadline


class LateStream:
    """A stream of a meeting: each kind of message after the first one leaves this side `late_s` later."""

    def __init__(self, inner: Stream, late_s: float) -> None:
        self._inner, self._late_s = inner, late_s
        self._sent: set[type[Message]] = set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    async def send(self, message: Message) -> None:
        if not isinstance(message, Hello | Refusal) and type(message) not in self._sent:
            self._sent.add(type(message))
            await asyncio.sleep(self._late_s)
        await self._inner.send(message)


class SlowPeer(Peer):
    """An honest peer but for its line: the messages of its meetings come late."""

    late_s = JUST_IN_TIME_S

    async def connect(self, partner: PeerId, addresses: Sequence[str], purpose: Purpose) -> Any:
        return self._late(purpose, await self.transport.connect(partner, addresses, purpose))

    async def _answer(self, purpose: Purpose, stream: Stream) -> None:
        await super()._answer(purpose, self._late(purpose, stream))

    def _late(self, purpose: Purpose, stream: Stream) -> Any:
        return LateStream(stream, self.late_s) if purpose is Purpose.MEET else stream


def with_slow_lines(peer: Peer, transport: Transport) -> Transport:
    """Wrap the transports of a swarm's slow peers."""
    return peer if isinstance(peer, SlowPeer) else transport


def add_slow(swarm: Swarm, **habits: Any) -> SlowPeer:
    """Make a slow peer that is not started yet, in a swarm that wraps `with_slow_lines`."""
    peer = SlowPeer(swarm, len(swarm.peers) + 1, Habits(**habits))
    swarm.peers.append(peer)
    return peer


async def pester(caller: Peer, victim: Peer) -> None:
    """Call a victim about all fragments at once, as often as it answers."""

    async def call(fragment: int) -> None:
        while True:
            others = {peer.peer_id for peer in caller.swarm.peers} - {victim.peer_id}
            caller.book.get(victim.peer_id).backs_off_until_s = 0.0
            await caller.node.meetings.try_next(fragment, others)
            await asyncio.sleep(0.2)

    async with asyncio.TaskGroup() as tasks:
        for fragment in range(len(caller.swarm.terms.fragments)):
            tasks.create_task(call(fragment))
