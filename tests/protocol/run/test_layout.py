from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gossamer.protocol.run.layout import by_name, first_difference, layout_digest

SHAPES = st.dictionaries(st.text("ab.", min_size=1, max_size=4), st.lists(st.integers(1, 9), max_size=3).map(tuple), max_size=6)
ONE = {"head.weight": (10, 128), "head.bias": (10,), "scale": ()}


def test_the_digest_of_a_layout_does_not_change_by_accident() -> None:
    assert layout_digest(ONE) == "7b2f1d2bce8bcac218f5c6174023e05a0586806694bbed5bca71c9e0deb448ae"


def test_the_first_difference_is_named_with_both_shapes() -> None:
    assert first_difference({**ONE, "head.weight": (100, 128)}, ONE) == "head.weight is [10, 128] here, [100, 128] in the run"
    assert first_difference({**ONE, "aux": (3,)}, ONE) == "only the run's has aux [3]"
    assert first_difference(ONE, {**ONE, "aux": ()}) == "only this model has aux []"


@given(SHAPES, SHAPES)
def test_layouts_differ_exactly_where_a_difference_is_named(one: dict[str, tuple[int, ...]], other: dict[str, tuple[int, ...]]) -> None:
    assert bool(first_difference(one, other)) == (layout_digest(by_name(one)) != layout_digest(by_name(other)))
    assert first_difference(one, dict(reversed(one.items()))) == ""
