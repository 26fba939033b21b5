"""Bytes of a meeting beside those of its codec: the overhead of greeting, hashes, signatures, framing and HTTP/2.

    python -m benchmarks.meeting_bytes [--codec NAME] [--steps N]

Two real peers of the demo's model on this machine. `codec` is sketch and payload of a fragment, one way, by the codec's definition.
`stream` is the size of the peer's frames in completed meetings, from its events. `tunnel` adds the HTTP/2 framing of as many bytes through
a real libp2p tunnel between two nodes. The aim is less than 2 % above `codec`.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from gossamer.peer.machine.events import MeetingDone, read_events
from gossamer.peer.machine.home import Home
from gossamer.peer.model.model import parameter_shapes
from gossamer.peer.model.plan import fragment_codecs
from gossamer.protocol.identity import Identity
from gossamer.protocol.libp2p.node import Libp2pNode
from gossamer.protocol.libp2p.p2pd import DaemonSettings
from gossamer.protocol.libp2p.record_store import RecordStore
from gossamer.protocol.limits import CHUNK_BYTES
from gossamer.protocol.messages.messages import Chunk, Part
from gossamer.protocol.run.manifest import SignedManifest
from gossamer.protocol.streams.transport import Purpose, Stream


def meetings(folder: Path, codec: str, steps: int) -> dict[int, tuple[int, list[int]]]:
    """Run the demo; return for each fragment the codec's bytes and those of each completed meeting, one way."""
    command = [
        sys.executable,
        "-m",
        "gossamer.cli.main",
        "demo",
        "--peers",
        "2",
        "--codec",
        codec,
        "--steps",
        str(steps),
        "--home",
        str(folder),
    ]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    home = Home(folder / "peer-1")
    manifest = SignedManifest.from_bytes(home.manifest.read_bytes()).manifest()
    codecs = fragment_codecs(manifest, parameter_shapes(manifest.model))
    found = {number: (f.sketch_bytes + f.payload_bytes, list[int]()) for number, f in enumerate(codecs)}
    for event in read_events(home.events):
        if isinstance(event, MeetingDone) and event.outcome == "completed":
            found[event.fragment][1].append(event.bytes_sent)
    return found


async def tunnel_overhead(num_bytes: int, folder: Path) -> int:
    """Send this many bytes in chunks from one node to another; return the bytes in the tunnel beyond the frames."""
    done = asyncio.Event()

    async def drain(purpose: Purpose, stream: Stream) -> None:
        received = 0
        while received < num_bytes:
            message = await stream.receive()
            assert isinstance(message, Chunk)
            received += len(message.data)
        done.set()

    async with Libp2pNode(_settings(folder, "a"), RecordStore(bytes(32)), drain) as receiver, \
            Libp2pNode(_settings(folder, "b"), RecordStore(bytes(32)), drain) as sender:  # fmt: skip
        stream = await sender.connect(receiver.peer_id, receiver.addresses, Purpose.MEET)
        for offset in range(0, num_bytes, CHUNK_BYTES):
            await stream.send(Chunk(Part.PAYLOAD, offset, bytes(min(CHUNK_BYTES, num_bytes - offset))))
        await done.wait()
        await stream.close()
        return sender.carried.sent - stream.bytes_sent


def _settings(folder: Path, name: str) -> DaemonSettings:
    key = folder / f"{name}.key"
    Identity.load_or_create(key)
    return DaemonSettings(identity_file=key, folder=folder / name, host="127.0.0.1")


def main() -> None:
    """Print a row per fragment."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--codec", default="int8")
    parser.add_argument("--steps", type=int, default=120)
    given = parser.parse_args()
    print(f"{'fragment':<10}{'meetings':>9}{'codec':>10}{'stream':>10}{'tunnel':>10}{'overhead':>10}")
    with tempfile.TemporaryDirectory(prefix="mb-") as temporary:
        folder = Path(temporary)
        total_codec = total_tunnel = 0
        for number, (wanted, sent) in meetings(folder / "demo", given.codec, given.steps).items():
            stream = round(statistics.mean(sent))
            tunnel = stream + asyncio.run(tunnel_overhead(wanted, folder))
            print(f"{number:<10}{len(sent):>9}{wanted:>10}{stream:>10}{tunnel:>10}{tunnel / wanted - 1:>10.2%}")
            total_codec, total_tunnel = total_codec + wanted * len(sent), total_tunnel + tunnel * len(sent)
        print(f"{'all':<49}{total_tunnel / total_codec - 1:>10.2%}")


if __name__ == "__main__":
    main()
