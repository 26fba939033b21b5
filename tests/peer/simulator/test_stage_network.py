"""Where a staged run pays, against rows that were computed by hand for the design of stages."""

from __future__ import annotations

from typing import Any

import pytest

from gossamer.peer.simulator.stage_network import LINES_MBIT, StagedModel, hidden_size_of, report
from gossamer.protocol.errors import BadSettings

MODULO4 = 4.18
B1 = StagedModel(1.2e9, 16, 2048, 3, MODULO4)
B8 = StagedModel(8.03e9, 32, 4096, 6, MODULO4)
B70 = StagedModel(70.6e9, 80, 8192, 52, MODULO4)


def row(model: StagedModel, device: str, mbit: float, activations: str = "int8") -> dict[str, Any]:
    found = report(model, LINES_MBIT, activations)
    return next(row for row in found["rows"] if row["device"].startswith(device) and row["line_mbit"] == mbit)


@pytest.mark.parametrize(
    ("model", "device", "tokens_per_s", "int8_mbit", "int4_mbit", "uses"),
    [
        (B1, "laptop", 31, 1.06, 0.545, (1, 1, 1)),
        (B1, "GPU, 8", 5_000, 169, 87, (0.12, 0.59, 1)),
        (B8, "RTX 3090", 2_620, 177, 91, (0.11, 0.57, 1)),
        (B8, "RTX 4090", 6_160, 417, 215, (0.05, 0.24, 1)),
        (B70, "RTX 3090", 2_580, 349, 180, (0.06, 0.29, 1)),
    ],
)
def test_the_rows_of_the_design(
    model: StagedModel, device: str, tokens_per_s: float, int8_mbit: float, int4_mbit: float, uses: tuple[float, ...]
) -> None:
    rows = [row(model, device, mbit) for mbit in LINES_MBIT]
    assert rows[0]["tokens_per_second"] == pytest.approx(tokens_per_s, rel=0.01)
    for name, mbit in (("int8", int8_mbit), ("int4", int4_mbit)):
        assert rows[0]["formats"][name]["full_use_mbit"] == pytest.approx(mbit, rel=0.01)
    assert [each["formats"]["int8"]["use"] for each in rows] == pytest.approx(uses, abs=0.006)


@pytest.mark.parametrize(("hidden", "per_token"), [(768, (1536, 792, 408)), (2048, (4096, 2112, 1088)), (8192, (16384, 8448, 4352))])
def test_the_bytes_of_a_token_and_hop(hidden: int, per_token: tuple[int, ...]) -> None:
    model = StagedModel(1e9, 12, hidden, 3, MODULO4)
    assert tuple(model.token_bytes(name, 2)[0] for name in ("bf16", "int8", "int4")) == per_token
    sent, received = model.token_bytes("int8", 1)
    assert sent == received == 2 * per_token[1] + 4


@pytest.mark.parametrize(("num_params", "hidden", "kilobytes", "times"), [(1.2e9, 2048, 0.68, 6), (8.03e9, 4096, 4.6, 1.8)])
def test_a_whole_model_sends_a_part_of_it(num_params: float, hidden: int, kilobytes: float, times: float) -> None:
    """Meetings every 10 steps of 131072 tokens, in modulo4; two sends in int8."""
    model = StagedModel(num_params, 32, hidden, 4, MODULO4)
    assert model.whole_bytes_per_token / 1e3 == pytest.approx(kilobytes, rel=0.02)
    assert model.token_bytes("int8", 1)[0] / model.whole_bytes_per_token == pytest.approx(times, rel=0.05)


def test_what_fits_whole_and_what_a_line_cannot_feed_is_advised_against() -> None:
    assert row(B1, "RTX 3090", 1000.0)["verdict"] == "do not: it fits whole"
    assert row(B8, "RTX 4090", 20.0)["verdict"] == "do not: 5 % of the device"
    assert row(B8, "RTX 3090", 100.0)["verdict"] == "57 % of the device"
    assert row(B8, "GPU, 8", 100.0)["verdict"] == "does not fit: 11 stages at least"
    assert row(B8, "RTX 4090", 100.0, "int4")["verdict"] == "47 % of the device"


def test_two_stages_have_no_middle_and_each_sends_half() -> None:
    two = StagedModel(8.03e9, 32, 4096, 2, MODULO4)
    assert set(report(two, LINES_MBIT, "int8")["bytes_per_token"]["int8"]) == {"first", "last"}
    assert two.token_bytes("int8", two.busiest_stage) == (4228, 4224)


def test_a_model_that_cannot_be_cut_and_unknown_activations_are_refused() -> None:
    with pytest.raises(BadSettings, match="12 layers cannot be cut into 13 stages"):
        StagedModel(1e9, 12, 768, 13, MODULO4)
    with pytest.raises(BadSettings, match="no activations 'int3'"):
        report(B1, LINES_MBIT, "int3")


def test_the_width_of_a_model_follows_from_its_size() -> None:
    assert [hidden_size_of(*size) for size in ((8.03e9, 32), (70.6e9, 80))] == pytest.approx([4096, 8192], rel=0.05)
