"""Dial-back tests of reachability: which addresses a partner dials, which it does not, and what it replies."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from gossamer.protocol.errors import BadMessage, Unreachable
from gossamer.protocol.identity import PeerId
from gossamer.protocol.libp2p import dial_back
from gossamer.protocol.libp2p.dial_back import GREETING, TRIES, TRIES_AT_ONCE, Answer, DialBack, Reached, ask
from gossamer.protocol.libp2p.hivemind_imports import p2pd_pb2
from gossamer.protocol.libp2p.p2pd import Control
from gossamer.protocol.libp2p.splice import Pair
from tests.protocol.peers import seeded

pytestmark = pytest.mark.real_time

HELPER, ASKER, OTHER = (seeded(number).peer_id for number in (1, 2, 3))
RELAY = f"/ip4/127.0.0.1/tcp/4001/p2p/{HELPER}"
BEHIND = f"/ip4/127.0.0.1/tcp/4001/p2p/{OTHER}/p2p-circuit/p2p/{HELPER}"
LOOPBACK = b"\x04\x7f\x00\x00\x01\x06\x12\x34"
IN_A_RELAY = LOOPBACK + b"\xa5\x03\x26" + HELPER.raw + b"\xa2\x02"


class P2pd(Control):
    """A p2pd that passes streams from the requester to the helper; `seen_at` is the requester's observed address."""

    def __init__(self, asker: PeerId = ASKER, seen_at: bytes = LOOPBACK) -> None:
        super().__init__(Path("nowhere"))
        self.asker, self.seen_at = asker, seen_at

    async def receive_streams(self, protocol: str, listener: Path) -> None:
        self.listener = listener

    async def open_stream(self, partner: PeerId, protocol: str) -> tuple[Pair, str]:
        reader, writer = await asyncio.open_unix_connection(self.listener)
        info = p2pd_pb2.StreamInfo(peer=self.asker.raw, addr=self.seen_at, proto=protocol).SerializeToString()
        writer.write(bytes([len(info)]) + info)
        return (reader, writer), RELAY


@contextlib.asynccontextmanager
async def helped(folder: Path, relay: str = "") -> AsyncIterator[P2pd]:
    """Serve dial-backs; yield the requester's p2pd."""
    p2pd = P2pd()
    async with DialBack(folder / "reach.sock", lambda: relay).serving(p2pd):
        yield p2pd


@pytest.fixture
def p2pd(folder: Path) -> contextlib.AbstractAsyncContextManager[P2pd]:
    return helped(folder)


@pytest.fixture(autouse=True)
def loopback_is_the_internet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dial_back, "route", lambda address: "relayed" if "p2p-circuit" in address else "direct")


@contextlib.asynccontextmanager
async def listening(greeting: bytes = GREETING) -> AsyncIterator[int]:
    """Run a TCP server that sends this greeting; yield its port."""

    async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(greeting)
        with contextlib.suppress(OSError):
            await reader.read()
        writer.close()

    async with await asyncio.start_server(greet, "127.0.0.1", 0) as server:
        yield server.sockets[0].getsockname()[1]


async def test_a_listening_peer_is_reached(folder: Path) -> None:
    async with helped(folder, RELAY) as p2pd, listening() as port:
        assert await ask(p2pd, HELPER, port) == Answer(Reached.YES, f"/ip4/127.0.0.1/tcp/{port}", RELAY)


async def test_a_server_that_is_no_libp2p_peer_is_not_reached(p2pd: P2pd) -> None:
    async with listening(b"220 mail.example.org ready\r\n") as port:
        assert (await ask(p2pd, HELPER, port)).reached is Reached.NO


async def test_a_closed_port_is_not_reached(p2pd: P2pd) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        assert (await ask(p2pd, HELPER, free.getsockname()[1])).reached is Reached.NO


async def test_one_network_gets_one_test_every_few_seconds(p2pd: P2pd) -> None:
    async with listening() as port:
        assert (await ask(p2pd, HELPER, port)).reached is Reached.YES
        p2pd.asker = OTHER
        assert (await ask(p2pd, HELPER, port)).reached is Reached.NOT_TRIED


async def test_the_total_number_of_tests_is_limited(monkeypatch: pytest.MonkeyPatch, p2pd: P2pd) -> None:
    monkeypatch.setattr(dial_back, "AGAIN_S", 0.0)
    async with listening() as port:
        answers = [(await ask(p2pd, HELPER, port)).reached for _ in range(TRIES + 1)]
        assert answers == [*([Reached.YES] * TRIES), Reached.NOT_TRIED]


async def test_requests_without_a_port_keep_no_other_network_out(p2pd: P2pd) -> None:
    silent = [(await p2pd.open_stream(HELPER, ""))[0] for _ in range(2 * TRIES_AT_ONCE)]
    with contextlib.suppress(ConnectionError):
        await silent[-1][0].read()  # until it is refused: those before it have been taken in by then
    p2pd.seen_at = b"\x04\x7f\x00\x07\x01\x06\x12\x34"
    async with listening() as port:
        assert (await ask(p2pd, HELPER, port)).seen_at == f"/ip4/127.0.7.1/tcp/{port}"
    for _, writer in silent:
        writer.transport.abort()


async def test_relayed_and_unknown_addresses_and_privileged_ports_are_not_dialled(p2pd: P2pd) -> None:
    assert (await ask(p2pd, HELPER, 22)).reached is Reached.NOT_TRIED
    assert (await ask(p2pd, HELPER, 0)).reached is Reached.NOT_TRIED
    for p2pd.seen_at in (IN_A_RELAY, b"", b"unreadable"):
        assert await ask(p2pd, HELPER, 4001) == Answer(Reached.NOT_TRIED, "", "")


async def test_local_network_addresses_are_not_dialled(monkeypatch: pytest.MonkeyPatch, p2pd: P2pd) -> None:
    monkeypatch.undo()

    assert (await ask(p2pd, HELPER, 4001)).reached is Reached.NOT_TRIED


def _reply(seen_at: str) -> bytes:
    return b"\x01" + bytes([len(seen_at)]) + seen_at.encode() + b"\x00"


@pytest.mark.parametrize(
    "data",
    [
        b"\x07\x00\x00",
        b"\x01\x04/ip4\x00",
        b"\x01\x00" + bytes([len(RELAY)]) + RELAY.replace(str(HELPER), str(OTHER)).encode(),
        b"\x01\x00" + bytes([len(BEHIND)]) + BEHIND.encode(),
        b"\x01\x01\xff\x00",
        _reply(f"/ip4/8.8.8.8/tcp/4096/p2p/{OTHER}"),
        _reply("/dns4/elsewhere.example.org/tcp/4096"),
        _reply("/ip4/8.8.8.8/tcp/22"),
    ],
)
async def test_an_invalid_reply_is_rejected(data: bytes, folder: Path) -> None:
    with pytest.raises(BadMessage):
        await _asked(data, folder)


@pytest.mark.parametrize("data", [b"", b"\x01", b"\x01\x20short"])
async def test_a_truncated_reply_is_unreachable(data: bytes, folder: Path) -> None:
    with pytest.raises(Unreachable):
        await _asked(data, folder)


async def _asked(data: bytes, folder: Path) -> Answer:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\x10\x00")
        writer.write(data)
        writer.close()

    p2pd = P2pd()
    await p2pd.receive_streams("", folder / "reach.sock")
    async with await asyncio.start_unix_server(answer, p2pd.listener):
        return await ask(p2pd, HELPER, 4096)
