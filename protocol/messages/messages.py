"""The messages of peer.proto as frozen values that cannot hold a wrong length, count or enum.

Every value checks itself when it is made and raises BadMessage, so a message that exists is well formed, whoever made it;
`frames.py` turns it into bytes and back. What a message must say in a given run is checked in `terms.py`. Not here: any state,
clock or socket.

A signature covers a context string that names the kind and version of the message, and every field but itself, each with its
length in front (`identity.signable`). Protobuf fields that this build does not know are neither signed nor kept: a change that
matters to an older peer raises the protocol version.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from enum import IntEnum

from gossamer.protocol import limits
from gossamer.protocol.errors import BadMessage, PeerMisbehaved, RefusalCode, Refused
from gossamer.protocol.identity import PeerId, Signed
from gossamer.protocol.limits import Bounded
from gossamer.protocol.run.invite import Credential


class RunPhase(IntEnum):
    """How far the run has come for a peer, and so what its meetings are for."""

    TRAIN = 0  # an ordinary meeting
    FINISH = 1  # after the last step: the pair averages its fast weights


class Part(IntEnum):
    """What the bytes of a chunk belong to."""

    SKETCH = 1
    PAYLOAD = 2
    CONTENTS = 3


class Decision(IntEnum):
    """What became of a meeting."""

    UNKNOWN = 0
    COMMITTED = 1
    DROPPED = 2


@dataclass(frozen=True, slots=True)
class Hello(Signed):
    """First frame of a meeting, from each side; the two signatures bind one fresh pair of nonces."""

    CONTEXT = b"gossamer/hello/1"

    protocol_version: int  # of the sender
    run_id: bytes  # 32 bytes
    sender: PeerId  # who signs
    receiver: PeerId  # whom it is meant for, so that it cannot be passed on
    nonce: bytes  # 16 random bytes of the sender
    partner_nonce: bytes  # empty from the initiator; the initiator's nonce from the responder
    fragment: int  # id
    codec: int  # wire id
    tokens: int  # trained since the sender's last outer step of this fragment
    clock_steps: int  # the sender's schedule clock
    sketch_bytes: int  # of the sketch that the sender will send
    payload_bytes: int  # of the payload that the sender will send
    phase: RunPhase  # an ordinary meeting, or averaging after the end
    credential: Credential | None  # in invite runs
    records: tuple[bytes, ...]  # at most 3 member records as their peers signed them: the sender's own, and of others
    signature: bytes = b""  # the sender's, over every field above

    def __post_init__(self) -> None:
        Bounded.__post_init__(self)
        limits.need_record_sizes(self.records)


@dataclass(frozen=True, slots=True)
class Refusal(Bounded):
    """No, and why."""

    code: RefusalCode  # what the other side may act on
    detail: str = ""  # one line for the log only

    def __post_init__(self) -> None:
        Bounded.__post_init__(self)
        # It ends on a terminal: no control character of a stranger may.
        object.__setattr__(self, "detail", "".join(char if char.isprintable() else " " for char in self.detail))


def refusal_of(error: Refused | PeerMisbehaved) -> Refusal:
    """Return what the partner is told about an error: that we refuse, or that it broke the rules."""
    code, detail = (error.code, error.detail) if isinstance(error, Refused) else (RefusalCode.BAD_MESSAGE, str(error))
    return Refusal(code, detail[: limits.REFUSAL_DETAIL_CHARS])


@dataclass(frozen=True, slots=True)
class Chunk(Bounded):
    """A run of bytes; a side sends each part once, in order and without gaps."""

    part: Part  # what the bytes belong to
    offset: int  # of the first byte within the part
    data: bytes  # 1 byte to 256 KiB

    def __post_init__(self) -> None:
        Bounded.__post_init__(self)
        if not 1 <= len(self.data) <= limits.CHUNK_BYTES:
            raise BadMessage(f"a chunk carries {len(self.data)} bytes, outside 1 to {limits.CHUNK_BYTES}")


@dataclass(frozen=True, slots=True)
class Commitment(Signed):
    """Binds the sender to its payload before it sees the partner's, and to both sketches.

    The meeting id stands for run, peers and nonces.
    """

    CONTEXT = b"gossamer/commitment/1"

    meeting_id: bytes  # 16 bytes, derived from run, fragment and both nonces
    sha256: bytes  # 32 bytes; `exchange_digest` of what the sender sent and got
    signature: bytes = b""  # the sender's, over the fields above


def exchange_digest(own_sketch: bytes, partner_sketch: bytes, payload: bytes) -> bytes:
    """Name what the sender of a payload sends and has got, each given by its SHA-256.

    With a sketch that was changed on its way two peers would decode different values, and both would merge them.
    """
    return hashlib.sha256(own_sketch + partner_sketch + payload).digest()


@dataclass(frozen=True, slots=True)
class Verdict(Bounded):
    """The whole payload is here and passed, except for these blocks, which both sides take alone."""

    meeting_id: bytes  # 16 bytes
    failed_blocks: bytes = b""  # bitmap, one bit a block, lowest bit first; empty: none failed


@dataclass(frozen=True, slots=True)
class Commit(Bounded):
    """The initiator's decision, sent once it has both verdicts. From here the meeting counts."""

    meeting_id: bytes  # 16 bytes
    failed_blocks: bytes = b""  # the union of both verdicts


@dataclass(frozen=True, slots=True)
class Committed(Bounded):
    """The responder has recorded the decision too."""

    meeting_id: bytes  # 16 bytes


@dataclass(frozen=True, slots=True)
class Resolve(Bounded):
    """What became of this meeting? From a responder that lost the stream between its verdict and the decision."""

    run_id: bytes  # 32 bytes
    meeting_id: bytes  # 16 bytes


@dataclass(frozen=True, slots=True)
class Outcome(Bounded):
    """The initiator's answer to Resolve."""

    meeting_id: bytes  # 16 bytes
    decision: Decision  # UNKNOWN: the initiator has no trace of it, so it did not count
    failed_blocks: bytes = b""  # of a committed meeting: as in Commit


class ContentsKind(IntEnum):
    """What a peer can be asked for."""

    MANIFEST = 1  # the signed manifest
    STATE = 2  # slow weights of every fragment in order, bf16; then momentum likewise, where the run has any
    SLOW = 3  # the slow weights of a fragment, coded against the asker's sketch: sketch and payload, as in a meeting
    RESULT = 4  # the state on which the peers settle at the end of the run, the same bytes at all of them
    SIGHTING = 5  # what the asked peer sees of the asker
    ECHO = 6  # the bytes of a chunk that follows the request
    RESULT_HASHES = 7  # the SHA-256 of each piece of the result, one after the other
    RESULT_PIECES = 8  # which pieces of it the asked peer can give, a bit each, the lowest first; nothing where it has none yet
    INTRODUCTION = 9  # who is there
    REVOCATIONS = 10  # whose credentials count no more
    CREDENTIAL = 11  # the asker's own with a later end, from its issuer


@dataclass(frozen=True, slots=True)
class FetchRequest(Signed):
    """Send me this part of it; another request may follow before the answer has come."""

    CONTEXT = b"gossamer/fetch-request/1"

    protocol_version: int  # of the sender
    run_id: bytes  # 32 bytes
    sender: PeerId  # who asks and signs
    receiver: PeerId  # who is asked
    nonce: bytes  # 16 random bytes of the sender; the answer is signed over them
    kind: ContentsKind  # what is asked for
    offset: int  # of the first byte that is wanted
    num_bytes: int  # wanted, at most a chunk; 0: only the header
    fragment: int  # of SLOW: which; no part of it can be asked for, and the asker's sketch follows the request
    credential: Credential | None  # in invite runs
    records: tuple[bytes, ...] = ()  # at most 3 member records as their peers signed them: the sender's own, and of others
    signature: bytes = b""  # the sender's, over every field above

    def __post_init__(self) -> None:
        Bounded.__post_init__(self)
        limits.need_record_sizes(self.records)

    @property
    def asked(self) -> tuple[bytes, ...]:
        """What the signature of an answer is about."""
        return self.run_id, self.sender.raw, self.receiver.raw, self.nonce


@dataclass(frozen=True, slots=True)
class Contents(Signed):
    """Header of an answer to a FetchRequest; chunks with what was asked for follow, unless that is empty."""

    CONTEXT = b"gossamer/contents/1"

    kind: ContentsKind  # as asked
    total_bytes: int  # of the whole, whatever part was asked for
    sha256: bytes  # 32 bytes; of the part
    clock_steps: int = 0  # of a state: the donor's schedule clock
    name: bytes = (
        b""  # of a result: SHA-256 of its pieces' hashes, or empty where the donor has none; of revocations: of the whole; else empty
    )
    signature: bytes = b""  # the donor's, over what `asked` says and the fields above


Message = Hello | Refusal | Chunk | Commitment | Verdict | Commit | Committed | Resolve | Outcome | FetchRequest | Contents
"""What a frame can carry."""
