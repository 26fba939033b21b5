"""What a peer says that means no good: raw messages in the name of Mallory, and trainers that do not send what they computed."""

from __future__ import annotations

import hashlib
from dataclasses import replace

import numpy as np

from gossamer.peer.link import messages
from gossamer.peer.link.messages import File, payload_name
from gossamer.protocol.identity import Identity, PeerId
from gossamer.protocol.messages.messages import Hello, Opening, RunPhase
from gossamer.protocol.messages.records import MemberRecord
from gossamer.protocol.streams.transport import Purpose, Stream
from tests.swarm.world import Peer, Swarm

MALLORY = Identity(b"mallory!" * 4)


async def nobody(purpose: Purpose, stream: Stream) -> None:
    raise AssertionError("nobody is to call this peer")


def record(swarm: Swarm, who: Identity, sequence: int = 1, address: str = "/ip4/192.0.2.66/tcp/1") -> MemberRecord:
    expires_s = int(swarm.network.now_s()) + 90
    return MemberRecord(swarm.terms.run_id, who.peer_id, (address,), 0, False, sequence, expires_s).signed(who)


def hello_to(swarm: Swarm, partner: PeerId) -> Hello:
    """Write an opening Hello with nothing wrong in it."""
    terms = swarm.terms.fragments[0]
    return Hello(
        opening=Opening(1, swarm.terms.run_id, MALLORY.peer_id, partner, b"n" * 16),
        fragment=0,
        codec=swarm.terms.codec_id,
        tokens=10,
        global_step=0,
        sketch_bytes=terms.sketch_bytes,
        payload_bytes=terms.payload_bytes,
        phase=RunPhase.TRAIN,
    ).signed(MALLORY)


def spoil_payload(peer: Peer, *, nan: bool, rehash: bool, cut: int = 0) -> None:
    """Have a peer send something else than what it computed."""

    def spoil(reply: messages.Reply) -> messages.Reply:
        if not isinstance(reply, messages.PayloadReady):
            return reply
        name = payload_name(reply.meeting, File.OWN_PAYLOAD)
        data = bytearray(peer.payloads.read(name))
        data[-4:] = np.float32(np.nan if nan else 0.125).tobytes()
        data = data[: len(data) - cut]
        peer.payloads.write(name, bytes(data))
        return replace(reply, sha256=hashlib.sha256(data).hexdigest()) if rehash else reply

    peer.trainer.spoil = spoil
