"""Every error that crosses a package border, classified by its cause: the network, the partner, the operator, or a refusal.

Any other exception that escapes is a bug in Gossamer: exit code 1. The code of a refusal tells the other side whether to retry.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from typing import Self


class ExitCode(IntEnum):
    """Exit code of a `peer` command."""

    DONE = 0
    OUR_FAULT = 1
    BAD_INPUT = 2
    SWARM_UNREACHABLE = 3
    REFUSED_BY_RUN = 4
    VERSION_MISMATCH = 10
    INTERRUPTED = 130


def printable(text: str) -> str:
    """Return a text as one line for a terminal: others may have written a part of it, with control characters."""
    return "".join(char if char.isprintable() else " " for char in text)


class GossamerError(Exception):
    """An error with a message for the operator and a hint on what to do next, both printable. Only our own words have several lines."""

    exit_code = ExitCode.OUR_FAULT

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__("\n".join(map(printable, message.split("\n"))))
        self.hint = hint = printable(hint)
        if hint:
            self.add_note(f"hint: {hint}")  # for a program that uses the library and prints a traceback


class TransportError(GossamerError):
    """The network failed: retry, or try another partner, within the deadline."""

    exit_code = ExitCode.SWARM_UNREACHABLE


class Unreachable(TransportError):
    """No connection to the partner could be opened."""


class PeerGone(TransportError):
    """The stream to the partner ended before the exchange was complete."""


class PeerMisbehaved(GossamerError):
    """The partner violated the protocol: drop it, record the reason, do not retry."""


class BadMessage(PeerMisbehaved):
    """The message is unreadable, out of order, of a size that the manifest does not imply, or has other bytes than it promised."""


class BadSignature(PeerMisbehaved):
    """The signature is by another key, or over other bytes."""


class OperatorError(GossamerError):
    """The operator's input cannot work. Always has a hint; exit code 2 unless the subclass sets another."""

    exit_code = ExitCode.BAD_INPUT

    def __init__(self, message: str, *, hint: str) -> None:
        super().__init__(message, hint=hint)


def classified(error: BaseException, hint: str = "") -> GossamerError:
    """Return an error as one of this file: any other is a bug, with its name in the message and this hint."""
    return error if isinstance(error, GossamerError) else GossamerError(f"{type(error).__name__}: {error}", hint=hint)


def why_unreadable(error: OSError | ValueError) -> str:
    """Return in words why a file could not be read as text: the system's reason, or that it is not UTF-8."""
    return str(error.strerror) if isinstance(error, OSError) else "it is not UTF-8 text"


def description(error: GossamerError) -> dict[str, str]:
    """Return an error as JSON, for another process of the same program."""
    return {"error": str(error), "hint": error.hint, "kind": type(error).__name__}


def from_description(described: Mapping[str, str]) -> GossamerError:
    """Return the error that was described: of its class, if it is one of the operator's in this file."""
    kind = globals().get(described["kind"])
    if isinstance(kind, type) and issubclass(kind, OperatorError):
        return kind(described["error"], hint=described["hint"])
    return GossamerError(described["error"], hint=described["hint"])


class BadInvite(OperatorError):
    """The invite is truncated, expired, forged, or for another peer."""


class BadManifest(OperatorError):
    """The input is not a manifest, or holds invalid values."""


class BadSettings(OperatorError):
    """Local settings or data are invalid."""


class WrongVersion(OperatorError):
    """The run uses a protocol version that this build does not support."""

    exit_code = ExitCode.VERSION_MISMATCH


class RunRefusesUs(OperatorError):
    """The run's members do not accept this peer."""

    exit_code = ExitCode.REFUSED_BY_RUN


class SwarmUnreachable(OperatorError):
    """None of the run's known addresses answered."""

    exit_code = ExitCode.SWARM_UNREACHABLE


_ASK_ANOTHER = "nothing to do: this peer tries another partner"


class RefusalCode(IntEnum):
    """Why a peer refuses a request: the number of peer.proto, a message from the viewpoint of the refused peer, and a hint."""

    message: str
    hint: str

    def __new__(cls, number: int, message: str, hint: str) -> Self:
        """Create a member. `RefusalCode(number)` looks one up, and raises ValueError if there is none."""
        code = int.__new__(cls, number)
        code._value_, code.message, code.hint = number, message, hint
        return code

    BUSY = 1, "the partner is in another meeting", _ASK_ANOTHER
    WRONG_RUN = 2, "the partner trains another run", "check that all peers joined with invites of the same run"
    WRONG_VERSION = 3, "the partner uses another protocol version", "install the same release of Gossamer as the other peers"
    NOT_INVITED = (
        4,
        "the partner does not accept this peer as a member",
        "ask the host for a new invite, then `peer join` with it; "
        "a run with a list of members admits only the ids on it, and `peer id` prints this peer's",
    )
    WRONG_TERMS = 5, "the partner derives other sizes from the manifest", "check that both peers run the same release"
    STEP_TOO_FAR = 6, "the global steps of the two peers are too far apart", f"{_ASK_ANOTHER}, and a late joiner catches up"
    NOT_READY = 7, "the partner's trainer is not ready yet", _ASK_ANOTHER
    LEAVING = 9, "the partner is leaving", _ASK_ANOTHER
    BAD_MESSAGE = 10, "the partner could not parse or verify our message", "if every partner refuses so, update Gossamer"
    GATE = 11, "the partner's merge gate rejected our weights", "if every partner refuses so, check this peer's loss"
    TOO_SLOW = 12, "the partner's deadline passed", "if every partner refuses so, this peer's connection is too slow for the run"
    WRONG_PHASE = 13, "one of the two peers has finished the run, the other has not", _ASK_ANOTHER
    NOT_FOUND = 14, "the partner does not have the requested data", _ASK_ANOTHER
    OTHER = (
        15,
        "the partner refuses for a reason that this release does not know, or does not know our request",
        "this peer tries another partner; if every partner refuses so, update Gossamer",
    )


class Refused(GossamerError):
    """One side declined, with a code. A refusal is neither side's fault."""

    def __init__(self, code: RefusalCode, detail: str = "") -> None:
        super().__init__(f"{code.message} ({detail})" if detail else code.message, hint=code.hint)
        self.code = code
        self.detail = detail


TRIED_BEFORE = "dial backoff"  # p2pd does not dial again so soon after a failure
_REASONS = (
    "connection refused",
    "no route to host",
    "network is unreachable",
    "i/o timeout",
    "peer id mismatch",
    "no such host",
    TRIED_BEFORE,
)


def short_reason(text: str) -> str:
    """Return the operating system's reason from p2pd's message, which lists every address that it tried."""
    return next((reason for reason in _REASONS if reason in text), text)
