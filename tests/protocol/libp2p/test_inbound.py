"""Inbound lanes against a p2pd that we play ourselves: who is registered, how many, and for how long."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from protocol.identity import PeerId
from protocol.libp2p import inbound as lanes
from protocol.libp2p.hivemind_imports import p2pd_pb2, write_pbmsg
from protocol.libp2p.inbound import InboundLanes
from protocol.libp2p.splice import Pair, Tally, drop
from tests.protocol.peers import seeded

PARTNER, OTHER = seeded(1).peer_id, seeded(2).peer_id


class Silent:
    """A control socket that accepts everything."""

    async def receive_streams(self, protocol: str, listener: Path) -> None:
        assert protocol == lanes.PROTOCOL


class World:
    """Lanes, the server that they end at, and the p2pd that brings them."""

    def __init__(self, stack: AsyncExitStack) -> None:
        self._stack = stack
        self.calls: asyncio.Queue[tuple[str, Pair]] = asyncio.Queue()

    async def open(self) -> None:
        self._path = Path(self._stack.enter_context(tempfile.TemporaryDirectory())) / "in.sock"
        server = await asyncio.start_server(self._on_call, "127.0.0.1", 0)
        self._stack.callback(server.close)
        self.tally = Tally()
        self.lanes = InboundLanes(server.sockets[0].getsockname()[1], self._path, self.tally)
        control: Any = Silent()
        await self.lanes.open(control)
        self._stack.push_async_callback(self.lanes.close)

    def _on_call(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._stack.callback(drop, writer)
        host, port = writer.get_extra_info("peername")
        self.calls.put_nowait((f"ipv4:{host}:{port}", (reader, writer)))

    async def stream_from(self, partner: PeerId) -> Pair:
        reader, writer = await asyncio.open_unix_connection(self._path)
        self._stack.callback(drop, writer)
        await write_pbmsg(writer, p2pd_pb2.StreamInfo(peer=partner.raw, addr=b"\x04\x7f\x00\x00\x01\x06\x00\x01", proto=lanes.PROTOCOL))
        return reader, writer


def play(test: Callable[[World], Coroutine[Any, Any, None]]) -> None:
    async def main() -> None:
        async with AsyncExitStack() as stack:
            world = World(stack)
            await world.open()
            await test(world)
        await asyncio.sleep(0.01)
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(main())


def test_a_lane_carries_bytes_and_names_its_partner_once() -> None:
    async def test(world: World) -> None:
        reader, writer = await world.stream_from(PARTNER)
        caller, server = await world.calls.get()
        assert world.lanes.claim(caller) == PARTNER
        assert world.lanes.claim(caller) is None, "one lane, one call"
        writer.write(b"question")
        assert await server[0].readexactly(8) == b"question"
        server[1].write(b"answer")
        assert await reader.readexactly(6) == b"answer"
        assert (world.tally.sent, world.tally.received) == (6, 8)

    play(test)


@pytest.mark.parametrize("caller", ["ipv4:127.0.0.1:1", "ipv6:[::1]:1", "unix:", "", "ipv4:10.0.0.1:{port}", "ipv4:127.0.0.1:x"])
def test_strangers_are_not_in_the_register(caller: str) -> None:
    async def test(world: World) -> None:
        await world.stream_from(PARTNER)
        known, _ = await world.calls.get()
        assert world.lanes.claim(caller.format(port=known.rpartition(":")[2])) is None
        world.lanes.release(caller)

    play(test)


def test_a_lane_that_has_ended_is_forgotten() -> None:
    async def test(world: World) -> None:
        _, writer = await world.stream_from(PARTNER)
        caller, (reader, _) = await world.calls.get()
        writer.close()
        assert await reader.read() == b""
        await asyncio.sleep(0.05)
        assert world.lanes.claim(caller) is None

    play(test)


def test_one_partner_has_few_lanes_and_takes_none_from_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lanes, "LANES_PER_PARTNER", 2)

    async def test(world: World) -> None:
        for _ in range(2):
            await world.stream_from(PARTNER)
            await world.calls.get()
        reader, _ = await world.stream_from(PARTNER)
        assert await reader.read() == b""
        await world.stream_from(OTHER)
        caller, _ = await world.calls.get()
        assert world.lanes.claim(caller) == OTHER

    play(test)


def test_a_key_that_has_said_nothing_has_fewer_lanes() -> None:
    async def test(world: World) -> None:
        for _ in range(lanes.SILENT_LANES):
            await world.stream_from(PARTNER)
            caller, _ = await world.calls.get()
        reader, _ = await world.stream_from(PARTNER)
        assert await reader.read() == b""
        assert world.lanes.claim(caller) == PARTNER
        world.lanes.heard(caller)
        await world.stream_from(PARTNER)
        assert world.lanes.claim((await world.calls.get())[0]) == PARTNER

    play(test)


def test_where_all_is_full_the_oldest_lane_without_a_conversation_gives_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lanes, "LANES", 3)

    async def test(world: World) -> None:
        readers, callers = [], []
        for number in range(1, 4):
            readers.append((await world.stream_from(seeded(number).peer_id))[0])
            callers.append((await world.calls.get())[0])
            world.lanes.claim(callers[-1])
        for talks in callers[:2]:
            world.lanes.heard(talks)
        await world.stream_from(seeded(4).peer_id)
        assert await readers[2].read() == b"", "it was silent"
        talks, _ = await world.calls.get()
        assert world.lanes.claim(talks) == seeded(4).peer_id
        world.lanes.heard(talks)
        refused, _ = await world.stream_from(seeded(5).peer_id)
        assert await refused.read() == b"", "all are in conversation"
        world.lanes.release(callers[1])
        await world.stream_from(seeded(5).peer_id)
        assert await readers[1].read() == b"", "its conversation is over"
        assert world.lanes.claim((await world.calls.get())[0]) == seeded(5).peer_id

    play(test)


def test_a_lane_without_a_call_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lanes, "SILENCE_S", 0.1)

    async def test(world: World) -> None:
        reader, _ = await world.stream_from(PARTNER)
        assert await reader.read() == b""

    play(test)


def test_a_lane_whose_call_has_ended_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lanes, "LINGER_S", 0.1)

    async def test(world: World) -> None:
        reader, _ = await world.stream_from(PARTNER)
        caller, _ = await world.calls.get()
        assert world.lanes.claim(caller) == PARTNER
        world.lanes.release(caller)
        assert await reader.read() == b""

    play(test)


def test_peers_with_other_kinds_of_key_get_no_lane() -> None:
    async def test(world: World) -> None:
        stranger: Any = type("Stranger", (), {"raw": b"\x12\x20" + bytes(32)})
        reader, _ = await world.stream_from(stranger)
        assert await reader.read() == b""
        assert world.calls.empty()

    play(test)
