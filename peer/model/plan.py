"""What a manifest implies, before any tensor exists: can this build carry it out, how is the model cut, what are the sizes on the wire.

The trainer computes it, and tells the node. A manifest only shapes its names, for another release may know more of them; what is not known
here is refused, never replaced.
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
SAMPLE_VALUES: Final = 1 << 20  # over so many values a codec's bytes per value are those of any large fragment
CLOCK_FACTOR = 4  # a peer's schedule clock never runs faster than this many times its own steps


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
    """Cut a model of these parameter shapes as the manifest says, and name the codec of each fragment."""
    chosen = codec(manifest.codec.name)
    return tuple(FragmentCodec(fragment, chosen) for fragment in fragments(manifest, shapes))


def model_plan(codecs: Sequence[FragmentCodec], alpha: float) -> ModelPlan:
    """Say what these fragments, all with one codec, come to on the wire; momentum is part of a state only where the run has any."""
    fragments = tuple(FragmentTerms(codec.sketch_bytes, codec.payload_bytes, codec.num_blocks) for codec in codecs)
    state_bytes = (4 if alpha > 0.0 else 2) * sum(codec.fragment.numel for codec in codecs)
    return ModelPlan(codecs[0].codec.wire_id, fragments, state_bytes)


def follow_clock(own_steps: int, partner_steps: int, slack_steps: int, own_trained: int, total_steps: int) -> int:
    """Return the schedule clock after a meeting: no more than `slack_steps` behind the partner's, and less towards the end; never back.

    A clock never runs faster than `CLOCK_FACTOR` times the steps that its peer has trained itself. The slack lets equal peers run at their
    own steps: taking the larger clock outright is a ratchet, for whoever is ahead by chance at some meeting moves everybody, and the
    shared clock runs faster than any peer steps.
    """
    slack_steps = min(slack_steps, max(0, total_steps - partner_steps))
    return max(own_steps, min(partner_steps - slack_steps, CLOCK_FACTOR * own_trained, total_steps))
