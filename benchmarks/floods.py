"""Connections that ask for nothing, by the hundred, at a real network part: what memory they cost, how long a newcomer waits for a place.

    python -m benchmarks.floods [--seconds 30]

The victim is a process of its own with its p2pd (tests/lab/lab_peer.py). A newcomer calls it all the while, each time by a new connection,
and tells the longest time between two calls that were answered. Floods: TCP connections that say nothing; ones that greet like libp2p and
go no further; streams of proven keys that begin HTTP/2 and stay idle; and such that are opened anew as soon as they are dropped. Aim: 50 MB
more at most, no place lost for longer than 10 s. Everything runs on this machine, where callers are not counted by network.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import socket
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

from gossamer.protocol.errors import GossamerError
from gossamer.protocol.identity import Identity, PeerId
from gossamer.protocol.libp2p import outbound
from gossamer.protocol.libp2p.p2pd import Daemon, DaemonSettings
from gossamer.protocol.libp2p.splice import CarriedBytes, Pair, drop
from gossamer.protocol.libp2p.tunnel import TunnelTransport
from gossamer.protocol.streams.admission import Admission
from gossamer.protocol.streams.transport import Purpose
from gossamer.protocol.tasks import cancel
from tests.protocol.peers import chunk, echo, number_of

RAW, IDLE, KEYS = 1000, 150, 3
GREETING = b"\x13/multistream/1.0.0\n"
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(3) + b"\x04" + bytes(5)  # and an empty SETTINGS frame
CALL_S = 10.0
SETTLE_S = 5.0


@dataclass(frozen=True, slots=True)
class Victim:
    """Who is flooded."""

    peer_id: PeerId
    port: int
    pid: int

    @property
    def addresses(self) -> tuple[str, ...]:
        """Where it is called."""
        return (f"/ip4/127.0.0.1/tcp/{self.port}",)

    def memory_mb(self) -> float:
        """Return what it and its p2pd hold."""
        children = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()
        return sum(map(_resident_mb, (self.pid, *map(int, children))))


def _resident_mb(pid: int) -> float:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("VmRSS:")[2].split()[0]) / 1e3


@contextlib.asynccontextmanager
async def victim(folder: Path) -> AsyncIterator[Victim]:
    """Start one, until the end of the body."""
    home = folder / "victim"
    home.mkdir(mode=0o700)
    identity = Identity.load_or_create(home / "key")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    words = [sys.executable, "-m", "tests.lab.lab_peer", str(home), str(port)]
    process = await asyncio.create_subprocess_exec(*words, stdout=asyncio.subprocess.PIPE)
    try:
        assert process.stdout is not None
        await process.stdout.readline()  # it is up
        yield Victim(identity.peer_id, port, process.pid)
    finally:
        process.kill()
        await process.wait()


async def daemon(stack: AsyncExitStack, folder: Path, name: str) -> Daemon:
    """Start a p2pd of another key."""
    Identity.load_or_create(folder / name / "key")
    settings = DaemonSettings(folder / name / "key", folder / name / "run", "127.0.0.1", listens=False)
    return await stack.enter_async_context(Daemon(settings))


async def call_again_and_again(transport: TunnelTransport, called: Victim, waited_s: list[float]) -> None:
    """Be a newcomer until cancelled; `waited_s` gets the time between each two answers."""
    last_s = time.monotonic()
    while True:
        with contextlib.suppress(GossamerError, TimeoutError):
            async with asyncio.timeout(CALL_S):
                stream = await transport.connect(called.peer_id, called.addresses, Purpose.MEET)
                await stream.send(chunk(1))
                await number_of(stream)
                await stream.close()
            waited_s.append(time.monotonic() - last_s)
            last_s = time.monotonic()
        await asyncio.sleep(0.25)


async def raw(called: Victim, stack: AsyncExitStack, says: bytes) -> None:
    """Open connections that say this, and no more."""
    for _ in range(RAW):
        with contextlib.suppress(OSError):
            _, writer = await asyncio.open_connection("127.0.0.1", called.port)
            stack.callback(drop, writer)
            writer.write(says)


async def idle(called: Victim, stack: AsyncExitStack, floods: list[Daemon], seconds: float) -> None:
    """Keep so many streams open that begin HTTP/2 and say no more; for `seconds`, those that were dropped are opened anew."""
    until_s, open_ones = time.monotonic() + seconds, list[Pair]()
    while True:
        open_ones = [pair for pair in open_ones if not pair[0].at_eof()]
        for number in range(IDLE - len(open_ones)):
            with contextlib.suppress(GossamerError, OSError):
                control = floods[number % len(floods)].control
                await control.connect(called.peer_id, called.addresses)
                pair, _ = await control.open_stream(called.peer_id, outbound.PROTOCOL)
                stack.callback(drop, pair[1])
                pair[1].write(PREFACE)
                open_ones.append(pair)
        if time.monotonic() >= until_s:
            return
        await asyncio.sleep(0.5)


async def measure(name: str, flood: Callable[[Victim, AsyncExitStack, Path], Awaitable[None]], seconds: float) -> None:
    """Flood a victim and print a line."""
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="floods-")))
        called = await stack.enter_async_context(victim(folder))
        near = await daemon(stack, folder, "near")
        tunnel = TunnelTransport(near.control, folder / "near" / "run", echo, Admission(), CarriedBytes())
        transport, waited_s = await stack.enter_async_context(tunnel), list[float]()
        calling = asyncio.create_task(call_again_and_again(transport, called, waited_s))
        await asyncio.sleep(SETTLE_S)
        before_mb, most_mb = called.memory_mb(), 0.0
        waited_s.clear()
        flooding = asyncio.ensure_future(flood(called, stack, folder))
        until_s = time.monotonic() + seconds
        while time.monotonic() < until_s:
            most_mb = max(most_mb, called.memory_mb())
            await asyncio.sleep(0.2)
        await cancel(calling, flooding)
        print(
            f"| {name} | {before_mb:.0f} | {most_mb - before_mb:+.0f} | {max(waited_s, default=seconds):.1f} | {len(waited_s)} |",
            flush=True,
        )


async def main() -> None:
    """Print a line for each flood."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=30.0)
    seconds = parser.parse_args().seconds
    outbound.KEEP_S = 0.0  # each call by a new connection

    async def of_keys(called: Victim, stack: AsyncExitStack, folder: Path, again_s: float) -> None:
        await idle(called, stack, [await daemon(stack, folder, f"flood-{number}") for number in range(KEYS)], again_s)

    print("| flood | MB before | most MB more | longest without an answer, s | calls answered |\n|---|---|---|---|---|")
    await measure("none", lambda called, stack, folder: asyncio.sleep(0), seconds)
    await measure(f"{RAW} connections that say nothing", lambda called, stack, folder: raw(called, stack, b""), seconds)
    await measure(f"{RAW} that greet and go no further", lambda called, stack, folder: raw(called, stack, GREETING), seconds)
    await measure(f"{IDLE} idle HTTP/2 streams of {KEYS} keys", lambda called, stack, folder: of_keys(called, stack, folder, 0), seconds)
    await measure("the same, opened anew", lambda called, stack, folder: of_keys(called, stack, folder, seconds), seconds)


if __name__ == "__main__":
    asyncio.run(main())
