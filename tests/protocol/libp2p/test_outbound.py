"""What the tunnel costs and what it leaves behind. What it promises is in the transport contract."""

from __future__ import annotations

import asyncio
import errno
import gc
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest

from gossamer.protocol.errors import Unreachable
from gossamer.protocol.identity import Identity, PeerId
from gossamer.protocol.libp2p.outbound import PROTOCOL, Outbound
from gossamer.protocol.libp2p.p2pd import Control, Daemon, DaemonSettings
from gossamer.protocol.libp2p.splice import CarriedBytes, Pair, drop
from gossamer.protocol.libp2p.tunnel import tunnel_transport
from gossamer.protocol.streams.admission import Admission
from gossamer.protocol.streams.transport import Purpose, Stream, StreamHandler
from tests.peer.waiting import eventually
from tests.protocol.peers import chunk, echo, nobody, number_of


async def open_tunnel(stack: AsyncExitStack, home: Path, handler: StreamHandler, carried: CarriedBytes) -> tuple[Daemon, Outbound]:
    Identity.load_or_create(home / "key")
    daemon = await stack.enter_async_context(Daemon(DaemonSettings(home / "key", home / "run", "127.0.0.1")))
    return daemon, await stack.enter_async_context(tunnel_transport(daemon.control, home / "run", handler, Admission(), carried))


@asynccontextmanager
async def called(
    home: Path, handler: StreamHandler, carried: tuple[CarriedBytes, CarriedBytes]
) -> AsyncIterator[Callable[[Purpose], Awaitable[Stream]]]:
    """Run two p2pds with tunnels, of the caller and of the handler; yield what opens a stream between them."""
    async with AsyncExitStack() as stack:
        _, here = await open_tunnel(stack, home / "a", nobody, carried[0])
        there, _ = await open_tunnel(stack, home / "b", handler, carried[1])
        peer_id = there.peer_id
        assert peer_id is not None
        yield lambda purpose: here.connect(peer_id, there.addresses, purpose)


def test_a_stream_costs_little_and_leaves_nothing() -> None:
    async def main() -> None:
        carried = CarriedBytes(), CarriedBytes()
        with tempfile.TemporaryDirectory() as home:
            async with called(Path(home), echo, carried) as connect:
                stream = await connect(Purpose.MEET)
                await stream.send(chunk(1, 200_000))
                assert await number_of(stream) == 1
                stream.close()
                here, there = carried
                await eventually(lambda: (here.sent, here.received) == (there.received, there.sent), "as much at both ends")
                for side in carried:
                    assert side.sent < 1.01 * stream.bytes_sent
                    assert side.received < 1.01 * stream.bytes_received
                left, kept = Path(home) / "a" / "run", {"p2pd.sock", "in.sock", "grpc.sock", "bulk.sock"}
                await eventually(lambda: {path.name for path in left.iterdir()} == kept, "no socket of the stream")
            assert not list((Path(home) / "a" / "run").iterdir())

        assert len(asyncio.all_tasks()) == 1

    asyncio.run(main())
    gc.collect()


def test_a_silent_partner_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gossamer.protocol.libp2p.outbound.ACCEPT_S", 0.3)

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
                opening = asyncio.create_task(a.connect(mute.peer_id, mute.addresses, Purpose.MEET))
                await asyncio.sleep(0)  # starts the task
                assert a.is_calling(mute.peer_id), "a connection is in use before the partner accepts the call"
                with pytest.raises(Unreachable, match="did not accept"):
                    await opening
                assert not a.is_calling(mute.peer_id)

        assert len(asyncio.all_tasks()) == 1

    asyncio.run(main())
    gc.collect()


def test_a_call_whose_end_is_cancelled_again_and_again_leaves_no_connection() -> None:
    """The partner would keep it for more than a minute, and so would this side."""

    async def never(purpose: Purpose, stream: Stream) -> None:
        await asyncio.Event().wait()

    async def main() -> None:
        with tempfile.TemporaryDirectory() as home:
            async with called(Path(home), never, (CarriedBytes(), CarriedBytes())) as connect:
                stream = await connect(Purpose.MEET)
                await stream.send(chunk(1))
                stream.close()
                await asyncio.sleep(0)
                (ending,) = [task for task in asyncio.all_tasks() if task.get_name() == "outbound close"]
                while not ending.done():
                    ending.cancel()
                    await asyncio.sleep(0)
                await eventually(lambda: "outbound connection" not in {task.get_name() for task in asyncio.all_tasks()}, "end of it", 5.0)

    asyncio.run(main())
    gc.collect()


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

    def __init__(self, stack: AsyncExitStack) -> None:
        self._stack = stack
        self._home = Path(stack.enter_context(tempfile.TemporaryDirectory()))

    async def open(self) -> None:
        near, far = self._home / "near", self._home / "far"
        Identity.load_or_create(near / "key")
        daemon = await self._stack.enter_async_context(Daemon(DaemonSettings(near / "key", near / "run", "127.0.0.1")))
        self.control = CountingControl(daemon.socket_path)
        tunnel = tunnel_transport(self.control, near / "run", nobody, Admission(), CarriedBytes())
        self._near = await self._stack.enter_async_context(tunnel)
        Identity.load_or_create(far / "key")
        self._far = await self._stack.enter_async_context(Daemon(DaemonSettings(far / "key", far / "run", "127.0.0.1")))
        await self._stack.enter_async_context(tunnel_transport(self._far.control, far / "run", echo, Admission(), CarriedBytes()))

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


def play(test: Callable[[Kept], Coroutine[None, None, None]]) -> None:
    async def main() -> None:
        async with AsyncExitStack() as stack:
            world = Kept(stack)
            await world.open()
            await test(world)
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(main())
    gc.collect()


def test_one_call_after_another_takes_one_connection() -> None:
    async def test(world: Kept) -> None:
        for number in range(5):
            await world.end(await world.connect(number))
        assert world.control.num_opened == 1

    play(test)


def test_calls_at_the_same_time_take_one_each_and_few_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gossamer.protocol.libp2p.outbound.MAX_KEPT_OF_ONE", 1)

    async def test(world: Kept) -> None:
        await world.end(await world.connect(1), await world.connect(2))
        assert world.control.num_opened == 2
        await world.end(await world.connect(3), await world.connect(4))
        assert world.control.num_opened == 3

    play(test)


def test_no_connection_goes_while_there_is_room_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    for limit in ("MAX_KEPT", "MAX_KEPT_OF_ONE", "MAX_CLOSING"):
        monkeypatch.setattr(f"gossamer.protocol.libp2p.outbound.{limit}", 4)

    async def test(world: Kept) -> None:
        for _ in range(2):
            await world.end(
                *[await world.connect(number, purpose) for number, purpose in enumerate((Purpose.MEET, Purpose.MEET, Purpose.FETCH))]
            )
        assert world.control.num_opened == 3

    play(test)


def test_a_kept_connection_goes_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gossamer.protocol.libp2p.outbound.KEEP_S", 0.0)

    async def test(world: Kept) -> None:
        await world.end(await world.connect(1))
        await world.end(await world.connect(2))
        assert world.control.num_opened == 2

    play(test)


def test_in_the_place_of_a_kept_connection_that_the_other_side_has_ended_comes_a_new_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gossamer.protocol.streams.admission.LINGER_S", 0.05)

    async def test(world: Kept) -> None:
        await world.end(await world.connect(1))
        async with asyncio.timeout(20):
            while world.control.num_opened == 1:  # the far side has not ended it yet, and each call lets it wait again
                await asyncio.sleep(0.5)
                await world.end(await world.connect(2))
        assert world.control.num_opened == 2

    play(test)


def test_a_connection_that_closes_before_the_call_is_accepted_is_opened_once_more() -> None:
    async def test(world: Kept) -> None:
        world.control.num_to_end = 1
        await world.end(await world.connect(1))
        assert world.control.num_opened == 2

    play(test)


def test_a_partner_that_closes_every_connection_is_unreachable() -> None:
    async def test(world: Kept) -> None:
        world.control.num_to_end = 9
        with pytest.raises(Unreachable, match="the connection ended before the partner accepted the call"):
            await world.connect(1)
        assert world.control.num_opened == 2

    play(test)


def test_a_partner_is_unreachable_while_this_machine_has_no_socket_for_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    async def full(*_: object, limit: int) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    async def test(world: Kept) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(asyncio, "start_unix_server", full)
            with pytest.raises(Unreachable, match="Too many open files"):
                await world.connect(1)
        await world.end(await world.connect(2))

    play(test)
