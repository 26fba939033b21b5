from __future__ import annotations

import pytest

from gossamer.optim.names import look_up, nearest


def test_a_slip_of_the_finger_finds_its_name_first() -> None:
    assert nearest("modulo44", ["fp32", "modulo4", "nf4"]).split(", ")[0] == "modulo4"
    assert nearest("adam", {"adamw": 1, "muon": 2}) == "adamw"


@pytest.mark.parametrize("name", ["", "zzz", "\0"])
def test_there_is_always_something_to_choose_from(name: str) -> None:
    assert nearest(name, ["fp32", "int8"]) == "fp32, int8"


def test_a_table_answers_or_names_the_nearest() -> None:
    assert look_up("thing", "one", {"one": 1}) == 1
    with pytest.raises(ValueError, match="no thing named 'onw'. Did you mean one"):
        look_up("thing", "onw", {"one": 1, "two": 2})
