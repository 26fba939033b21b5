"""State and reason of a peer in words, composed from what its two processes say and from what the supervisor sees.

The trainer's word comes first: a peer that trains is `training`, whatever the network does; what hinders it becomes the reason. Before
that, the node's word (joining, waiting) is the state. Pure bookkeeping; time is an argument.
"""

from __future__ import annotations

from dataclasses import dataclass, field

SILENT_S = 15.0  # a trainer speaks about once a second, so after this long it is worth a word
BUSY = ("training", "finishing")
MEANWHILE = {"trainer": "it goes on from its last checkpoint", "node": "training goes on without it"}


@dataclass(slots=True)
class Said:
    """The last word of one process."""

    state: str = ""
    reason: str = ""
    trouble: str = ""  # why it is down; empty while it runs


@dataclass(slots=True)
class Condition:
    """What is known of the processes; `describe` makes one state with its reason of it."""

    alone: bool  # nobody is ever met
    trainer: Said = field(default_factory=Said)
    node: Said = field(default_factory=Said)
    heard_s: float = 0.0  # when the trainer last spoke
    ending: tuple[str, str] | None = None  # the supervisor's own word, which nothing overrides

    @property
    def trains(self) -> bool:
        """Whether the trainer has begun."""
        return self.trainer.state in BUSY

    def trainer_says(self, state: str, reason: str) -> None:
        """Note the trainer's state: ready, training, finishing."""
        self.trainer = Said(state, reason)

    def node_says(self, state: str, reason: str) -> None:
        """Note the node's state: joining, waiting."""
        self.node = Said(state, reason)

    def describe(self, peers_seen: int, now_s: float) -> tuple[str, str]:
        """Return the state and the reason for it, which is empty where all is as it should be."""
        if self.ending is not None:
            return self.ending
        if self.trainer.trouble:
            return "starting", self.trainer.trouble
        if self.trains:
            return self.trainer.state, self._remark(peers_seen, now_s)
        if self.node.trouble:
            return "joining", self.node.trouble
        if self.node.state:
            return self.node.state, self.node.reason
        return "starting", "opening the network" if self.trainer.state else "building the model"

    def _remark(self, peers_seen: int, now_s: float) -> str:
        silent_s = now_s - self.heard_s
        if silent_s >= SILENT_S:
            return f"the trainer has been silent for {silent_s // 5 * 5:.0f} s: a long step, or it hangs"
        if self.node.trouble:
            return self.node.trouble
        if self.trainer.reason or self.alone:
            return self.trainer.reason or "alone, as asked"
        return "" if peers_seen else "no other peer in sight"


def trouble(name: str, reason: str, pause_s: float) -> str:
    """Say that the trainer or the node is down and will be started again."""
    return f"the {name} ended ({reason}); starting it again in {pause_s:.1f} s, {MEANWHILE[name]}"
