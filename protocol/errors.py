"""Every error that crosses a package border, classified by its cause: the network, the partner, the operator, or a refusal.

Any other exception that escapes is a bug in Gossamer: exit code 1. The code of a refusal tells the other side whether to retry. The enum
repeats `RefusalCode` of peer.proto without its zero value; a test compares the two.
"""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """Exit code of a `peer` command."""

    DONE = 0
    OUR_FAULT = 1
    BAD_INPUT = 2
    SWARM_UNREACHABLE = 3
    REFUSED_BY_RUN = 4
    VERSION_MISMATCH = 10
    INTERRUPTED = 130


class GossamerError(Exception):
    """An error with a message for the operator and a hint on what to do next."""

    exit_code = ExitCode.OUR_FAULT

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint


class TransportError(GossamerError):
    """The network failed: retry, or try another partner, within the deadline."""

    exit_code = ExitCode.SWARM_UNREACHABLE


class Unreachable(TransportError):
    """No connection to the partner could be opened."""


class PeerGone(TransportError):
    """The stream to the partner ended before the exchange was complete."""


class DeadlineExceeded(TransportError):
    """The deadline of this step has passed."""


class PeerMisbehaved(GossamerError):
    """The partner violated the protocol: drop it, record the reason, do not retry."""


class BadMessage(PeerMisbehaved):
    """The message is unreadable, out of order, or of a size that the manifest does not imply."""


class BadSignature(PeerMisbehaved):
    """The signature is by another key, or over other bytes."""


class BadContents(PeerMisbehaved):
    """The bytes do not have the promised hash, or decode to non-finite values."""


class OperatorError(GossamerError):
    """The operator's input cannot work. Always has a hint; exit code 2 unless the subclass sets another."""

    exit_code = ExitCode.BAD_INPUT

    def __init__(self, message: str, *, hint: str) -> None:
        super().__init__(message, hint=hint)


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


class RefusalCode(IntEnum):
    """Why a peer refuses a request; the numbers are those of peer.proto."""

    BUSY = 1
    WRONG_RUN = 2
    WRONG_VERSION = 3
    NOT_INVITED = 4
    WRONG_TERMS = 5
    CLOCK_TOO_FAR = 6
    NOT_READY = 7
    LEAVING = 9
    BAD_MESSAGE = 10
    GATE = 11
    TOO_SLOW = 12
    WRONG_PHASE = 13
    NOT_FOUND = 14
    OTHER = 15


MEANING: dict[RefusalCode, tuple[str, str]] = {
    # code: (message, from the viewpoint of the refused peer; hint)
    RefusalCode.BUSY: ("the partner is in another meeting", "nothing to do: this peer tries another partner"),
    RefusalCode.WRONG_RUN: ("the partner trains another run", "check that all peers joined with invites of the same run"),
    RefusalCode.WRONG_VERSION: ("the partner uses another protocol version", "install the same release of Gossamer as the other peers"),
    RefusalCode.NOT_INVITED: (
        "the partner does not accept this peer as a member",
        "ask the host for a new invite, then `peer join` with it",
    ),
    RefusalCode.WRONG_TERMS: ("the partner derives other sizes from the manifest", "check that both peers run the same release"),
    RefusalCode.CLOCK_TOO_FAR: (
        "the global steps of the two peers are too far apart",
        "nothing to do: this peer tries another partner, and a late joiner catches up",
    ),
    RefusalCode.NOT_READY: ("the partner's trainer is not ready yet", "nothing to do: this peer tries another partner"),
    RefusalCode.LEAVING: ("the partner is leaving", "nothing to do: this peer tries another partner"),
    RefusalCode.BAD_MESSAGE: ("the partner could not parse or verify our message", "if every partner refuses so, update Gossamer"),
    RefusalCode.GATE: ("the partner's merge gate rejected our weights", "if every partner refuses so, check this peer's loss"),
    RefusalCode.TOO_SLOW: ("the partner's deadline passed", "if every partner refuses so, this peer's connection is too slow for the run"),
    RefusalCode.WRONG_PHASE: (
        "one of the two peers has finished the run, the other has not",
        "nothing to do: this peer tries another partner",
    ),
    RefusalCode.OTHER: (
        "the partner refuses for a reason that this release does not know, or does not know our request",
        "this peer tries another partner; if every partner refuses so, update Gossamer",
    ),
    RefusalCode.NOT_FOUND: ("the partner does not have the requested data", "nothing to do: this peer tries another partner"),
}


class Refused(GossamerError):
    """One side declined, with a code. A refusal is neither side's fault."""

    def __init__(self, code: RefusalCode, detail: str = "") -> None:
        message, hint = MEANING[code]
        super().__init__(f"{message} ({detail})" if detail else message, hint=hint)
        self.code = code
        self.detail = detail
