"""One holder of an invite with many keys: they all say the same of themselves, meet nobody, and give everybody the same weights."""

from __future__ import annotations

import asyncio
import hashlib
from collections import Counter
from collections.abc import Callable
from contextlib import suppress

from gossamer.peer.sync.pieces import RunResult
from gossamer.peer.sync.state_source import OF_RESULT
from gossamer.protocol.errors import PeerGone, RefusalCode
from gossamer.protocol.identity import Identity
from gossamer.protocol.messages.messages import Chunk, Contents, ContentsKind, FetchRequest, Part, Refusal
from gossamer.protocol.messages.records import MemberRecord
from gossamer.protocol.run.invite import Credential, Invite
from gossamer.protocol.streams.transport import Purpose, Stream
from tests.protocol.knowing import KnowingPeer
from tests.swarm.world import Swarm

HOST = Identity(b"h" * 32)
RECORD_S = 90
AGAIN_S = 20.0


def credential_of(swarm: Swarm, holder: Identity, invite: int) -> Credential:
    """Bind an invite that the host has written for anybody to one of its holder's keys; another number is another invite."""
    written = Invite.issue(HOST, swarm.terms.run_id, ("/ip4/192.0.2.1/tcp/1/p2p/" + str(HOST.peer_id),), None, 2_000_000_000 + invite)
    return written.credential_for(holder.peer_id)


class Sybils:
    """So many keys of one invite's holder. `global_step` says what they declare, `state` what they give."""

    def __init__(self, swarm: Swarm, num_keys: int, global_step: Callable[[], int], state: Callable[[], bytes], invite: int = 1) -> None:
        self._swarm = swarm
        self.global_step_of = global_step
        self._state = state
        self._keys = [Identity(hashlib.sha256(f"sybil {number}".encode()).digest()) for number in range(num_keys)]
        self._credentials = {key.peer_id: credential_of(swarm, key, invite) for key in self._keys}
        self._sequence = 0
        self.finished = False  # what they say of themselves
        self.result = b""
        self.asked: Counter[ContentsKind] = Counter()

    async def run(self) -> None:
        """Be there until cancelled."""
        network = self._swarm.network
        for key in self._keys:
            network.start_peer(key.peer_id, self._answer_as(key))
        while True:
            self._sequence += 1
            await asyncio.gather(*(self._announce(key, network.peers[key.peer_id]) for key in self._keys))
            await asyncio.sleep(AGAIN_S)

    async def _announce(self, key: Identity, peer: KnowingPeer) -> None:
        expires_s = int(self._swarm.network.now_s()) + RECORD_S
        record = MemberRecord(
            self._swarm.terms.run_id, key.peer_id, self._addresses(key), self.global_step_of(), self.finished, self._sequence, expires_s,
            self._credentials[key.peer_id],
        )  # fmt: skip
        await peer.announce(record.signed(key))

    def _addresses(self, key: Identity) -> tuple[str, ...]:
        return (f"/ip4/203.0.113.{1 + self._keys.index(key)}/tcp/4001",)

    def _answer_as(self, key: Identity) -> Callable[[Purpose, Stream], object]:
        async def answer(purpose: Purpose, stream: Stream) -> None:
            with suppress(PeerGone):
                if purpose is Purpose.MEET:
                    await stream.receive()
                    await stream.send(Refusal(RefusalCode.STEP_TOO_FAR, "far ahead of you"))
                    return
                while True:
                    request = await stream.receive()
                    if isinstance(request, FetchRequest):
                        await self._give(key, stream, request)

        return answer

    async def _give(self, key: Identity, stream: Stream, request: FetchRequest) -> None:
        self.asked[request.kind] += 1
        if request.kind not in (ContentsKind.STATE, ContentsKind.RESULT):
            await stream.send(Refusal(RefusalCode.NOT_READY))
            return
        whole = self.result if request.kind is ContentsKind.RESULT else self._state()
        name = hashlib.sha256(whole).digest() if request.kind is ContentsKind.RESULT and whole else b""
        data = whole[request.offset : request.offset + request.num_bytes]
        total = self._swarm.terms.state_bytes
        header = Contents(request.kind, total, hashlib.sha256(data).digest(), self.global_step_of(), name)
        await stream.send(header.signed(key, *request.asked))
        if data:
            await stream.send(Chunk(Part.CONTENTS, request.offset, data))


class Strangers(Sybils):
    """Keys with an invite each. The first one claims these addresses in its records; all give the same result."""

    def __init__(
        self, swarm: Swarm, num_keys: int, global_step: Callable[[], int], state: Callable[[], bytes], claims: tuple[str, ...]
    ) -> None:
        super().__init__(swarm, num_keys, global_step, state)
        self._claims = claims
        self.result_of: Callable[[], bytes] = bytes  # called once, when somebody asks
        self._credentials = {key.peer_id: credential_of(swarm, key, 100 + number) for number, key in enumerate(self._keys)}

    def _addresses(self, key: Identity) -> tuple[str, ...]:
        return self._claims if key is self._keys[0] else super()._addresses(key)

    async def _give(self, key: Identity, stream: Stream, request: FetchRequest) -> None:
        self.result = self.result or self.result_of()
        if not self.result or request.kind not in OF_RESULT:
            return await super()._give(key, stream, request)
        result = RunResult.of(memoryview(self.result))
        await give(stream, key, request, result, self.result, self.global_step_of())


async def give(stream: Stream, key: Identity, request: FetchRequest, result: RunResult, content: bytes, global_step: int) -> None:
    """Answer a request for a result, its hashes, its pieces, or whether it is agreed: it always is."""
    whole = {
        ContentsKind.RESULT: content,
        ContentsKind.RESULT_HASHES: result.hashes,
        ContentsKind.RESULT_PIECES: result.held(),
        ContentsKind.RESULT_AGREED: b"",
    }[request.kind]
    part = whole[request.offset : request.offset + request.num_bytes]
    header = Contents(request.kind, len(whole), hashlib.sha256(part).digest(), global_step, result.name)
    await stream.send(header.signed(key, *request.asked))
    if part:
        await stream.send(Chunk(Part.CONTENTS, request.offset, part))
