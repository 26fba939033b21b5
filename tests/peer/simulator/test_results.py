from __future__ import annotations

from fractions import Fraction

import pytest

from gossamer.peer.simulator.results import JSON_KEYS, Row, value_text
from tests.peer.simulator.results import result


def test_the_json_has_the_keys_of_the_contract() -> None:
    assert list(result().to_json()) == list(JSON_KEYS)
    assert JSON_KEYS[:4] == ("method", "codec", "peers", "steps")


def test_the_mean_of_the_peers() -> None:
    assert result(eval_loss=(2.0, 3.0)).eval_loss_mean == 2.5


def test_a_row_is_named_by_its_point() -> None:
    assert Row({"learning_rate": 1e-3, "codec": "nf4"}, None).name == "learning_rate 0.001, codec nf4"
    assert Row({}, result(method="diloco")).name == "diloco"


@pytest.mark.parametrize(
    ("value", "text"), [((Fraction(4), Fraction(1, 2)), "4:1/2"), (True, "true"), (5, "5"), (0.25, "0.25"), ("nf4", "nf4")]
)
def test_values_are_written_as_people_write_them(value: object, text: str) -> None:
    assert value_text(value) == text
