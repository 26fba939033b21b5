"""Test whether our p2pd relays with our limits: two temporary peers without a port connect through it and transfer TRIAL_BYTES.

Only a transfer shows whether p2pd uses our relay service or the default one, which cuts every circuit after 128 KiB (`p2pd.py`).
"""

from __future__ import annotations

import asyncio
import os
from contextlib import AsyncExitStack, suppress
from pathlib import Path

from gossamer.protocol.addresses import CIRCUIT
from gossamer.protocol.errors import TransportError, Unreachable
from gossamer.protocol.identity import Identity, PeerId
from gossamer.protocol.libp2p.p2pd import Control, Daemon, DaemonSettings, receiving
from gossamer.protocol.libp2p.splice import Pair, drop
from gossamer.protocol.limits import KIB, SEED_BYTES

TRIAL_BYTES = 200 * KIB
TRIAL_S = 20.0
RESERVE_S = 0.1  # time between two checks of the relay reservation
PROTOCOL = "/gossamer/relay-trial/1"


async def try_relay(relay: str, folder: Path) -> bool:
    """Return whether the relay at this multiaddr forwards TRIAL_BYTES. Raises GossamerError if the two peers in `folder` cannot start."""
    async with AsyncExitStack() as stack:
        try:
            called = await stack.enter_async_context(Daemon(_settings(folder / "trial-a", (relay,))))
            caller = await stack.enter_async_context(Daemon(_settings(folder / "trial-b", ())))
        except OSError as error:  # a full disk, or too many processes or open files: not the relay's fault
            raise TransportError(f"the peers of a relay trial could not be started: {error.strerror}") from error
        with suppress(TimeoutError, OSError, EOFError):
            async with asyncio.timeout(TRIAL_S):
                return await _forwards(called, caller, relay)
    return False


async def _forwards(called: Daemon, caller: Daemon, relay: str) -> bool:
    listener = called.settings.folder / "in.sock"
    got: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    async with receiving(called.control, PROTOCOL, listener, lambda *pair: _count(pair, got)):
        _, writer = await _call(caller.control, called.peer_id, relay + CIRCUIT)
        try:
            writer.write(bytes(TRIAL_BYTES))
            writer.write_eof()
            return await got >= TRIAL_BYTES
        finally:
            drop(writer)


def _settings(folder: Path, through: tuple[str, ...]) -> DaemonSettings:
    folder.mkdir(mode=0o700, exist_ok=True)
    key = folder / "key"
    key.write_bytes(Identity(os.urandom(SEED_BYTES)).to_bytes())
    return DaemonSettings(key, folder, host="127.0.0.1", through=through, listens=False)


async def _call(control: Control, partner: PeerId, address: str) -> Pair:
    """Open a stream as soon as the partner has its relay reservation."""
    while True:
        try:
            await control.connect(partner, [address])
            return (await control.open_stream(partner, PROTOCOL))[0]
        except Unreachable:
            await asyncio.sleep(RESERVE_S)


async def _count(pair: Pair, got: asyncio.Future[int]) -> None:
    num_bytes = 0
    with suppress(OSError):
        while data := await pair[0].read(TRIAL_BYTES):
            num_bytes += len(data)
    drop(pair[1])
    if not got.done():
        got.set_result(num_bytes)
