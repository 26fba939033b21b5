"""The plan of a program run: what its manifest and the shapes of any model imply for the wire."""

from __future__ import annotations

import math

from hypothesis import given, settings
from hypothesis import strategies as st

from gossamer.optim.codecs import CODECS
from gossamer.peer.model.abilities import need_abilities
from gossamer.peer.model.plan import fragment_codecs, model_plan
from gossamer.protocol.errors import BadManifest
from gossamer.protocol.messages.terms import RunTerms
from gossamer.run import Run

RESNET = {f"layer{n}.conv.weight": (64 * n, 64, 3, 3) for n in range(1, 5)} | {
    "head.weight": (1000, 512),
    "head.bias": (1000,),
    "scale": (),
}
SHAPES = st.dictionaries(
    st.text("ab.0", min_size=1, max_size=6), st.lists(st.integers(1, 300), max_size=3).map(tuple), min_size=1, max_size=8
)


def run(**settings: dict[str, object]) -> Run:
    return Run("any", 100, settings=settings)


@given(SHAPES, st.sampled_from([*CODECS]), st.sampled_from([0.001, 0.1, 8.0]))
@settings(max_examples=200)
def test_every_model_has_a_plan_within_the_bounds_of_its_manifest(shapes: dict[str, tuple[int, ...]], codec: str, most_mb: float) -> None:
    manifest = run(codec={"name": codec}, fragments={"max_fragment_mb": most_mb}).manifest(shapes)
    need_abilities(manifest)
    try:
        codecs = fragment_codecs(manifest, shapes)
    except BadManifest as error:
        assert "max_fragment_mb" in error.hint
        return
    plan = model_plan(codecs, manifest.outer.alpha)
    assert plan.state_bytes == 2 * sum(map(math.prod, shapes.values()))
    terms = RunTerms.from_manifest(manifest).with_plan(plan)
    assert terms.fragments == plan.fragments
    for fragment in codecs:
        rows = {piece.name for piece in fragment.fragment.pieces}
        if len(rows) > 1:
            plain = 4 * (fragment.fragment.numel - fragment.fragment.num_coded)
            assert fragment.payload_bytes + fragment.sketch_bytes <= 1.1e6 * most_mb + plain + 1000


def test_a_model_without_blocks_is_cut_by_size() -> None:
    whole = fragment_codecs(run().manifest(RESNET), RESNET)
    assert [codec.fragment.name for codec in whole] == ["all"]
    cut = fragment_codecs(run(fragments={"max_fragment_mb": 0.05}).manifest(RESNET), RESNET)
    sizes = [codec.fragment.numel for codec in cut]
    assert len(cut) > 5 and max(sizes) < 2 * min(sizes)


def test_a_large_model_is_planned_without_its_values() -> None:
    large = {f"layers.{n}.mlp.weight": (8192, 28_672) for n in range(80)} | {"temperature": ()}
    codecs = fragment_codecs(run().manifest(large), large)
    assert sum(codec.fragment.numel for codec in codecs) == 80 * 8192 * 28_672 + 1
