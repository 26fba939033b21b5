from __future__ import annotations

import pytest
import torch

from benchmarks.codecs import PlainInt4, measure


@pytest.mark.parametrize("size", [1, 128, 1001])
def test_the_yardstick_codes_any_number_of_values(size: int) -> None:
    own = torch.randn(size, generator=torch.Generator().manual_seed(0))
    row = measure(PlainInt4(), (own, own + 1.0), repeats=1)
    assert row["noise"] < 0.1 and row["failed"] == 0.0
