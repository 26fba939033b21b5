"""Who gets past the server's door."""

from __future__ import annotations

import asyncio
import gc
from typing import Any

import grpc
import grpc.aio
import pytest

from protocol.identity import PeerId
from protocol.libp2p.grpc_stream import SERVICE
from protocol.libp2p.server import Reception
from protocol.messages.frames import to_frame
from protocol.streams.admission import StreamCaps
from protocol.streams.transport import Purpose, Stream
from tests.protocol.peers import chunk, echo, seeded

PARTNER = seeded(1).peer_id


class Guests:
    """Everybody, or nobody, is PARTNER."""

    def __init__(self, is_open: bool) -> None:
        self.is_open = is_open
        self.log: list[str] = []

    def claim(self, caller: str) -> PeerId | None:
        self.log.append("claim")
        return PARTNER if self.is_open else None

    def heard(self, caller: str) -> None:
        self.log.append("heard")

    def release(self, caller: str) -> None:
        self.log.append("release")


def call_once(guests: Guests | None, frame: bytes) -> tuple[grpc.StatusCode, object]:
    """Call the server from outside any tunnel; return the call's end and what was answered."""

    async def main() -> tuple[grpc.StatusCode, object]:
        reception = Reception(echo, StreamCaps())
        port = await reception.open()
        if guests is not None:
            reception.admit_from(guests)
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            call: Any = channel.stream_stream(f"/{SERVICE}/Meet")()
            answer: object = None
            try:
                await call.write(frame)
                answer = await call.read()
                await call.done_writing()
            except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
                pass
            code = await call.code()
        await reception.close()
        return code, answer

    result = asyncio.run(main())
    gc.collect()
    return result


@pytest.mark.parametrize("guests", [None, Guests(is_open=False)], ids=["no register yet", "not in the register"])
def test_a_local_program_that_dials_the_port_is_turned_away(guests: Guests | None) -> None:
    assert call_once(guests, to_frame(chunk(1))) == (grpc.StatusCode.UNAUTHENTICATED, None)
    assert guests is None or guests.log == ["claim"]


def test_a_guest_is_served_and_released() -> None:
    guests = Guests(is_open=True)
    assert call_once(guests, to_frame(chunk(1))) == (grpc.StatusCode.OK, to_frame(chunk(1)))
    assert guests.log == ["claim", "heard", "release"]


def test_closing_gives_handlers_a_moment_and_then_cancels_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("protocol.libp2p.server.HANDLERS_END_S", 0.1)
    ends: list[str] = []

    async def stubborn(purpose: Purpose, stream: Stream) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ends.append("cancelled")

    async def main() -> None:
        reception = Reception(stubborn, StreamCaps())
        port = await reception.open()
        reception.admit_from(Guests(is_open=True))
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            call: Any = channel.stream_stream(f"/{SERVICE}/Meet")()
            await call.write(to_frame(chunk(1)))
            await call.initial_metadata()
            await asyncio.sleep(0.05)
            await reception.close()
        assert ends == ["cancelled"]
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(main())
    gc.collect()
