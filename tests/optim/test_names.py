from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from optim.names import nearest


def test_a_slip_of_the_finger_finds_its_name_first() -> None:
    assert nearest("modulo44", ["fp32", "modulo4", "nf4"]).split(", ")[0] == "modulo4"
    assert nearest("adam", {"adamw": 1, "muon": 2}) == "adamw"


@given(st.text(), st.lists(st.sampled_from(["fp32", "int8", "modulo4", "topk"]), min_size=1, unique=True))
def test_there_is_always_something_to_choose_from(name: str, names: list[str]) -> None:
    found = nearest(name, names).split(", ")
    assert found and set(found) <= set(names)
