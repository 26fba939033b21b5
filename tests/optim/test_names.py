from __future__ import annotations

import pytest

from gossamer.optim.codecs import CODECS
from gossamer.optim.inner import OPTIMIZERS
from gossamer.optim.names import CODEC_NAMES, OPTIMIZER_NAMES, look_up, suggestion


def test_the_names_that_are_known_without_torch_are_those_of_the_tables() -> None:
    assert tuple(CODECS) == CODEC_NAMES
    assert tuple(OPTIMIZERS) == OPTIMIZER_NAMES


def test_a_mistyped_name_is_answered_with_the_closest_first_and_with_all() -> None:
    assert suggestion("modulo44", ["fp32", "modulo4", "nf4"]).startswith("did you mean modulo4")
    assert suggestion("adam", {"adamw": 1, "muon": 2}) == "did you mean adamw? choose from adamw, muon"


@pytest.mark.parametrize("name", ["", "zzz", "\0"])
def test_a_suggestion_is_never_empty(name: str) -> None:
    assert suggestion(name, ["fp32", "int8"]) == "choose from fp32, int8"
    many = [f"key_{number}" for number in range(50)]
    assert suggestion(name, many) == f"choose from {', '.join(many)}"


def test_of_a_long_table_only_the_closest_names_are_listed() -> None:
    assert suggestion("learning_rat", ["learning_rate", *(f"xyz{number}" for number in range(50))]) == "did you mean learning_rate?"


def test_a_table_returns_the_entry_or_suggests_names() -> None:
    assert look_up("thing", "one", {"one": 1}) == 1
    with pytest.raises(ValueError, match="no thing named 'onw': did you mean one"):
        look_up("thing", "onw", {"one": 1, "two": 2})
