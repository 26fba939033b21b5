"""What the tunnel costs and what it leaves behind. What it promises is in the transport contract."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest

from gossamer.protocol.errors import Unreachable
from gossamer.protocol.identity import PeerId
from gossamer.protocol.libp2p.outbound import PROTOCOL
from gossamer.protocol.libp2p.p2pd import Control
from gossamer.protocol.libp2p.splice import CarriedBytes, Pair, drop
from gossamer.protocol.libp2p.tunnel import tunnel_transport
from gossamer.protocol.streams.admission import Admission
from gossamer.protocol.streams.transport import Purpose, Stream, StreamHandler
from tests.peer.waiting import eventually
from tests.protocol.peers import chunk, echo, nobody, number_of
from tests.protocol.worlds import open_tunnel, start_daemon

pytestmark = pytest.mark.real_time


@asynccontextmanager
async def called(
    home: Path, handler: StreamHandler, carried: tuple[CarriedBytes, CarriedBytes]
) -> AsyncIterator[Callable[[Purpose], Awaitable[Stream]]]:
    """Run two p2pds with tunnels, of the caller and of the handler; yield what opens a stream between them."""
    async with AsyncExitStack() as stack:
        _, here = await open_tunnel(stack, home / "a", nobody, carried=carried[0])
        there, _ = await open_tunnel(stack, home / "b", handler, carried=carried[1])
        yield lambda purpose: here.connect(there.peer_id, there.addresses, purpose)


async def test_a_stream_costs_little_and_leaves_nothing(folder: Path) -> None:
    carried = CarriedBytes(), CarriedBytes()
    async with called(folder, echo, carried) as connect:
        stream = await connect(Purpose.MEET)
        await stream.send(chunk(1, 200_000))
        assert await number_of(stream) == 1
        stream.close()
        here, there = carried
        await eventually(lambda: (here.sent, here.received) == (there.received, there.sent), "as much at both ends")
        for side in carried:
            assert side.sent < 1.01 * stream.bytes_sent
            assert side.received < 1.01 * stream.bytes_received
        left, kept = folder / "a" / "run", {"p2pd.sock", "in.sock", "grpc.sock", "bulk.sock"}
        await eventually(lambda: {path.name for path in left.iterdir()} == kept, "no socket of the stream")
    assert not list((folder / "a" / "run").iterdir())


async def test_a_silent_partner_is_given_up(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.setattr("gossamer.protocol.libp2p.outbound.ACCEPT_S", 0.3)
    async with AsyncExitStack() as stack:
        _, a = await open_tunnel(stack, folder / "a", nobody)
        mute = await start_daemon(stack, folder / "b")
        path = mute.settings.folder / "mute.sock"
        listener = await asyncio.start_unix_server(lambda reader, writer: stack.callback(drop, writer) and None, path)
        stack.callback(listener.close)
        await mute.control.receive_streams(PROTOCOL, path)
        opening = asyncio.create_task(a.connect(mute.peer_id, mute.addresses, Purpose.MEET))
        await asyncio.sleep(0)  # starts the task
        assert a.is_calling(mute.peer_id), "a connection is in use before the partner accepts the call"
        with pytest.raises(Unreachable, match="did not accept"):
            await opening
        assert not a.is_calling(mute.peer_id)


async def test_a_call_whose_end_is_cancelled_again_and_again_leaves_no_connection(folder: Path) -> None:
    """The partner would keep it for more than a minute, and so would this side."""

    async def never(purpose: Purpose, stream: Stream) -> None:
        await asyncio.Event().wait()

    async with called(folder, never, (CarriedBytes(), CarriedBytes())) as connect:
        stream = await connect(Purpose.MEET)
        await stream.send(chunk(1))
        stream.close()
        await asyncio.sleep(0)
        (ending,) = [task for task in asyncio.all_tasks() if task.get_name() == "outbound close"]
        while not ending.done():
            ending.cancel()
            await asyncio.sleep(0)
        await eventually(lambda: "outbound connection" not in {task.get_name() for task in asyncio.all_tasks()}, "end of it", 5.0)


class CountingControl(Control):
    """Counts the libp2p streams that are opened, and closes the connection of the first `num_to_end`."""

    num_opened = 0
    num_to_end = 0

    async def open_stream(self, partner: PeerId, protocol: str) -> tuple[Pair, str]:
        self.num_opened += 1
        opened = await super().open_stream(partner, protocol)
        if self.num_opened <= self.num_to_end:
            await self.disconnect(partner)
        return opened


class Kept:
    """A caller that keeps connections, and somebody to call."""

    def __init__(self, stack: AsyncExitStack, folder: Path) -> None:
        self._stack = stack
        self._home = folder

    async def open(self) -> None:
        near = await start_daemon(self._stack, self._home / "near")
        self.control = CountingControl(near.socket_path)
        tunnel = tunnel_transport(self.control, near.settings.folder, nobody, Admission(), CarriedBytes())
        self._near = await self._stack.enter_async_context(tunnel)
        self._far, _ = await open_tunnel(self._stack, self._home / "far", echo)

    async def connect(self, number: int, purpose: Purpose = Purpose.MEET) -> Stream:
        """Open a stream, and say a number on it."""
        stream = await self._near.connect(self._far.peer_id, self._far.addresses, purpose)
        await stream.send(chunk(number))
        assert await number_of(stream) == number
        return stream

    async def end(self, *streams: Stream) -> None:
        """Close streams, and wait until their connections are kept, or closed."""
        for stream in streams:
            stream.close()
        await asyncio.gather(*[task for task in asyncio.all_tasks() if task.get_name() == "outbound close"])


@pytest.fixture
@asynccontextmanager
async def world(folder: Path) -> AsyncIterator[Kept]:
    async with AsyncExitStack() as stack:
        world = Kept(stack, folder)
        await world.open()
        yield world


async def test_one_call_after_another_takes_one_connection(world: Kept) -> None:
    for number in range(5):
        await world.end(await world.connect(number))
    assert world.control.num_opened == 1


async def test_calls_at_the_same_time_take_one_each_and_few_are_kept(monkeypatch: pytest.MonkeyPatch, world: Kept) -> None:
    monkeypatch.setattr("gossamer.protocol.libp2p.outbound.MAX_KEPT_OF_ONE", 1)
    await world.end(await world.connect(1), await world.connect(2))
    assert world.control.num_opened == 2
    await world.end(await world.connect(3), await world.connect(4))
    assert world.control.num_opened == 3


async def test_no_connection_goes_while_there_is_room_for_all(monkeypatch: pytest.MonkeyPatch, world: Kept) -> None:
    for limit in ("MAX_KEPT", "MAX_KEPT_OF_ONE", "MAX_CLOSING"):
        monkeypatch.setattr(f"gossamer.protocol.libp2p.outbound.{limit}", 4)

    for _ in range(2):
        await world.end(
            *[await world.connect(number, purpose) for number, purpose in enumerate((Purpose.MEET, Purpose.MEET, Purpose.FETCH))]
        )
    assert world.control.num_opened == 3


async def test_a_kept_connection_goes_in_time(monkeypatch: pytest.MonkeyPatch, world: Kept) -> None:
    monkeypatch.setattr("gossamer.protocol.libp2p.outbound.KEEP_S", 0.0)
    await world.end(await world.connect(1))
    await world.end(await world.connect(2))
    assert world.control.num_opened == 2


async def test_in_the_place_of_a_kept_connection_that_the_other_side_has_ended_comes_a_new_one(
    monkeypatch: pytest.MonkeyPatch, world: Kept
) -> None:
    monkeypatch.setattr("gossamer.protocol.streams.admission.LINGER_S", 0.05)
    await world.end(await world.connect(1))
    async with asyncio.timeout(20):
        while world.control.num_opened == 1:  # the far side has not ended it yet, and each call lets it wait again
            await asyncio.sleep(0.5)
            await world.end(await world.connect(2))
    assert world.control.num_opened == 2


async def test_a_connection_that_closes_before_the_call_is_accepted_is_opened_once_more(world: Kept) -> None:
    world.control.num_to_end = 1
    await world.end(await world.connect(1))
    assert world.control.num_opened == 2


async def test_a_partner_that_closes_every_connection_is_unreachable(world: Kept) -> None:
    world.control.num_to_end = 9
    with pytest.raises(Unreachable, match="the connection ended before the partner accepted the call"):
        await world.connect(1)
    assert world.control.num_opened == 2


async def test_a_partner_is_unreachable_while_this_machine_has_no_socket_for_the_call(monkeypatch: pytest.MonkeyPatch, world: Kept) -> None:
    async def full(*_: object, limit: int) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(asyncio, "start_unix_server", full)
        with pytest.raises(Unreachable, match="Too many open files"):
            await world.connect(1)
    await world.end(await world.connect(2))
