"""Messages to bytes and back: the only place where frames meet generated protobuf code.

`from_frame` is what a stranger's bytes meet first. It bounds the size before it parses, returns a message whose every field is
checked (`messages.py`), and raises nothing but BadMessage. Fields carry the same names here and there, and a test holds both
sides of every message together.

Unknown fields are tolerated and dropped, so that a newer peer may add one that an older may ignore. A message or a content of a kind that
this build does not know is refused, and nobody's fault; an unknown refusal is a refusal. Anything else that protobuf forgives (two bodies
in one frame, over-long numbers) is the sender's fault.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, TypeVar, get_args

from google.protobuf.message import DecodeError
from google.protobuf.message import Message as Wire

from gossamer.protocol import limits
from gossamer.protocol.errors import BadMessage, RefusalCode, Refused
from gossamer.protocol.identity import PeerId
from gossamer.protocol.messages.messages import Chunk, Commit, ContentsKind, Decision, Message, Outcome, Part, RunPhase, Verdict
from gossamer.protocol.run.invite import Credential
from gossamer.protocol.wire import peer_pb2

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

V = TypeVar("V")

BODIES: Final[dict[str, type[Message]]] = {re.sub(r"\B[A-Z]", r"_\g<0>", kind.__name__).lower(): kind for kind in get_args(Message)}
"""By the name of the frame's field, which is the message's own in lower case."""
_BODY_OF: Final = {kind: name for name, kind in BODIES.items()}
_CODES: Final = frozenset(RefusalCode)
_LARGE: Final = (Chunk, Verdict, Commit, Outcome)  # they carry data or a bitmap


def to_frame(message: Message) -> bytes:
    """Return the frame that carries this message. Raises BadMessage when it lacks its signature or is too large."""
    need_signed(message)
    frame = peer_pb2.Frame()
    fill(getattr(frame, _BODY_OF[type(message)]), message)
    data = frame.SerializeToString()
    _need_size(message, len(data))
    return data


def from_frame(data: bytes) -> Message:
    """Return the message in a frame. Raises BadMessage, or Refused for what a newer peer may well send, and nothing else."""
    if len(data) > limits.FRAME_BYTES:
        raise BadMessage(f"a frame of {len(data)} bytes; at most {limits.FRAME_BYTES} are read")
    frame = peer_pb2.Frame()
    parse(frame, data)
    body = frame.WhichOneof("body")
    if body is None and data:
        raise Refused(RefusalCode.OTHER, "a kind of message that I do not know")
    if body is None:
        raise BadMessage("an empty frame")
    message: Message = from_wire(BODIES[body], getattr(frame, body))
    _need_size(message, len(data))
    need_signed(message)
    return message


def parse(wire: Wire, data: bytes) -> None:
    """Parse `data` into an empty protobuf message. Raises BadMessage, also for encodings that protobuf only forgives."""
    try:
        wire.ParseFromString(data)
    except DecodeError as error:
        raise BadMessage(f"not a {wire.DESCRIPTOR.name}: {error}") from None
    if wire.ByteSize() != len(data):  # what was dropped or merged while parsing nobody has checked
        raise BadMessage(f"a {wire.DESCRIPTOR.name} of {len(data)} bytes that says only {wire.ByteSize()}")


def fill(wire: Wire, value: DataclassInstance) -> None:
    """Write the fields of a message, record or credential into its generated form, in place: bulk data is copied once."""
    wire.SetInParent()  # a message that is all zeros is there all the same
    for name in limits.field_names(type(value)):
        match getattr(value, name):
            case None:
                pass
            case PeerId() as peer:
                setattr(wire, name, peer.raw)
            case Credential() as credential:
                fill(getattr(wire, name), credential)
            case tuple() as items:
                getattr(wire, name).extend(items)
            case plain:
                setattr(wire, name, plain)


# Field names mean the same in every message, so one table reads them all; what is not here is taken as it is.
_READ: Final[dict[str, Callable[[Any], object]]] = {
    "issuer": PeerId,
    "revoked": PeerId,
    "subject": lambda raw: PeerId(raw) if raw else None,
    "bearer": lambda raw: PeerId(raw) if raw else None,
    "peer_id": PeerId,
    "sender": PeerId,
    "receiver": PeerId,
    "phase": RunPhase,
    "code": lambda number: RefusalCode(number) if number in _CODES or not number else RefusalCode.OTHER,
    "part": Part,
    "decision": Decision,
    "kind": lambda number: _contents_kind(number),
    "records": tuple,
    "members": tuple,
    "addresses": tuple,
}


def _contents_kind(number: int) -> ContentsKind:
    if number > max(ContentsKind):
        raise Refused(RefusalCode.OTHER, "a kind of contents that I do not know")
    return ContentsKind(number)


def write_alone(wire: Wire, value: DataclassInstance) -> bytes:
    """Return a value as it travels outside a frame; `wire` is an empty message of its kind."""
    fill(wire, value)
    return wire.SerializeToString()


def read_alone(kind: type[V], wire: Wire, data: bytes, name: str, most_bytes: int) -> V:
    """Return what `write_alone` wrote, checked. Raises BadMessage; says nothing about signatures."""
    limits.need_count(f"size of {name}", len(data), most_bytes)
    parse(wire, data)
    read: V = from_wire(kind, wire)
    return read


def from_wire(kind: type[Any], wire: Any) -> Any:
    """Return the checked value of a generated message. Raises BadMessage."""
    values = {}
    for name in limits.field_names(kind):
        if name == "credential":
            values[name] = from_wire(Credential, wire.credential) if wire.HasField("credential") else None
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
    """Raise BadMessage when a message, or the credential that it carries, lacks a signature."""
    if getattr(message, "signature", None) == b"":
        raise BadMessage(f"a {type(message).__name__} without a signature")
    credential = getattr(message, "credential", None)
    if credential is not None and not credential.is_complete:
        raise BadMessage("a credential that lacks a signature")
