"""What the demo found out: the swarm beside one peer that trained alone, as one JSON object or as a few plain sentences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from gossamer.cli.figures import MEETING_KINDS, Status, bar_text, bytes_text, loss_text, meetings_text, share_text


def measured_names(num_peers: int) -> list[str]:
    """Return what is measured, in order: the initial weights, the peers, their average, and the peer that trained alone."""
    return ["before training", *(f"peer-{number}" for number in range(1, num_peers + 1)), "average of the peers", "alone, as many steps"]


@dataclass(frozen=True, slots=True)
class Comparison:
    """The figures of one demo; the names are the keys of `peer demo --json`."""

    peers: int
    steps: int
    params: int
    eval_loss_start: float
    eval_loss: tuple[float, ...]
    eval_loss_averaged: float
    eval_loss_alone: float
    meetings: dict[str, int]
    bytes_sent: int
    bits_per_param: float
    blocked_seconds: tuple[float, ...]
    train_seconds: tuple[float, ...]
    own_steps: tuple[int, ...]
    processor_seconds: tuple[Mapping[str, float], ...]  # of each peer, by what for, as in its status
    wall_seconds: float

    def to_json(self) -> dict[str, Any]:
        """Return the object that `--json` prints."""
        return asdict(self)

    def sentences(self, encoding: str) -> str:
        """Return the closing statement of the demo, with a chart of the losses in characters that the encoding has."""
        losses = (self.eval_loss_start, *self.eval_loss, self.eval_loss_averaged, self.eval_loss_alone)
        rows = [
            f"  {name:<22}{loss_text(loss)}  {bar_text(loss / max(losses), encoding)}"
            for name, loss in zip(measured_names(self.peers), losses, strict=True)
        ]
        return "\n".join(["held-out loss, nats per token", *rows, "", self._verdict(), self._cost()])

    def _verdict(self) -> str:
        ahead = self.eval_loss_alone - self.eval_loss_averaged
        other = f"one peer that trained alone for the same {self.steps} steps"
        if ahead > 0:
            return f"The swarm of {self.peers} is {ahead:.3f} nats ahead of {other}."
        return f"The swarm of {self.peers} is not ahead: it is {-ahead:.3f} nats behind {other}."

    def _cost(self) -> str:
        blocked = share_text(sum(self.blocked_seconds), sum(self.train_seconds))
        return (
            f"Meetings: {meetings_text(self.meetings)}. Sent: {bytes_text(self.bytes_sent)}, {self.bits_per_param:.2f} bits per value. "
            f"Blocked by synchronization: {blocked} of training time. {self._processor()} From start to end: {self.wall_seconds:.0f} s."
        )

    def _processor(self) -> str:
        training, coding, node = (sum(spent[what] for spent in self.processor_seconds) for what in ("training", "coding", "node"))
        whole = training + coding + node
        return (
            f"Processor time per inner step: {1000 * whole / max(1, sum(self.own_steps)):.0f} ms, {share_text(coding + node, whole)} of it "
            f"synchronization (coding {share_text(coding, whole)}, node {share_text(node, whole)})."
        )


def total_meetings(statuses: Sequence[Status]) -> dict[str, int]:
    """Return how many meetings there were. Both partners count a completed one; here it counts once."""
    total = {kind: sum(int(status["meetings"][kind]) for status in statuses) for kind in MEETING_KINDS}
    return total | {"completed": total["completed"] // 2}
