"""What the tunnel costs and what it leaves behind. What it promises is in the transport contract."""

from __future__ import annotations

import asyncio
import gc
import tempfile
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from protocol.errors import Unreachable
from protocol.identity import Identity
from protocol.libp2p.p2pd import Daemon, DaemonSettings
from protocol.libp2p.splice import CarriedBytes, drop
from protocol.libp2p.tunnel import PROTOCOL, TunnelTransport
from protocol.streams.admission import Admission
from protocol.streams.transport import Purpose, StreamHandler
from tests.protocol.peers import chunk, echo, nobody, number_of


async def open_tunnel(stack: AsyncExitStack, home: Path, handler: StreamHandler, carried: CarriedBytes) -> tuple[Daemon, TunnelTransport]:
    Identity.load_or_create(home / "key")
    daemon = await stack.enter_async_context(Daemon(DaemonSettings(home / "key", home / "run", "127.0.0.1")))
    return daemon, await stack.enter_async_context(TunnelTransport(daemon.control, home / "run", handler, Admission(), carried))


def test_a_stream_costs_little_and_leaves_nothing() -> None:
    async def main() -> None:
        carried = CarriedBytes(), CarriedBytes()
        with tempfile.TemporaryDirectory() as home:
            async with AsyncExitStack() as stack:
                _, a = await open_tunnel(stack, Path(home) / "a", nobody, carried[0])
                there, _ = await open_tunnel(stack, Path(home) / "b", echo, carried[1])
                assert there.peer_id is not None
                stream = await a.connect(there.peer_id, there.addresses, Purpose.MEET)
                await stream.send(chunk(1, 200_000))
                assert await number_of(stream) == 1
                await stream.close()
                await asyncio.sleep(0.2)
                for side in carried:
                    assert side.sent < 1.01 * stream.bytes_sent
                    assert side.received < 1.01 * stream.bytes_received
                assert (carried[0].sent, carried[0].received) == (carried[1].received, carried[1].sent)
                left = {path.name for path in (Path(home) / "a" / "run").iterdir()}
                assert left == {"p2pd.sock", "in.sock"}
            assert not list((Path(home) / "a" / "run").iterdir())

        assert len(asyncio.all_tasks()) == 1

    asyncio.run(main())
    gc.collect()


def test_a_partner_that_accepts_and_says_nothing_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("protocol.libp2p.tunnel.ACCEPT_S", 0.3)

    async def main() -> None:
        with tempfile.TemporaryDirectory() as home:
            async with AsyncExitStack() as stack:
                _, a = await open_tunnel(stack, Path(home) / "a", nobody, CarriedBytes())
                Identity.load_or_create(Path(home) / "b" / "key")
                settings = DaemonSettings(Path(home) / "b" / "key", Path(home) / "b" / "run", "127.0.0.1")
                mute = await stack.enter_async_context(Daemon(settings))
                assert mute.peer_id is not None
                path = settings.folder / "mute.sock"
                listener = await asyncio.start_unix_server(lambda reader, writer: stack.callback(drop, writer) and None, path)
                stack.callback(listener.close)
                await mute.control.receive_streams(PROTOCOL, path)
                with pytest.raises(Unreachable, match="did not answer"):
                    await a.connect(mute.peer_id, mute.addresses, Purpose.MEET)

        assert len(asyncio.all_tasks()) == 1

    asyncio.run(main())
    gc.collect()
