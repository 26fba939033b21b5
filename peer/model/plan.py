"""Consequences of a manifest before any tensor exists: whether this build supports it, its fragments, and the sizes on the wire.

The trainer computes them and sends them to the node. A manifest checks only the form of its names, since another release may know more of
them. Names that this build does not know are refused, never replaced.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from gossamer.optim.codecs import CODECS, codec
from gossamer.optim.fragment_codec import FragmentCodec
from gossamer.optim.fragments import Fragment, split
from gossamer.optim.inner import OPTIMIZERS, InnerSettings
from gossamer.optim.names import suggestion
from gossamer.protocol.errors import BadManifest
from gossamer.protocol.messages.terms import FragmentTerms, ModelPlan
from gossamer.protocol.run.manifest import Manifest

METHODS: Final = ("noloco",)
SAMPLE_VALUES: Final = 1 << 20  # enough that a codec's bytes per value are those of any large fragment
CLOCK_FACTOR = 4  # a peer's global step advances at most this many times as fast as its own steps


def need_abilities(manifest: Manifest) -> None:
    """Raise BadManifest, with the names that exist, for the first name that is unknown to this build."""
    _need("outer.method", manifest.outer.method, METHODS)
    _need("inner.optimizer", manifest.inner.optimizer, OPTIMIZERS)
    _need("codec.name", manifest.codec.name, CODECS)


def _need(key: str, name: str, known: Iterable[str]) -> None:
    names = list(known)
    if name not in names:
        raise BadManifest(f'{key} = "{name}" is unknown to this build', hint=suggestion(name, names))


def inner_settings(manifest: Manifest) -> InnerSettings:
    """Take the inner optimizer's constants from a manifest."""
    inner = manifest.inner
    return InnerSettings(
        total_steps=manifest.run.total_steps,
        learning_rate=inner.learning_rate,
        final_fraction=inner.final_fraction,
        warmup_steps=inner.warmup_steps,
        rewarm_steps=inner.rewarm_steps,
        beta1=inner.beta1,
        beta2=inner.beta2,
        weight_decay=inner.weight_decay,
    )


def fragments(manifest: Manifest, shapes: Mapping[str, tuple[int, ...]]) -> tuple[Fragment, ...]:
    """Cut a model of these parameter shapes as the manifest says."""
    chosen = codec(manifest.codec.name)
    bytes_per_value = (chosen.sketch_bytes(SAMPLE_VALUES) + chosen.payload_bytes(SAMPLE_VALUES)) / SAMPLE_VALUES
    max_values = max(1, int(1e6 * manifest.fragments.max_fragment_mb / bytes_per_value))
    return split(shapes, max_values, manifest.fragments.blocks_per_fragment)


def fragment_codecs(manifest: Manifest, shapes: Mapping[str, tuple[int, ...]]) -> tuple[FragmentCodec, ...]:
    """Cut a model of these parameter shapes as the manifest says, and return each fragment with its codec."""
    chosen = codec(manifest.codec.name)
    return tuple(FragmentCodec(fragment, chosen) for fragment in fragments(manifest, shapes))


def model_plan(codecs: Sequence[FragmentCodec], alpha: float) -> ModelPlan:
    """Return the sizes of these fragments on the wire, all with one codec. A state holds momentum only if alpha > 0."""
    fragments = tuple(FragmentTerms(codec.sketch_bytes, codec.payload_bytes, codec.num_blocks) for codec in codecs)
    state_bytes = (4 if alpha > 0.0 else 2) * sum(codec.fragment.numel for codec in codecs)
    return ModelPlan(codecs[0].codec.wire_id, fragments, state_bytes)


def follow_clock(own_steps: int, partner_steps: int, slack_steps: int, own_trained: int, total_steps: int) -> int:
    """Return the global step after a meeting: at most `slack_steps` behind the partner's, less towards the end, and never decreasing.

    A global step is at most `CLOCK_FACTOR` times the steps that its peer has trained itself. The slack lets peers of equal speed follow
    their own steps. Taking the larger of both would be a ratchet: a peer that is ahead by chance moves all others, and the global step
    advances faster than any peer trains.
    """
    slack_steps = min(slack_steps, max(0, total_steps - partner_steps))
    return max(own_steps, min(partner_steps - slack_steps, CLOCK_FACTOR * own_trained, total_steps))
