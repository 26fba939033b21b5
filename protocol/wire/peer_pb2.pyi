from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Phase(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PHASE_TRAIN: _ClassVar[Phase]
    PHASE_FINISH: _ClassVar[Phase]

class RefusalCode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    REFUSAL_UNSPECIFIED: _ClassVar[RefusalCode]
    REFUSAL_BUSY: _ClassVar[RefusalCode]
    REFUSAL_WRONG_RUN: _ClassVar[RefusalCode]
    REFUSAL_WRONG_VERSION: _ClassVar[RefusalCode]
    REFUSAL_NOT_INVITED: _ClassVar[RefusalCode]
    REFUSAL_WRONG_TERMS: _ClassVar[RefusalCode]
    REFUSAL_STEP_TOO_FAR: _ClassVar[RefusalCode]
    REFUSAL_NOT_READY: _ClassVar[RefusalCode]
    REFUSAL_LEAVING: _ClassVar[RefusalCode]
    REFUSAL_BAD_MESSAGE: _ClassVar[RefusalCode]
    REFUSAL_GATE: _ClassVar[RefusalCode]
    REFUSAL_TOO_SLOW: _ClassVar[RefusalCode]
    REFUSAL_WRONG_PHASE: _ClassVar[RefusalCode]
    REFUSAL_NOT_FOUND: _ClassVar[RefusalCode]
    REFUSAL_OTHER: _ClassVar[RefusalCode]

class Part(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PART_UNSPECIFIED: _ClassVar[Part]
    PART_SKETCH: _ClassVar[Part]
    PART_PAYLOAD: _ClassVar[Part]
    PART_CONTENTS: _ClassVar[Part]
    PART_TOKENS: _ClassVar[Part]
    PART_ACTIVATIONS: _ClassVar[Part]
    PART_GRADIENT: _ClassVar[Part]

class ContentsKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    CONTENTS_UNSPECIFIED: _ClassVar[ContentsKind]
    CONTENTS_MANIFEST: _ClassVar[ContentsKind]
    CONTENTS_STATE: _ClassVar[ContentsKind]
    CONTENTS_SLOW: _ClassVar[ContentsKind]
    CONTENTS_RESULT: _ClassVar[ContentsKind]
    CONTENTS_RESULT_HASHES: _ClassVar[ContentsKind]
    CONTENTS_RESULT_PIECES: _ClassVar[ContentsKind]
    CONTENTS_ECHO: _ClassVar[ContentsKind]
    CONTENTS_RUN_CURVE: _ClassVar[ContentsKind]
    CONTENTS_PEER_LIST: _ClassVar[ContentsKind]
    CONTENTS_REVOCATIONS: _ClassVar[ContentsKind]
    CONTENTS_CREDENTIAL: _ClassVar[ContentsKind]
    CONTENTS_RESULT_AGREED: _ClassVar[ContentsKind]

class Notice(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    NOTICE_UNSPECIFIED: _ClassVar[Notice]
    NOTICE_DECLINED: _ClassVar[Notice]
    NOTICE_DELAYED: _ClassVar[Notice]
    NOTICE_KNOWN: _ClassVar[Notice]
    NOTICE_WITHDRAWN: _ClassVar[Notice]
PHASE_TRAIN: Phase
PHASE_FINISH: Phase
REFUSAL_UNSPECIFIED: RefusalCode
REFUSAL_BUSY: RefusalCode
REFUSAL_WRONG_RUN: RefusalCode
REFUSAL_WRONG_VERSION: RefusalCode
REFUSAL_NOT_INVITED: RefusalCode
REFUSAL_WRONG_TERMS: RefusalCode
REFUSAL_STEP_TOO_FAR: RefusalCode
REFUSAL_NOT_READY: RefusalCode
REFUSAL_LEAVING: RefusalCode
REFUSAL_BAD_MESSAGE: RefusalCode
REFUSAL_GATE: RefusalCode
REFUSAL_TOO_SLOW: RefusalCode
REFUSAL_WRONG_PHASE: RefusalCode
REFUSAL_NOT_FOUND: RefusalCode
REFUSAL_OTHER: RefusalCode
PART_UNSPECIFIED: Part
PART_SKETCH: Part
PART_PAYLOAD: Part
PART_CONTENTS: Part
PART_TOKENS: Part
PART_ACTIVATIONS: Part
PART_GRADIENT: Part
CONTENTS_UNSPECIFIED: ContentsKind
CONTENTS_MANIFEST: ContentsKind
CONTENTS_STATE: ContentsKind
CONTENTS_SLOW: ContentsKind
CONTENTS_RESULT: ContentsKind
CONTENTS_RESULT_HASHES: ContentsKind
CONTENTS_RESULT_PIECES: ContentsKind
CONTENTS_ECHO: ContentsKind
CONTENTS_RUN_CURVE: ContentsKind
CONTENTS_PEER_LIST: ContentsKind
CONTENTS_REVOCATIONS: ContentsKind
CONTENTS_CREDENTIAL: ContentsKind
CONTENTS_RESULT_AGREED: ContentsKind
NOTICE_UNSPECIFIED: Notice
NOTICE_DECLINED: Notice
NOTICE_DELAYED: Notice
NOTICE_KNOWN: Notice
NOTICE_WITHDRAWN: Notice

class Frame(_message.Message):
    __slots__ = ("hello", "refusal", "chunk", "commitment", "verdict", "commit", "committed", "resolve", "outcome", "fetch_request", "contents", "lane", "hop_forward", "hop_answer", "hop_notice", "chunk_beside")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    REFUSAL_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    COMMITMENT_FIELD_NUMBER: _ClassVar[int]
    VERDICT_FIELD_NUMBER: _ClassVar[int]
    COMMIT_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_FIELD_NUMBER: _ClassVar[int]
    RESOLVE_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    FETCH_REQUEST_FIELD_NUMBER: _ClassVar[int]
    CONTENTS_FIELD_NUMBER: _ClassVar[int]
    LANE_FIELD_NUMBER: _ClassVar[int]
    HOP_FORWARD_FIELD_NUMBER: _ClassVar[int]
    HOP_ANSWER_FIELD_NUMBER: _ClassVar[int]
    HOP_NOTICE_FIELD_NUMBER: _ClassVar[int]
    CHUNK_BESIDE_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    refusal: Refusal
    chunk: Chunk
    commitment: Commitment
    verdict: Verdict
    commit: Commit
    committed: Committed
    resolve: Resolve
    outcome: Outcome
    fetch_request: FetchRequest
    contents: Contents
    lane: Lane
    hop_forward: HopForward
    hop_answer: HopAnswer
    hop_notice: HopNotice
    chunk_beside: ChunkBeside
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., refusal: _Optional[_Union[Refusal, _Mapping]] = ..., chunk: _Optional[_Union[Chunk, _Mapping]] = ..., commitment: _Optional[_Union[Commitment, _Mapping]] = ..., verdict: _Optional[_Union[Verdict, _Mapping]] = ..., commit: _Optional[_Union[Commit, _Mapping]] = ..., committed: _Optional[_Union[Committed, _Mapping]] = ..., resolve: _Optional[_Union[Resolve, _Mapping]] = ..., outcome: _Optional[_Union[Outcome, _Mapping]] = ..., fetch_request: _Optional[_Union[FetchRequest, _Mapping]] = ..., contents: _Optional[_Union[Contents, _Mapping]] = ..., lane: _Optional[_Union[Lane, _Mapping]] = ..., hop_forward: _Optional[_Union[HopForward, _Mapping]] = ..., hop_answer: _Optional[_Union[HopAnswer, _Mapping]] = ..., hop_notice: _Optional[_Union[HopNotice, _Mapping]] = ..., chunk_beside: _Optional[_Union[ChunkBeside, _Mapping]] = ...) -> None: ...

class Credential(_message.Message):
    __slots__ = ("issuer", "subject", "bearer", "not_after_s", "bootstraps_sha256", "signature", "bearer_signature")
    ISSUER_FIELD_NUMBER: _ClassVar[int]
    SUBJECT_FIELD_NUMBER: _ClassVar[int]
    BEARER_FIELD_NUMBER: _ClassVar[int]
    NOT_AFTER_S_FIELD_NUMBER: _ClassVar[int]
    BOOTSTRAPS_SHA256_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    BEARER_SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    issuer: bytes
    subject: bytes
    bearer: bytes
    not_after_s: int
    bootstraps_sha256: bytes
    signature: bytes
    bearer_signature: bytes
    def __init__(self, issuer: _Optional[bytes] = ..., subject: _Optional[bytes] = ..., bearer: _Optional[bytes] = ..., not_after_s: _Optional[int] = ..., bootstraps_sha256: _Optional[bytes] = ..., signature: _Optional[bytes] = ..., bearer_signature: _Optional[bytes] = ...) -> None: ...

class Opening(_message.Message):
    __slots__ = ("protocol_version", "run_id", "sender", "receiver", "nonce", "partner_nonce", "stage", "credential", "records")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    SENDER_FIELD_NUMBER: _ClassVar[int]
    RECEIVER_FIELD_NUMBER: _ClassVar[int]
    NONCE_FIELD_NUMBER: _ClassVar[int]
    PARTNER_NONCE_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    CREDENTIAL_FIELD_NUMBER: _ClassVar[int]
    RECORDS_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    run_id: bytes
    sender: bytes
    receiver: bytes
    nonce: bytes
    partner_nonce: bytes
    stage: int
    credential: Credential
    records: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, protocol_version: _Optional[int] = ..., run_id: _Optional[bytes] = ..., sender: _Optional[bytes] = ..., receiver: _Optional[bytes] = ..., nonce: _Optional[bytes] = ..., partner_nonce: _Optional[bytes] = ..., stage: _Optional[int] = ..., credential: _Optional[_Union[Credential, _Mapping]] = ..., records: _Optional[_Iterable[bytes]] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("opening", "fragment", "codec", "tokens", "global_step", "sketch_bytes", "payload_bytes", "phase", "own_steps", "signature")
    OPENING_FIELD_NUMBER: _ClassVar[int]
    FRAGMENT_FIELD_NUMBER: _ClassVar[int]
    CODEC_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    GLOBAL_STEP_FIELD_NUMBER: _ClassVar[int]
    SKETCH_BYTES_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_BYTES_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    OWN_STEPS_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    opening: Opening
    fragment: int
    codec: int
    tokens: int
    global_step: int
    sketch_bytes: int
    payload_bytes: int
    phase: Phase
    own_steps: int
    signature: bytes
    def __init__(self, opening: _Optional[_Union[Opening, _Mapping]] = ..., fragment: _Optional[int] = ..., codec: _Optional[int] = ..., tokens: _Optional[int] = ..., global_step: _Optional[int] = ..., sketch_bytes: _Optional[int] = ..., payload_bytes: _Optional[int] = ..., phase: _Optional[_Union[Phase, str]] = ..., own_steps: _Optional[int] = ..., signature: _Optional[bytes] = ...) -> None: ...

class Refusal(_message.Message):
    __slots__ = ("code", "detail")
    CODE_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    code: RefusalCode
    detail: str
    def __init__(self, code: _Optional[_Union[RefusalCode, str]] = ..., detail: _Optional[str] = ...) -> None: ...

class Chunk(_message.Message):
    __slots__ = ("part", "offset", "data")
    PART_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    part: Part
    offset: int
    data: bytes
    def __init__(self, part: _Optional[_Union[Part, str]] = ..., offset: _Optional[int] = ..., data: _Optional[bytes] = ...) -> None: ...

class ChunkBeside(_message.Message):
    __slots__ = ("part", "offset", "num_bytes")
    PART_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    part: Part
    offset: int
    num_bytes: int
    def __init__(self, part: _Optional[_Union[Part, str]] = ..., offset: _Optional[int] = ..., num_bytes: _Optional[int] = ...) -> None: ...

class Commitment(_message.Message):
    __slots__ = ("meeting_id", "sha256", "signature")
    MEETING_ID_FIELD_NUMBER: _ClassVar[int]
    SHA256_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    meeting_id: bytes
    sha256: bytes
    signature: bytes
    def __init__(self, meeting_id: _Optional[bytes] = ..., sha256: _Optional[bytes] = ..., signature: _Optional[bytes] = ...) -> None: ...

class Verdict(_message.Message):
    __slots__ = ("meeting_id", "failed_blocks")
    MEETING_ID_FIELD_NUMBER: _ClassVar[int]
    FAILED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    meeting_id: bytes
    failed_blocks: bytes
    def __init__(self, meeting_id: _Optional[bytes] = ..., failed_blocks: _Optional[bytes] = ...) -> None: ...

class Commit(_message.Message):
    __slots__ = ("meeting_id", "failed_blocks")
    MEETING_ID_FIELD_NUMBER: _ClassVar[int]
    FAILED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    meeting_id: bytes
    failed_blocks: bytes
    def __init__(self, meeting_id: _Optional[bytes] = ..., failed_blocks: _Optional[bytes] = ...) -> None: ...

class Committed(_message.Message):
    __slots__ = ("meeting_id",)
    MEETING_ID_FIELD_NUMBER: _ClassVar[int]
    meeting_id: bytes
    def __init__(self, meeting_id: _Optional[bytes] = ...) -> None: ...

class Resolve(_message.Message):
    __slots__ = ("run_id", "meeting_id")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    MEETING_ID_FIELD_NUMBER: _ClassVar[int]
    run_id: bytes
    meeting_id: bytes
    def __init__(self, run_id: _Optional[bytes] = ..., meeting_id: _Optional[bytes] = ...) -> None: ...

class Outcome(_message.Message):
    __slots__ = ("meeting_id", "is_committed", "failed_blocks")
    MEETING_ID_FIELD_NUMBER: _ClassVar[int]
    IS_COMMITTED_FIELD_NUMBER: _ClassVar[int]
    FAILED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    meeting_id: bytes
    is_committed: bool
    failed_blocks: bytes
    def __init__(self, meeting_id: _Optional[bytes] = ..., is_committed: _Optional[bool] = ..., failed_blocks: _Optional[bytes] = ...) -> None: ...

class FetchRequest(_message.Message):
    __slots__ = ("opening", "kind", "offset", "num_bytes", "fragment", "signature")
    OPENING_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    FRAGMENT_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    opening: Opening
    kind: ContentsKind
    offset: int
    num_bytes: int
    fragment: int
    signature: bytes
    def __init__(self, opening: _Optional[_Union[Opening, _Mapping]] = ..., kind: _Optional[_Union[ContentsKind, str]] = ..., offset: _Optional[int] = ..., num_bytes: _Optional[int] = ..., fragment: _Optional[int] = ..., signature: _Optional[bytes] = ...) -> None: ...

class Contents(_message.Message):
    __slots__ = ("kind", "total_bytes", "sha256", "global_step", "name", "signature")
    KIND_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    SHA256_FIELD_NUMBER: _ClassVar[int]
    GLOBAL_STEP_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    kind: ContentsKind
    total_bytes: int
    sha256: bytes
    global_step: int
    name: bytes
    signature: bytes
    def __init__(self, kind: _Optional[_Union[ContentsKind, str]] = ..., total_bytes: _Optional[int] = ..., sha256: _Optional[bytes] = ..., global_step: _Optional[int] = ..., name: _Optional[bytes] = ..., signature: _Optional[bytes] = ...) -> None: ...

class MemberFigures(_message.Message):
    __slots__ = ("own_steps", "loss_milli", "joined_s", "carried_mb")
    OWN_STEPS_FIELD_NUMBER: _ClassVar[int]
    LOSS_MILLI_FIELD_NUMBER: _ClassVar[int]
    JOINED_S_FIELD_NUMBER: _ClassVar[int]
    CARRIED_MB_FIELD_NUMBER: _ClassVar[int]
    own_steps: int
    loss_milli: int
    joined_s: int
    carried_mb: int
    def __init__(self, own_steps: _Optional[int] = ..., loss_milli: _Optional[int] = ..., joined_s: _Optional[int] = ..., carried_mb: _Optional[int] = ...) -> None: ...

class MemberRecord(_message.Message):
    __slots__ = ("run_id", "peer_id", "addresses", "global_step", "finished", "sequence", "expires_s", "credential", "paused", "tokens", "release", "signature", "figures", "stage")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    PEER_ID_FIELD_NUMBER: _ClassVar[int]
    ADDRESSES_FIELD_NUMBER: _ClassVar[int]
    GLOBAL_STEP_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_S_FIELD_NUMBER: _ClassVar[int]
    CREDENTIAL_FIELD_NUMBER: _ClassVar[int]
    PAUSED_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    RELEASE_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    FIGURES_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    run_id: bytes
    peer_id: bytes
    addresses: _containers.RepeatedScalarFieldContainer[str]
    global_step: int
    finished: bool
    sequence: int
    expires_s: int
    credential: Credential
    paused: bool
    tokens: int
    release: int
    signature: bytes
    figures: MemberFigures
    stage: int
    def __init__(self, run_id: _Optional[bytes] = ..., peer_id: _Optional[bytes] = ..., addresses: _Optional[_Iterable[str]] = ..., global_step: _Optional[int] = ..., finished: _Optional[bool] = ..., sequence: _Optional[int] = ..., expires_s: _Optional[int] = ..., credential: _Optional[_Union[Credential, _Mapping]] = ..., paused: _Optional[bool] = ..., tokens: _Optional[int] = ..., release: _Optional[int] = ..., signature: _Optional[bytes] = ..., figures: _Optional[_Union[MemberFigures, _Mapping]] = ..., stage: _Optional[int] = ...) -> None: ...

class Lane(_message.Message):
    __slots__ = ("opening", "global_step", "phase", "window", "signature")
    OPENING_FIELD_NUMBER: _ClassVar[int]
    GLOBAL_STEP_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    WINDOW_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    opening: Opening
    global_step: int
    phase: Phase
    window: int
    signature: bytes
    def __init__(self, opening: _Optional[_Union[Opening, _Mapping]] = ..., global_step: _Optional[int] = ..., phase: _Optional[_Union[Phase, str]] = ..., window: _Optional[int] = ..., signature: _Optional[bytes] = ...) -> None: ...

class HopForward(_message.Message):
    __slots__ = ("number", "micro_batch", "measure", "global_step")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    MICRO_BATCH_FIELD_NUMBER: _ClassVar[int]
    MEASURE_FIELD_NUMBER: _ClassVar[int]
    GLOBAL_STEP_FIELD_NUMBER: _ClassVar[int]
    number: int
    micro_batch: bytes
    measure: bool
    global_step: int
    def __init__(self, number: _Optional[int] = ..., micro_batch: _Optional[bytes] = ..., measure: _Optional[bool] = ..., global_step: _Optional[int] = ...) -> None: ...

class HopAnswer(_message.Message):
    __slots__ = ("number", "loss", "window", "global_step")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    LOSS_FIELD_NUMBER: _ClassVar[int]
    WINDOW_FIELD_NUMBER: _ClassVar[int]
    GLOBAL_STEP_FIELD_NUMBER: _ClassVar[int]
    number: int
    loss: float
    window: int
    global_step: int
    def __init__(self, number: _Optional[int] = ..., loss: _Optional[float] = ..., window: _Optional[int] = ..., global_step: _Optional[int] = ...) -> None: ...

class HopNotice(_message.Message):
    __slots__ = ("number", "notice")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    NOTICE_FIELD_NUMBER: _ClassVar[int]
    number: int
    notice: Notice
    def __init__(self, number: _Optional[int] = ..., notice: _Optional[_Union[Notice, str]] = ...) -> None: ...

class Invite(_message.Message):
    __slots__ = ("run_id", "issuer", "subject", "bearer_seed", "not_after_s", "bootstraps", "signature")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    ISSUER_FIELD_NUMBER: _ClassVar[int]
    SUBJECT_FIELD_NUMBER: _ClassVar[int]
    BEARER_SEED_FIELD_NUMBER: _ClassVar[int]
    NOT_AFTER_S_FIELD_NUMBER: _ClassVar[int]
    BOOTSTRAPS_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    run_id: bytes
    issuer: bytes
    subject: bytes
    bearer_seed: bytes
    not_after_s: int
    bootstraps: _containers.RepeatedScalarFieldContainer[str]
    signature: bytes
    def __init__(self, run_id: _Optional[bytes] = ..., issuer: _Optional[bytes] = ..., subject: _Optional[bytes] = ..., bearer_seed: _Optional[bytes] = ..., not_after_s: _Optional[int] = ..., bootstraps: _Optional[_Iterable[str]] = ..., signature: _Optional[bytes] = ...) -> None: ...

class PeerList(_message.Message):
    __slots__ = ("members", "unix_ms", "observed")
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    OBSERVED_FIELD_NUMBER: _ClassVar[int]
    members: _containers.RepeatedScalarFieldContainer[bytes]
    unix_ms: int
    observed: str
    def __init__(self, members: _Optional[_Iterable[bytes]] = ..., unix_ms: _Optional[int] = ..., observed: _Optional[str] = ...) -> None: ...

class RunCurve(_message.Message):
    __slots__ = ("times_s", "steps", "losses_milli", "lows_milli", "highs_milli", "lives", "trained")
    TIMES_S_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    LOSSES_MILLI_FIELD_NUMBER: _ClassVar[int]
    LOWS_MILLI_FIELD_NUMBER: _ClassVar[int]
    HIGHS_MILLI_FIELD_NUMBER: _ClassVar[int]
    LIVES_FIELD_NUMBER: _ClassVar[int]
    TRAINED_FIELD_NUMBER: _ClassVar[int]
    times_s: _containers.RepeatedScalarFieldContainer[int]
    steps: _containers.RepeatedScalarFieldContainer[int]
    losses_milli: _containers.RepeatedScalarFieldContainer[int]
    lows_milli: _containers.RepeatedScalarFieldContainer[int]
    highs_milli: _containers.RepeatedScalarFieldContainer[int]
    lives: _containers.RepeatedScalarFieldContainer[int]
    trained: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, times_s: _Optional[_Iterable[int]] = ..., steps: _Optional[_Iterable[int]] = ..., losses_milli: _Optional[_Iterable[int]] = ..., lows_milli: _Optional[_Iterable[int]] = ..., highs_milli: _Optional[_Iterable[int]] = ..., lives: _Optional[_Iterable[int]] = ..., trained: _Optional[_Iterable[int]] = ...) -> None: ...

class Revocation(_message.Message):
    __slots__ = ("run_id", "issuer", "revoked", "revoked_s", "signature")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    ISSUER_FIELD_NUMBER: _ClassVar[int]
    REVOKED_FIELD_NUMBER: _ClassVar[int]
    REVOKED_S_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    run_id: bytes
    issuer: bytes
    revoked: bytes
    revoked_s: int
    signature: bytes
    def __init__(self, run_id: _Optional[bytes] = ..., issuer: _Optional[bytes] = ..., revoked: _Optional[bytes] = ..., revoked_s: _Optional[int] = ..., signature: _Optional[bytes] = ...) -> None: ...

class Revocations(_message.Message):
    __slots__ = ("revocations",)
    REVOCATIONS_FIELD_NUMBER: _ClassVar[int]
    revocations: _containers.RepeatedCompositeFieldContainer[Revocation]
    def __init__(self, revocations: _Optional[_Iterable[_Union[Revocation, _Mapping]]] = ...) -> None: ...

class SignedManifest(_message.Message):
    __slots__ = ("canonical", "host", "signature")
    CANONICAL_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    canonical: bytes
    host: bytes
    signature: bytes
    def __init__(self, canonical: _Optional[bytes] = ..., host: _Optional[bytes] = ..., signature: _Optional[bytes] = ...) -> None: ...
