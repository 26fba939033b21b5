"""One peer of the lab: the real network code without a trainer. It writes its events as JSON lines to stdout.

It announces itself, looks for other peers, and sends each of them a message, with --bulk 64 MiB, which the other echoes. A peer that is
reached through a relay is called again until it is reached directly.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from gossamer.protocol.errors import GossamerError
from gossamer.protocol.identity import Identity, PeerId
from gossamer.protocol.libp2p.node import Libp2pNode
from gossamer.protocol.libp2p.p2pd import DaemonSettings
from gossamer.protocol.libp2p.record_store import RecordStore
from gossamer.protocol.messages.records import MemberRecord, announceable
from gossamer.protocol.streams.transport import Purpose, Stream
from tests.protocol.peers import chunk, echo, number_of
from tests.protocol.samples import RECORD, RUN_ID

LOOK_S = 0.5
CALL_S = 10.0
AGAIN_S = 5.0
CHUNK_BYTES = 256 * 1024
BULK_CHUNKS = 256  # 64 MiB in each direction


def print_line(**what: Any) -> None:
    print(json.dumps({"at": time.time(), **what}), flush=True)


class LabPeer:
    """Finds other peers and opens streams to them."""

    def __init__(self, node: Libp2pNode, identity: Identity, bulk: bool) -> None:
        self._node = node
        self._identity = identity
        self._bulk = bulk
        self._sequence = int(time.time())
        self._printed: object = None
        self._routes: dict[PeerId, str] = {}  # route by called peer
        self._again_s: dict[PeerId, float] = {}

    async def run(self) -> None:
        print_line(up=str(self._identity.peer_id))
        while True:
            if self._printed != (printed := (self._node.addresses, self._node.relays_at)):
                self._printed = printed
                print_line(addresses=self._node.addresses, relays=bool(self._node.relays_at), through=len(self._node.through))
            with suppress(GossamerError, ExceptionGroup):
                await self._node.announce(self._record())
                for record in await self._node.members():
                    if record.peer_id != self._identity.peer_id and self._is_due(record.peer_id):
                        await self._call(record)
            await asyncio.sleep(LOOK_S)

    def _is_due(self, peer: PeerId) -> bool:
        return self._routes.get(peer, "relayed") == "relayed" and time.monotonic() >= self._again_s.get(peer, 0.0)

    def _record(self) -> MemberRecord:
        self._sequence += 1
        me = self._identity.peer_id
        fields = {"peer_id": me, "addresses": announceable(self._node.addresses, me), "sequence": self._sequence}
        expires_s = int(time.time()) + 90
        return replace(RECORD, **fields, credential=None, expires_s=expires_s, signature=b"").signed(self._identity)  # type: ignore[arg-type]

    async def _call(self, record: MemberRecord) -> None:
        try:
            async with asyncio.timeout(CALL_S):
                stream = await self._node.connect(record.peer_id, record.addresses, Purpose.MEET)
                await stream.send(chunk(1))
                assert await number_of(stream) == 1
        except (GossamerError, TimeoutError) as error:
            print_line(failed=str(record.peer_id), why=str(error) or "too slow")
            return
        if self._routes.get(record.peer_id) != stream.route:
            print_line(met=str(record.peer_id), route=stream.route)
        try:
            if self._bulk and record.peer_id not in self._routes:
                await self._measure(stream)
            self._routes[record.peer_id] = stream.route
            self._again_s[record.peer_id] = time.monotonic() + AGAIN_S
        finally:
            stream.close()

    async def _measure(self, stream: Stream) -> None:
        began_s = time.monotonic()

        async def send() -> None:
            for number in range(BULK_CHUNKS):
                await stream.send(chunk(number, CHUNK_BYTES))

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(send())
            for _ in range(BULK_CHUNKS):
                await number_of(stream)
        print_line(bulk=str(stream.partner), megabytes_per_s=BULK_CHUNKS * CHUNK_BYTES / 1e6 / (time.monotonic() - began_s))


async def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("home", type=Path)
    options.add_argument("port", type=int)
    options.add_argument("--relay", action="store_true")
    options.add_argument("--bulk", action="store_true")
    options.add_argument("--bootstrap", action="append", default=[])
    given = options.parse_args()
    logging.basicConfig(filename=given.home / "log", level=logging.DEBUG, format="%(asctime)s %(name)s %(message)s")
    identity = Identity.load_or_create(given.home / "key")
    settings = DaemonSettings(given.home / "key", given.home / "run", port=given.port, relays=given.relay)
    async with Libp2pNode(settings, RecordStore(RUN_ID), echo, lambda: tuple(given.bootstrap)) as node:
        await LabPeer(node, identity, given.bulk).run()


if __name__ == "__main__":
    asyncio.run(main())
