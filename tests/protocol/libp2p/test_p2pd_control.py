"""The control socket with a p2pd that is silent, returns errors or has ended. test_p2pd.py uses a real p2pd."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from gossamer.protocol.errors import BadMessage, Unreachable
from gossamer.protocol.libp2p.hivemind_imports import Multiaddr, p2pd_pb2, read_pbmsg_safe, write_pbmsg
from gossamer.protocol.libp2p.p2pd import Control, read_stream_header
from tests.protocol.peers import seeded

pytestmark = pytest.mark.real_time
OTHER_END = Multiaddr("/ip4/203.0.113.5/tcp/4001")
ME, PARTNER, OTHER = (seeded(number).peer_id for number in (1, 2, 3))


async def play(folder: Path, answer: Callable[[Any], Any], ask: Callable[[Control], Awaitable[object]]) -> list[Any]:
    """Send requests to a p2pd with these responses (None: no response); return the requests that it received."""
    seen: list[Any] = []
    writers: list[asyncio.StreamWriter] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        request = p2pd_pb2.Request()
        await read_pbmsg_safe(reader, request)
        seen.append(request)
        response = answer(request)
        if response is not None:
            await write_pbmsg(writer, response)

    server = await asyncio.start_unix_server(serve, folder / "p2pd.sock")
    try:
        await ask(Control(folder / "p2pd.sock"))
    finally:
        server.close()
        for writer in writers:
            writer.transport.abort()
        await asyncio.sleep(0)
    return seen


def ok(_: object) -> Any:
    return p2pd_pb2.Response(type=p2pd_pb2.Response.OK)


async def test_a_silent_p2pd_is_unreachable_after_the_timeout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gossamer.protocol.libp2p.p2pd.DIAL_S", 0.1)
    with pytest.raises(Unreachable, match=r"within 0\.1 s"):
        await play(tmp_path, lambda request: None, lambda control: control.connect(PARTNER, []))


async def test_p2pds_error_is_reported_in_one_line(tmp_path: Path) -> None:
    response = p2pd_pb2.Response(type=p2pd_pb2.Response.ERROR, error=p2pd_pb2.ErrorResponse(msg="all dials failed\n  * " + "x" * 1000))
    with pytest.raises(Unreachable, match="^p2pd: all dials failed [*] x{50}") as caught:
        await play(tmp_path, lambda request: response, lambda control: control.open_stream(PARTNER, "/p"))
    assert len(str(caught.value)) < 400


async def test_an_ended_p2pd_is_unreachable(tmp_path: Path) -> None:
    with pytest.raises(Unreachable, match="has ended"):
        await Control(tmp_path / "nothing.sock").identify()


async def test_only_valid_addresses_of_the_partner_are_dialled(tmp_path: Path) -> None:
    good = "/ip4/203.0.113.5/tcp/4001"
    addresses = [good, f"{good}/p2p/{PARTNER}", f"{good}/p2p/{OTHER}", "/ip4/1.2.3.4/udp/1/quic", "nonsense", ""]
    (request,) = await play(tmp_path, ok, lambda control: control.connect(PARTNER, addresses))
    assert request.connect.peer == PARTNER.raw
    assert len(request.connect.addrs) == 2
    assert len(set(request.connect.addrs)) == 1


async def test_an_address_of_an_unknown_protocol_counts_as_unknown(tmp_path: Path) -> None:
    web_transport = Multiaddr("/ip4/203.0.113.5/udp/4001/quic-v1").to_bytes() + b"\xd1\x03"
    connected = p2pd_pb2.Response(type=p2pd_pb2.Response.OK, peers=[p2pd_pb2.PeerInfo(id=PARTNER.raw, addrs=[web_transport])])
    info = p2pd_pb2.StreamInfo(peer=PARTNER.raw, addr=web_transport, proto="/p")
    opened = p2pd_pb2.Response(type=p2pd_pb2.Response.OK, streamInfo=info)

    async def ask(control: Control) -> None:
        assert await control.connected() == {PARTNER: ""}
        (_, writer), address = await control.open_stream(PARTNER, "/p")
        writer.transport.abort()
        assert address == ""

    is_list = p2pd_pb2.Request.LIST_PEERS
    await play(tmp_path, lambda request: connected if request.type == is_list else opened, ask)


async def test_peers_with_other_types_of_key_are_skipped(tmp_path: Path) -> None:
    response = p2pd_pb2.Response(
        type=p2pd_pb2.Response.OK,
        peers=[p2pd_pb2.PeerInfo(id=raw, addrs=[OTHER_END.to_bytes()]) for raw in (PARTNER.raw, b"\x12\x20" + bytes(32))],
    )

    async def ask(control: Control) -> None:
        assert await control.connected() == {PARTNER: str(OTHER_END)}

    await play(tmp_path, lambda request: response, ask)


@pytest.mark.parametrize(("peer", "is_good"), [(PARTNER.raw, True), (b"\x12\x20" + bytes(32), False), (b"", False)])
async def test_an_inbound_stream_names_its_peer(peer: bytes, is_good: bool) -> None:
    info = p2pd_pb2.StreamInfo(peer=peer, addr=b"\x04\x7f\x00\x00\x01\x06\x00\x01", proto="/p").SerializeToString()
    reader = asyncio.StreamReader()
    reader.feed_data(bytes([len(info)]) + info + b"more")
    with nullcontext() if is_good else pytest.raises(BadMessage):
        assert await read_stream_header(reader) == (PARTNER, "/ip4/127.0.0.1/tcp/1")
        assert await reader.readexactly(4) == b"more"
