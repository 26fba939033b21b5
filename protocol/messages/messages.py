"""The messages of peer.proto as frozen dataclasses. Each constructor raises BadMessage for invalid lengths, counts and enums."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum

from gossamer.protocol import limits
from gossamer.protocol.errors import BadMessage, PeerMisbehaved, RefusalCode, Refused, printable
from gossamer.protocol.identity import PeerId, Signed
from gossamer.protocol.limits import Bounded
from gossamer.protocol.run.invite import Credential


class RunPhase(IntEnum):
    """The phase of the run for one peer, which determines the purpose of its meetings."""

    TRAIN = 0  # a meeting during training
    FINISH = 1  # after the last step: the pair averages its fast weights


class Part(IntEnum):
    """The part of a meeting or reply that a chunk belongs to."""

    SKETCH = 1
    PAYLOAD = 2
    CONTENTS = 3
    TOKENS = 4
    ACTIVATIONS = 5
    GRADIENT = 6


@dataclass(frozen=True, slots=True)
class Opening(Bounded):
    """What Hello, Lane and FetchRequest have in common. Their signatures cover it."""

    protocol_version: int  # of the sender
    run_id: bytes  # 32 bytes
    sender: PeerId  # the signer
    receiver: PeerId  # prevents replay to another peer
    nonce: bytes  # 16 random bytes of the sender
    partner_nonce: bytes = b""  # empty from the side that opens the stream; in its answer, the nonce of that side
    stage: int = 0  # in a staged run: the stage whose weights it is about, or of a Lane's sender, plus one
    credential: Credential | None = None  # set in invite runs
    records: tuple[bytes, ...] = ()  # at most 3 member records as their peers signed them, including the sender's own


@dataclass(frozen=True, slots=True)
class Hello(Signed):
    """The first frame of a meeting from each side. The two signatures cover one fresh pair of nonces."""

    CONTEXT = b"gossamer/hello/1"

    opening: Opening
    fragment: int  # id
    codec: int  # wire id
    tokens: int  # trained since the sender's last outer step of this fragment
    global_step: int  # the sender's global step
    sketch_bytes: int  # size of the sketch that the sender will send
    payload_bytes: int  # size of the payload that the sender will send
    phase: RunPhase  # training, or averaging after the last step
    own_steps: int = 0  # inner steps that the sender has made in this run
    signature: bytes = b""  # the sender's, over the fields above


@dataclass(frozen=True, slots=True)
class Refusal(Bounded):
    """A refusal with its reason."""

    code: RefusalCode  # machine-readable reason
    detail: str = ""  # one line, for the log only

    def __post_init__(self) -> None:
        Bounded.__post_init__(self)
        object.__setattr__(self, "detail", printable(self.detail))


def refusal_of(error: Refused | PeerMisbehaved) -> Refusal:
    """Return the refusal to send for an error: its own code if it is Refused, BAD_MESSAGE for a protocol violation."""
    code, detail = (error.code, error.detail) if isinstance(error, Refused) else (RefusalCode.BAD_MESSAGE, str(error))
    return Refusal(code, detail[: limits.REFUSAL_DETAIL_CHARS])


@dataclass(frozen=True, slots=True)
class Chunk(Bounded):
    """A contiguous range of bytes. A side sends each part once, in order and without gaps."""

    part: Part
    offset: int  # of the first byte within the part
    data: bytes  # 1 byte to 256 KiB

    def __post_init__(self) -> None:
        Bounded.__post_init__(self)
        _need_chunk(len(self.data))


@dataclass(frozen=True, slots=True)
class ChunkBeside(Bounded):
    """A Chunk whose bytes come over the bulk stream. `Stream.receive` returns it as a Chunk."""

    part: Part
    offset: int  # of the first byte within the part
    num_bytes: int  # 1 byte to 256 KiB

    def __post_init__(self) -> None:
        Bounded.__post_init__(self)
        _need_chunk(self.num_bytes)


def _need_chunk(num_bytes: int) -> None:
    if not 1 <= num_bytes <= limits.CHUNK_BYTES:
        raise BadMessage(f"a chunk carries {num_bytes} bytes, outside 1 to {limits.CHUNK_BYTES}")


def chunks(part: Part, data: memoryview, first: int = 0) -> Iterator[Chunk]:
    """Cut bytes into chunks in their order; `first` is where the first byte lies in the part."""
    for offset in range(0, len(data), limits.CHUNK_BYTES):
        yield Chunk(part, first + offset, bytes(data[offset : offset + limits.CHUNK_BYTES]))


@dataclass(frozen=True, slots=True)
class Commitment(Signed):
    """Commits the sender to its payload before it sees the partner's, and to both sketches."""

    CONTEXT = b"gossamer/commitment/1"

    meeting_id: bytes  # 16 bytes, derived from run, fragment and both nonces
    sha256: bytes  # 32 bytes; the sender's `exchange_digest`
    signature: bytes = b""  # the sender's, over the fields above


def exchange_digest(own_sketch: bytes, partner_sketch: bytes, payload: bytes) -> bytes:
    """Return the SHA-256 over three digests. It covers both sketches: with a corrupted one, the peers would merge different values."""
    return hashlib.sha256(own_sketch + partner_sketch + payload).digest()


@dataclass(frozen=True, slots=True)
class Verdict(Bounded):
    """The receiver has the whole payload and accepts it except for the failed blocks, for which both sides step alone."""

    meeting_id: bytes  # 16 bytes
    failed_blocks: bytes = b""  # bitmap, one bit a block, lowest bit first; empty: none failed


@dataclass(frozen=True, slots=True)
class Commit(Bounded):
    """The initiator's decision, sent after both verdicts. From this point the meeting counts."""

    meeting_id: bytes  # 16 bytes
    failed_blocks: bytes = b""  # the union of both verdicts


@dataclass(frozen=True, slots=True)
class Committed(Bounded):
    """The responder has recorded the decision."""

    meeting_id: bytes  # 16 bytes


@dataclass(frozen=True, slots=True)
class Resolve(Bounded):
    """A request for the outcome of a meeting, from a responder that lost the stream between its verdict and the decision."""

    run_id: bytes  # 32 bytes
    meeting_id: bytes  # 16 bytes


@dataclass(frozen=True, slots=True)
class Outcome(Bounded):
    """The initiator's answer to Resolve."""

    meeting_id: bytes  # 16 bytes
    is_committed: bool  # the meeting counts; an initiator that has no trace of it has dropped it
    failed_blocks: bytes = b""  # as in Commit, if committed


class ContentsKind(IntEnum):
    """What a peer can request from another."""

    MANIFEST = 1  # the signed manifest
    STATE = 2  # slow weights of every fragment in order, bf16; then the momentum, bf16, if the run has momentum
    SLOW = 3  # the slow weights of a fragment, coded against the requester's sketch: sketch and payload, as in a meeting
    RESULT = 4  # the final state on which all peers agree, byte for byte
    ECHO = 5  # the bytes of the chunk that follows the request
    RUN_CURVE = 6  # what the source itself has seen of the run
    RESULT_HASHES = 7  # the concatenated SHA-256 digests of the result's pieces
    RESULT_PIECES = 8  # bitmap of the result's pieces that the source has, lowest bit first; empty if it has none
    PEER_LIST = 9  # peer exchange: records of members; the requester's observed address
    REVOCATIONS = 10  # the revocations that the source knows
    CREDENTIAL = 11  # the requester's credential in its own name, until it is revoked, from its issuer
    RESULT_AGREED = 12  # no bytes; the header names the result that the source has seen agreed, and of which it has all pieces


@dataclass(frozen=True, slots=True)
class FetchRequest(Signed):
    """A request for a byte range of some contents. Another request may follow before the reply arrives."""

    CONTEXT = b"gossamer/fetch-request/1"

    opening: Opening
    kind: ContentsKind
    offset: int  # first requested byte
    num_bytes: int  # number of requested bytes, at most one chunk; 0: only the header
    fragment: int = 0  # for SLOW: the fragment id; the whole of it is requested, and the requester's sketch follows the request
    signature: bytes = b""  # the sender's, over the fields above

    @property
    def asked(self) -> tuple[bytes, ...]:
        """Return the fields of the request that the signature of a reply also covers."""
        opening = self.opening
        return opening.run_id, opening.sender.raw, opening.receiver.raw, opening.nonce


@dataclass(frozen=True, slots=True)
class Contents(Signed):
    """The header of the reply to a FetchRequest. Chunks with the requested bytes follow, unless there are none."""

    CONTEXT = b"gossamer/contents/1"

    kind: ContentsKind  # as requested
    total_bytes: int  # size of the whole contents
    sha256: bytes  # 32 bytes; SHA-256 of the requested part
    global_step: int = 0  # for a state: the source's global step
    name: bytes = b""  # SHA-256 of a result's concatenated piece hashes, empty if there is none; or of all revocations; else empty
    signature: bytes = b""  # the source's, over `FetchRequest.asked` and the fields above

    def need_size(self, num_bytes: int) -> None:
        """Raise BadMessage for a state of another size than the manifest implies."""
        if self.total_bytes != num_bytes:
            raise BadMessage(f"a state of {self.total_bytes} bytes; the manifest implies {num_bytes}")


@dataclass(frozen=True, slots=True)
class Lane(Signed):
    """The first frame of a lane from each side. The senders hold neighbouring stages; the signatures cover one fresh pair of nonces."""

    CONTEXT = b"gossamer/lane/1"

    opening: Opening
    global_step: int  # the sender's global step
    phase: RunPhase
    window: int  # from the higher stage: hops that it accepts at once; 0 from the lower stage
    signature: bytes = b""  # the sender's, over the fields above


@dataclass(frozen=True, slots=True)
class HopForward(Bounded):
    """A micro-batch for the next stage. Chunks of its tokens, then of its activations follow."""

    number: int  # of the hop on this lane, counted from 1 by the lower stage
    micro_batch: bytes  # 16 random bytes: its name at every stage
    measure: bool  # of held-out text: forward only, the loss is the answer
    global_step: int  # the sender's global step


@dataclass(frozen=True, slots=True)
class HopAnswer(Bounded):
    """The answer to a HopForward. Chunks of the gradient of its activations follow, unless the hop only measures."""

    number: int  # as in the HopForward
    loss: float  # nats per token, at the last stage; at most 1000
    window: int  # hops that the sender accepts at once, from now on
    global_step: int  # the sender's global step

    def __post_init__(self) -> None:
        Bounded.__post_init__(self)
        if not 0 <= self.loss <= limits.LOSS:  # false for NaN
            raise BadMessage(f"a loss of {self.loss}")


class NoticeKind(IntEnum):
    """What happens to a hop before its answer."""

    DECLINED = 1  # from the higher stage: it is not carried out
    DELAYED = 2  # from the higher stage: it has sent the hop to another holder, and needs as long again
    KNOWN = 4  # from the higher stage: declined, because it has or may have added this micro-batch already
    WITHDRAWN = 3  # from the lower stage: the answer is not wanted any more; the rest of its bytes do not follow


@dataclass(frozen=True, slots=True)
class HopNotice(Bounded):
    """A notice about a hop. It may come between the chunks of another hop."""

    number: int  # as in the HopForward
    notice: NoticeKind


Message = (
    Hello
    | Refusal
    | Chunk
    | Commitment
    | Verdict
    | Commit
    | Committed
    | Resolve
    | Outcome
    | FetchRequest
    | Contents
    | Lane
    | HopForward
    | HopAnswer
    | HopNotice
    | ChunkBeside
)
"""Every message type that a frame can contain."""
