"""Every error that crosses a package border, and whose fault it is.

- GossamerError                 carries `hint`: what to do next
  - TransportError              the network's fault: try again, or another partner, within the deadline
    - Unreachable               no lane to the partner opened
    - PeerGone                  the partner's stream ended before the conversation did
    - DeadlineExceeded          the time set aside for the step has passed
  - PeerMisbehaved              the partner's fault: drop it, note the reason, do not retry
    - BadMessage                unreadable, out of order, or a size that the manifest does not imply
    - BadSignature              signed by another key, or over other bytes
    - BadContents               the bytes do not have the hash that was promised, or are not finite
  - Refused                     the partner said no, with a code; nobody's fault
  - OperatorError               the operator's fault: exit code 2 unless the subclass says otherwise
    - BadInvite                 cut, expired, forged or for somebody else
    - BadManifest               not a manifest, or one with values that cannot work
    - BadSettings               local settings or data that cannot work
    - WrongVersion              exit code 10
    - RunRefusesUs              exit code 4
    - SwarmUnreachable          exit code 3

Anything else that escapes is our own fault: exit code 1.
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
    """The network's fault."""

    exit_code = ExitCode.SWARM_UNREACHABLE


class Unreachable(TransportError):
    """No lane to the partner opened."""


class PeerGone(TransportError):
    """The partner's stream ended before the conversation did."""


class DeadlineExceeded(TransportError):
    """The time set aside for this step has passed."""


class PeerMisbehaved(GossamerError):
    """The partner's fault: drop it and note why."""


class BadMessage(PeerMisbehaved):
    """Unreadable, out of order, or of a size that the manifest does not imply."""


class BadSignature(PeerMisbehaved):
    """Signed by another key, or over other bytes."""


class BadContents(PeerMisbehaved):
    """The bytes lack the promised hash, or decode to something that is not finite."""


class OperatorError(GossamerError):
    """The operator's fault."""

    exit_code = ExitCode.BAD_INPUT


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
