"""Each codec sends the bytes that it always sent, and stands in the documents."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gossamer.optim.codecs import CODECS
from tests.optim.codecs.golden import FILE, sent

PAGE = Path(__file__).parents[3] / "docs" / "concepts" / "fragments.md"


def test_every_codec_has_a_golden_payload() -> None:
    assert list(json.loads(FILE.read_text())) == list(CODECS), "see tests/optim/codecs/golden.py"


@pytest.mark.parametrize("name", CODECS)
def test_a_codec_sends_the_same_bytes_as_ever(name: str) -> None:
    assert sent(CODECS[name]) == json.loads(FILE.read_text())[name]


@pytest.mark.parametrize("name", CODECS)
def test_every_codec_is_described(name: str) -> None:
    table = PAGE.read_text().partition("## Codecs")[2].partition("\n## ")[0]
    assert f"`{name}`" in table, f"{PAGE.name} has a table of the codecs"
