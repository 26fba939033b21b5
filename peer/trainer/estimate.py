"""What a line means for a run, before any download: how long joining and a meeting take, how often a peer meets, bytes a day.

The estimate is for partners with lines like one's own, and covers only what the line sets. The share of processor and of the trainer's time
that meetings take is measured while the peer trains (peer/trainer/interval.py), and can only make meetings rarer.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import torch

from gossamer.optim.fragments import MEETING_INTERVAL
from gossamer.peer.model.computing import Computing
from gossamer.peer.trainer.interval import afforded_steps
from gossamer.peer.trainer.need import Need, run_need
from gossamer.protocol.messages.terms import ModelPlan
from gossamer.protocol.run.manifest import Manifest

DAY_S: Final = 86_400.0
PULL_SHARE: Final = 4  # a state older than a fourth of the allowed clock gap needs fragment sync, in rounds of that length


@dataclass(frozen=True, slots=True)
class Estimate:
    """The time and bytes that a peer can expect."""

    join_s: float  # from the first byte of the state until every fragment meets: the state, and fragment sync if it came too slowly
    meeting_s: float  # for the payload of the largest fragment, both ways at once
    interval_steps: int  # the shortest mean countdown that the line carries and that pays
    interval_s: float
    day_bytes: float  # sent in a day of meetings at that interval; as many are received
    line_share: float  # of the line's capacity: more than half where even the longest countdown is too short


def estimate(plan: ModelPlan, gap_steps: int, bytes_per_s: float, step_s: float) -> Estimate:
    """Estimate for a line with this rate each way, inner steps of `step_s`, and clocks that may be `gap_steps` apart."""
    state_s, pulls_s = plan.state_bytes / bytes_per_s, plan.round_bytes / bytes_per_s
    old_s = gap_steps * step_s / PULL_SHARE
    interval_steps = afforded_steps(plan.round_bytes, bytes_per_s, step_s)
    round_s = MEETING_INTERVAL * interval_steps * step_s
    return Estimate(
        join_s=state_s + (pulls_s + math.ceil(pulls_s / old_s) * step_s if state_s > old_s else 0.0),  # a round ends at a boundary
        meeting_s=max(fragment.slow_bytes for fragment in plan.fragments) / bytes_per_s,
        interval_steps=interval_steps,
        interval_s=interval_steps * step_s,
        day_bytes=plan.round_bytes * DAY_S / round_s,
        line_share=plan.round_bytes / round_s / bytes_per_s,
    )


def needs(manifest: Manifest) -> dict[str, Need]:
    """Return the least that a peer needs, one sequence at a time, on a GPU in bf16 and on a CPU. Raises BadManifest."""
    return {
        device: run_need(manifest, device, Computing(dtype, micro_batch=1, recompute=True))
        for device, dtype in (("cuda", torch.bfloat16), ("cpu", torch.float32))
    }


def places(need: Need) -> dict[str, int]:
    """Return the bytes that a run needs, by kind of memory."""
    parts = {"device": need.device, "memory": need.memory, "shared_memory": need.payloads, "disk": need.disk}
    return {place: sum(sizes.values()) for place, sizes in parts.items()}
