"""Consequences of a manifest before any tensor exists: its fragments, and the sizes on the wire."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Final

from gossamer.optim.codecs import codec
from gossamer.optim.fragment_codec import FragmentCodec
from gossamer.optim.fragments import split
from gossamer.optim.inner import InnerSettings
from gossamer.protocol import limits
from gossamer.protocol.errors import BadManifest
from gossamer.protocol.messages.terms import FragmentTerms, ModelPlan
from gossamer.protocol.run.layout import Shapes
from gossamer.protocol.run.manifest import Manifest, RunManifest

SAMPLE_VALUES: Final = 1 << 20  # enough that a codec's bytes per value are those of any large fragment
STEP_FACTOR = 4  # a peer's global step advances at most this many times as fast as its own steps
LAST_INTERVALS: Final = 4  # between meetings, before the end of the run: training no longer mends what a merge harms


def inner_settings(manifest: Manifest) -> InnerSettings:
    """Take the inner optimizer's constants from a manifest, which names them alike."""
    names = {constant.name for constant in fields(InnerSettings)} - {"total_steps"}
    return InnerSettings(manifest.run.total_steps, **{name: getattr(manifest.inner, name) for name in names})


def fragment_codecs(manifest: RunManifest, shapes: Shapes) -> tuple[FragmentCodec, ...]:
    """Cut a model of these parameter shapes as the manifest says, and return each fragment with its codec.

    Raises BadManifest for more fragments than messages can number, or a larger state than peers can agree on.
    """
    chosen = codec(manifest.codec.name)
    bytes_per_value = (chosen.sketch_bytes(SAMPLE_VALUES) + chosen.payload_bytes(SAMPLE_VALUES)) / SAMPLE_VALUES
    max_values = max(1, int(1e6 * manifest.fragments.max_fragment_mb / bytes_per_value))
    num_values = sum(map(math.prod, shapes.values()))
    if num_values > limits.FRAGMENTS * max_values:
        raise BadManifest(f"the model has more than {limits.FRAGMENTS} fragments", hint="raise max_fragment_mb in [fragments]")
    if _state_bytes(num_values, manifest.outer.alpha) > limits.STATE_BYTES:
        raise BadManifest(f"the trained weights have more than {limits.STATE_BYTES / 1e9:.0f} GB", hint="train less, or in more stages")
    return tuple(FragmentCodec(fragment, chosen) for fragment in split(shapes, max_values, manifest.fragments.blocks_per_fragment))


def model_plan(codecs: Sequence[FragmentCodec], alpha: float) -> ModelPlan:
    """Return the sizes of these fragments on the wire, all with one codec."""
    fragments = tuple(FragmentTerms(codec.sketch_bytes, codec.payload_bytes, codec.num_blocks) for codec in codecs)
    return ModelPlan(codecs[0].codec.wire_id, fragments, _state_bytes(sum(codec.fragment.numel for codec in codecs), alpha))


def _state_bytes(num_values: int, alpha: float) -> int:
    """Return the size of a state of so many values: it holds momentum only if alpha > 0."""
    return (4 if alpha > 0.0 else 2) * num_values


@dataclass(slots=True)
class ClockBudget:
    """By how many steps partners may still move a peer's global step.

    Own steps and followed ones are together at most `STEP_FACTOR` times the own ones. Steps are saved up for one allowed gap only, so that
    a partner that overstates its step late in a run cannot end it at once.
    """

    slack_steps: int  # how far a partner may be ahead without being followed
    max_steps: int  # that are saved up
    total_steps: int  # of the run
    steps: int = 0  # left

    def refill(self) -> None:
        """Count an own step."""
        self.steps = min(self.steps + STEP_FACTOR - 1, self.max_steps)

    def follow(self, own_steps: int, partner_steps: int) -> int:
        """Return the global step after a meeting: at most the slack behind the partner's, less towards the end, and never decreasing.

        Without the slack, a peer that is ahead by chance would move all others, and the global step would advance faster than any peer
        trains.
        """
        slack_steps = min(self.slack_steps, max(0, self.total_steps - partner_steps))
        followed = max(own_steps, min(partner_steps - slack_steps, own_steps + self.steps, self.total_steps))
        self.steps -= followed - own_steps
        return followed

    def must_probe(self, own_steps: int, partner_steps: int) -> bool:
        """Return whether a message is measured however good its partner's record is: one from far ahead, and each one near the end.

        A peer that is slower by a few per cent follows at the slack's end: its partners are always a little more than the slack ahead.
        """
        return partner_steps > own_steps + 2 * self.slack_steps or self.total_steps - own_steps < LAST_INTERVALS * self.slack_steps


def clock_budget(manifest: RunManifest) -> ClockBudget:
    """Return the empty budget of a run's peer."""
    return ClockBudget(manifest.outer.nominal_steps, manifest.outer.max_clock_gap_steps, manifest.run.total_steps)
