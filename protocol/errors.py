"""Every error that crosses a package border, and whose fault it is.

The network's, the partner's, the operator's, or nobody's (`Refused`). Anything else that escapes is our own fault: exit code 1. A
refusal's code tells the other side whether to ask again; the enum repeats `RefusalCode` of peer.proto without its zero, and a test holds
the two together.
"""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """What a `peer` command returns to the shell."""

    DONE = 0
    OUR_FAULT = 1
    BAD_INPUT = 2
    SWARM_UNREACHABLE = 3
    REFUSED_BY_RUN = 4
    VERSION_MISMATCH = 10
    INTERRUPTED = 130


class GossamerError(Exception):
    """An error with a sentence for the operator and a hint on what to do next."""

    exit_code = ExitCode.OUR_FAULT

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint


class TransportError(GossamerError):
    """The network's fault: try again, or another partner, within the deadline."""

    exit_code = ExitCode.SWARM_UNREACHABLE


class Unreachable(TransportError):
    """No connection to the partner opened."""


class PeerGone(TransportError):
    """The partner's stream ended before the conversation did."""


class DeadlineExceeded(TransportError):
    """The time set aside for this step has passed."""


class PeerMisbehaved(GossamerError):
    """The partner's fault: drop it and note why, do not retry."""


class BadMessage(PeerMisbehaved):
    """Unreadable, out of order, or of a size that the manifest does not imply."""


class BadSignature(PeerMisbehaved):
    """Signed by another key, or over other bytes."""


class BadContents(PeerMisbehaved):
    """The bytes lack the promised hash, or decode to something that is not finite."""


class OperatorError(GossamerError):
    """The operator's fault, always with a hint: exit code 2 unless the subclass says otherwise."""

    exit_code = ExitCode.BAD_INPUT

    def __init__(self, message: str, *, hint: str) -> None:
        super().__init__(message, hint=hint)


class BadInvite(OperatorError):
    """Cut, expired, forged, or for somebody else."""


class BadManifest(OperatorError):
    """Not a manifest, or one with values that cannot work."""


class BadSettings(OperatorError):
    """Local settings or data that cannot work."""


class WrongVersion(OperatorError):
    """This build speaks another protocol version than the run."""

    exit_code = ExitCode.VERSION_MISMATCH


class RunRefusesUs(OperatorError):
    """The run's members do not accept this peer."""

    exit_code = ExitCode.REFUSED_BY_RUN


class SwarmUnreachable(OperatorError):
    """None of the run's known addresses answered."""

    exit_code = ExitCode.SWARM_UNREACHABLE


class RefusalCode(IntEnum):
    """The numbers of peer.proto."""

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
    # code: (what it says, seen from the side that was refused; what to do about it)
    RefusalCode.BUSY: ("the partner is in another meeting", "another partner is asked; nothing to do"),
    RefusalCode.WRONG_RUN: ("the partner trains another run", "check that all peers joined with invites of the same run"),
    RefusalCode.WRONG_VERSION: ("the partner speaks another protocol version", "install the same release of Gossamer as the other peers"),
    RefusalCode.NOT_INVITED: (
        "the partner does not accept this peer as a member",
        "ask the host for a new invite, then `peer join` with it",
    ),
    RefusalCode.WRONG_TERMS: ("the partner computes other sizes from its manifest", "check that both peers run the same release"),
    RefusalCode.CLOCK_TOO_FAR: (
        "the schedule clocks of the two peers are too far apart",
        "another partner is asked; a late joiner catches up",
    ),
    RefusalCode.NOT_READY: ("the partner's trainer is not ready yet", "another partner is asked; nothing to do"),
    RefusalCode.LEAVING: ("the partner is leaving", "another partner is asked; nothing to do"),
    RefusalCode.BAD_MESSAGE: ("the partner could not read or verify our message", "if it happens with every partner, update Gossamer"),
    RefusalCode.GATE: ("the partner's merge gate rejected our message", "if it happens with every partner, check this peer's loss"),
    RefusalCode.TOO_SLOW: ("the partner's deadline passed", "if it happens with every partner, the link is too slow for this run"),
    RefusalCode.WRONG_PHASE: ("one of the two peers has finished the run, the other has not", "another partner is asked; nothing to do"),
    RefusalCode.OTHER: (
        "the partner refuses for a reason that this release does not know, or does not know what it was sent",
        "another partner is asked; if it happens with every partner, update Gossamer",
    ),
    RefusalCode.NOT_FOUND: ("the partner does not have what was asked for", "another partner is asked; nothing to do"),
}


class Refused(GossamerError):
    """One side said no, with a code; nobody's fault."""

    def __init__(self, code: RefusalCode, detail: str = "") -> None:
        says, hint = MEANING[code]
        super().__init__(f"{says} ({detail})" if detail else says, hint=hint)
        self.code = code
        self.detail = detail
