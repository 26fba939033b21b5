"""Encode messages as protobuf frames and decode them. `from_frame` is the first code that handles bytes of an untrusted peer.

A newer peer may add optional fields, which are dropped, and message types and contents kinds, which raise Refused. Any other encoding that
protobuf tolerates raises BadMessage.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Final, TypeVar, get_args

from google.protobuf.message import DecodeError
from google.protobuf.message import Message as Wire

from gossamer.protocol import limits
from gossamer.protocol.errors import BadMessage, RefusalCode, Refused
from gossamer.protocol.identity import PeerId, Signed
from gossamer.protocol.messages.figures import MemberFigures
from gossamer.protocol.messages.messages import Chunk, Commit, ContentsKind, Message, NoticeKind, Opening, Outcome, Part, RunPhase, Verdict
from gossamer.protocol.run.invite import Credential
from gossamer.protocol.wire import peer_pb2

V = TypeVar("V")

BODIES: Final[dict[str, type[Message]]] = {re.sub(r"\B[A-Z]", r"_\g<0>", kind.__name__).lower(): kind for kind in get_args(Message)}
"""Message types by the name of their field in Frame: the type's name in snake case."""
_BODY_OF: Final = {kind: name for name, kind in BODIES.items()}
_CODES: Final = frozenset(RefusalCode)
_PARTS: Final[dict[str, type[limits.Bounded]]] = {"credential": Credential, "figures": MemberFigures}  # optional messages within others
_LARGE: Final = (Chunk, Verdict, Commit, Outcome)  # messages with bulk data or a bitmap


def to_frame(message: Message) -> bytes:
    """Encode a message as a frame. Raises BadMessage if the message is unsigned or too large."""
    need_signed(message)
    frame = peer_pb2.Frame()
    fill(getattr(frame, _BODY_OF[type(message)]), message)
    data = frame.SerializeToString()
    _need_size(message, len(data))
    return data


def from_frame(data: bytes) -> Message:
    """Decode and validate a frame. Raises BadMessage, or Refused for a message type that only a newer release knows."""
    if len(data) > limits.FRAME_BYTES:
        raise BadMessage(f"a frame of {len(data)} bytes; at most {limits.FRAME_BYTES} are read")
    frame = peer_pb2.Frame()
    parse(frame, data)
    body = frame.WhichOneof("body")
    if body is None and data:
        raise Refused(RefusalCode.OTHER, "unknown message type")
    if body is None:
        raise BadMessage("an empty frame")
    message: Message = from_wire(BODIES[body], getattr(frame, body))
    _need_size(message, len(data))
    need_signed(message)
    return message


def parse(wire: Wire, data: bytes) -> None:
    """Parse `data` into an empty protobuf message. Raises BadMessage, also for non-canonical encodings that protobuf accepts."""
    try:
        wire.ParseFromString(data)
    except DecodeError as error:
        raise BadMessage(f"not a {wire.DESCRIPTOR.name}: {error}") from None
    if wire.ByteSize() != len(data):  # the parser dropped or merged bytes, which are therefore unchecked
        raise BadMessage(f"a {wire.DESCRIPTOR.name} of {len(data)} bytes re-encodes to {wire.ByteSize()} bytes")


def fill(wire: Wire, value: limits.Bounded) -> None:
    """Copy the fields of a message, record or credential into its protobuf message, in place. Bulk data is copied once."""
    wire.SetInParent()  # makes a message present even if all its fields are zero
    for name in limits.field_names(type(value)):
        match getattr(value, name):
            case None:
                pass
            case PeerId() as peer:
                setattr(wire, name, peer.raw)
            case limits.Bounded() as part:
                fill(getattr(wire, name), part)
            case tuple() as items:
                getattr(wire, name).extend(items)
            case plain:
                setattr(wire, name, plain)


def _refusal_code(number: int) -> RefusalCode:
    return RefusalCode(number) if number in _CODES or not number else RefusalCode.OTHER  # type: ignore[call-arg]  # a look-up


def _contents_kind(number: int) -> ContentsKind:
    if number > max(ContentsKind):
        raise Refused(RefusalCode.OTHER, "unknown contents kind")
    return ContentsKind(number)


# Conversions from the protobuf value, by field name: a name means the same in every message. Other fields are copied unchanged.
_READ: Final[dict[str, Callable[[Any], object]]] = {
    **dict.fromkeys(("issuer", "revoked", "peer_id", "sender", "receiver"), PeerId),
    **dict.fromkeys(("subject", "bearer"), lambda raw: PeerId(raw) if raw else None),
    **dict.fromkeys(("records", "members", "addresses", *limits.CURVE_FIELDS), tuple),
    "phase": RunPhase,
    "part": Part,
    "notice": NoticeKind,
    "code": _refusal_code,
    "kind": _contents_kind,
    "opening": lambda wire: from_wire(Opening, wire),
}


def write_unframed(value: limits.Bounded) -> bytes:
    """Encode a value outside a frame, as the protobuf message of the same name."""
    wire: Wire = getattr(peer_pb2, type(value).__name__)()
    fill(wire, value)
    return wire.SerializeToString()


def read_unframed(kind: type[V], data: bytes, name: str, most_bytes: int) -> V:
    """Decode what `write_unframed` wrote, called `name` in errors. Raises BadMessage if it is invalid or too large; checks no signature."""
    limits.need_count(f"size of {name}", len(data), most_bytes)
    wire: Wire = getattr(peer_pb2, kind.__name__)()
    parse(wire, data)
    read: V = from_wire(kind, wire)
    return read


def from_wire(kind: type[Any], wire: Any) -> Any:
    """Convert a protobuf message into a validated `kind`. Raises BadMessage."""
    values = {}
    for name in limits.field_names(kind):
        if name in _PARTS:
            values[name] = from_wire(_PARTS[name], getattr(wire, name)) if wire.HasField(name) else None
        else:
            value = getattr(wire, name)
            try:
                values[name] = _READ[name](value) if name in _READ else value
            except ValueError as error:  # "99 is not a valid Part"
                raise BadMessage(str(error)) from None
    return kind(**values)


def _need_size(message: Message, num_bytes: int) -> None:
    most = limits.FRAME_BYTES if isinstance(message, _LARGE) else limits.SMALL_FRAME_BYTES
    if num_bytes > most:
        raise BadMessage(f"a {type(message).__name__} of {num_bytes} bytes; at most {most} are read")


def need_signed(message: object) -> None:
    """Raise BadMessage if a message, or a part of it, lacks a signature. The signature itself is not checked."""
    if isinstance(message, Signed) and not message.is_complete:
        raise BadMessage(f"a {type(message).__name__} without a signature")
    for name in ("opening", *_PARTS):
        if (part := getattr(message, name, None)) is not None:
            need_signed(part)
