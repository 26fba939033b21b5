"""What a peer says of itself: the one record behind `peer status`, the screen, the demo and the dashboards."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

VERSION = "0.1.0"


@dataclass(slots=True)
class Status:
    """A peer's state, with the reason for it. Times are Unix seconds; counts are since this start of the peer unless named otherwise."""

    state: str = "starting"  # joining waiting training finishing leaving left done failed; a seed is seeding
    reason: str = ""
    since: float = 0.0
    run_id: str = ""
    peer_id: str = ""
    step: int = 0  # the schedule clock
    own_steps: int = 0  # inner steps made by this peer, over all its sessions
    total_steps: int = 0
    tokens: int = 0
    loss: float | None = None  # nats per token, mean of the last second of training
    eval_loss: float | None = None
    tokens_per_second: float = 0.0
    train_seconds: float = 0.0  # in inner steps, and blocked between them
    blocked_seconds: float = 0.0  # of these, spent on synchronization at step boundaries
    peers_seen: int = 0
    meetings: dict[str, int] = field(default_factory=lambda: {"completed": 0, "solo": 0, "refused": 0, "failed": 0})
    bytes: dict[str, int] = field(default_factory=lambda: {"sent": 0, "received": 0})
    bits_per_param: float = 0.0  # what the codec sends one way in a meeting
    params: int = 0
    lane_counts: dict[str, int] = field(default_factory=dict)
    addresses: list[str] = field(default_factory=list)
    version: str = VERSION

    def to_json(self) -> dict[str, Any]:
        """Return all fields, JSON-able."""
        return asdict(self)

    def update(self, fields: dict[str, Any]) -> None:
        """Take in what a process of the peer reported. Unknown names are our own bug: AttributeError."""
        for name, value in fields.items():
            if not hasattr(self, name):
                raise AttributeError(f"no such status field: {name}")
            setattr(self, name, value)

    def enter(self, state: str, reason: str, now_s: float) -> bool:
        """Change state; True when state or reason are new. `since` moves with the state only."""
        is_new = (state, reason) != (self.state, self.reason) or not self.since
        if state != self.state or not self.since:
            self.since = now_s
        self.state, self.reason = state, reason
        return is_new
