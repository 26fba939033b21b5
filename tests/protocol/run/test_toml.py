from __future__ import annotations

import tomllib
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, Field

from gossamer.protocol.run.toml import write_toml

KEYS = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
PLAIN = st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False, allow_infinity=False) | KEYS
VALUES = st.recursive(PLAIN, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3), max_leaves=8)


class Section(BaseModel):
    """A table for these tests."""

    number: float = Field(default=1e-5, description="a number")
    absent: str | None = Field(default=None, description="nothing")
    table: dict[str, Any] = Field(default_factory=dict, description="a table")
    last: tuple[str, ...] = Field(default=(), description="a list")


class Document(BaseModel):
    """A document for these tests."""

    first: Section = Section()
    second: Section = Section()


@given(st.dictionaries(KEYS, VALUES, max_size=4), st.lists(KEYS, max_size=3))
@settings(max_examples=200)
def test_values_survive_a_round_trip(table: dict[str, Any], texts: list[str]) -> None:
    document = Document(first=Section(table=table, last=tuple(texts)))
    read = tomllib.loads(write_toml("A title.", dict(document)))
    assert read["first"]["table"] == table
    assert read["first"]["last"] == texts
    assert read["second"] == {"number": 1e-5, "last": [], "table": {}}


def test_every_key_has_its_comment_including_absent_values() -> None:
    lines = write_toml("A title.", dict(Document())).splitlines()
    assert lines[0] == "# A title."
    assert lines[lines.index("number = 1e-05") - 1] == "# a number"
    assert lines[lines.index("# absent =") - 1] == "# nothing"


def test_a_value_without_a_toml_form_raises_type_error() -> None:
    with pytest.raises(TypeError, match="TOML has no NoneType"):
        write_toml("A title.", {"first": Section(table={"a": None})})
