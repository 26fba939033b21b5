"""Why a peer says no, and the one table between refusal codes, their meaning, and errors.

A refusal is nobody's fault: the code tells the other side whether to ask again. The enum repeats `RefusalCode` of peer.proto
without its zero; a test holds the two together.
"""

from __future__ import annotations

from enum import IntEnum

from protocol.errors import BadContents, BadMessage, BadSignature, DeadlineExceeded, GossamerError, PeerMisbehaved


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
    RefusalCode.NOT_FOUND: ("the partner does not have what was asked for", "another partner is asked; nothing to do"),
}


class Refused(GossamerError):
    """One side said no, with a code; nobody's fault."""

    def __init__(self, code: RefusalCode, detail: str = "") -> None:
        says, hint = MEANING[code]
        super().__init__(f"{says} ({detail})" if detail else says, hint=hint)
        self.code = code
        self.detail = detail


_CODE_OF_ERROR: tuple[tuple[type[GossamerError], RefusalCode], ...] = (
    (BadContents, RefusalCode.GATE),
    (BadMessage, RefusalCode.BAD_MESSAGE),
    (BadSignature, RefusalCode.BAD_MESSAGE),
    (PeerMisbehaved, RefusalCode.BAD_MESSAGE),
    (DeadlineExceeded, RefusalCode.TOO_SLOW),
)


def refusal_code(error: GossamerError) -> RefusalCode | None:
    """Return the code that tells the partner about this error, or None when there is nothing to tell it (or nobody to tell)."""
    if isinstance(error, Refused):
        return error.code
    return next((code for kind, code in _CODE_OF_ERROR if isinstance(error, kind)), None)
