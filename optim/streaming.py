"""When Streaming DiLoCo sends each fragment, and when it takes what the group sent (arXiv 2501.18512, Algorithm 2).

Fragment p of P has the offset round(p * H / P) and is sent every H inner steps, first when it has had at least H; what was sent at step t
is taken at t + overlap. The step itself is `optim.diloco.outer_step` on the fragment, the merge `optim.merge.mix`. With one fragment
and no overlap this is DiLoCo.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StreamingSchedule:
    """The same for all peers of a group. Raises ValueError where a fragment would be sent again before it arrived."""

    num_fragments: int
    inner_steps: int
    overlap_steps: int = 1

    def __post_init__(self) -> None:
        if self.num_fragments < 1 or self.inner_steps < 1:
            raise ValueError(f"A schedule needs at least one fragment and one inner step, not {self.num_fragments} and {self.inner_steps}.")
        if not 0 <= self.overlap_steps < self.inner_steps:
            raise ValueError(f"overlap_steps must satisfy 0 <= overlap_steps < inner_steps, and is {self.overlap_steps}.")

    def offset_steps(self, fragment_id: int) -> int:
        """Return by how many inner steps the fragment is behind fragment 0."""
        return round(fragment_id * self.inner_steps / self.num_fragments)

    def sending(self, step: int) -> list[int]:
        """Return the fragments to send after inner step `step` (the first is 1)."""
        return self._due(step) if step >= self.inner_steps else []

    def arriving(self, step: int) -> list[int]:
        """Return the fragments to take after inner step `step`: those sent `overlap_steps` before."""
        return self.sending(step - self.overlap_steps)

    def _due(self, step: int) -> list[int]:
        fragments = range(self.num_fragments)
        return [fragment for fragment in fragments if (step - self.offset_steps(fragment)) % self.inner_steps == 0]
