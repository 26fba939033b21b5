"""Manifests of program runs: what they state, that nothing of a text run is read from them, and the bounds of every key."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gossamer.protocol import limits
from gossamer.protocol.errors import BadManifest, WrongVersion
from gossamer.protocol.run.layout import by_name, layout_digest
from gossamer.protocol.run.manifest import Manifest, ProgramManifest, SignedManifest, need_text
from tests.protocol.samples import ISSUER

SHAPES = {"head.weight": (10, 128), "head.bias": (10,), "scale": ()}
LAYOUT = layout_digest(by_name(SHAPES))
RUN_ID = "54355429fd565fe56d16f96f66b457ee150c089303e47c72613b343e1cbaecef"


def tables(**changes: Any) -> dict[str, Any]:
    """Return the tables of a program's manifest; a change replaces keys of its section."""
    given: dict[str, Any] = {
        "run": {"name": "cifar", "total_steps": 300},
        "program": {"name": "cifar-resnet", "unit": "images"},
        "model": {"layout": LAYOUT, "shapes": SHAPES},
    }
    for section, keys in changes.items():
        given[section] = given.get(section, {}) | keys
    return given


def program(**changes: Any) -> ProgramManifest:
    return ProgramManifest.checked(tables(**changes))


def fault(**changes: Any) -> str:
    with pytest.raises(BadManifest) as caught:
        program(**changes)
    assert caught.value.hint
    return str(caught.value)


def test_the_run_id_of_a_program_run_does_not_change_by_accident() -> None:
    assert program().run_id.hex() == RUN_ID, "canonical bytes or a default have changed: every existing run gets another id"


def test_it_states_nothing_of_a_text_run() -> None:
    values = json.loads(program().canonical_bytes())
    assert set(values) == {"run", "program", "model", "outer", "fragments", "codec"}
    assert set(values["model"]) == {"layout", "weights", "shapes"}
    for section in ("inner", "data", "tokenizer"):
        assert not hasattr(program(), section)


@pytest.mark.parametrize("changes", [{}, {"program": {"source": "https://a.b/\u00e9", "base": "0" * 64}}, {"model": {"shapes": None}}])
def test_it_survives_round_trips_through_toml_canonical_bytes_and_a_signature(changes: dict[str, Any]) -> None:
    manifest = program(**changes).with_host(ISSUER.peer_id)
    assert ProgramManifest.from_toml(manifest.to_toml()) == manifest
    assert ProgramManifest.from_canonical(manifest.canonical_bytes()) == manifest
    signed = SignedManifest.sign(manifest, ISSUER)
    read = SignedManifest.from_bytes(signed.to_bytes(), manifest.run_id).manifest()
    assert isinstance(read, ProgramManifest) and read == manifest and read.run_id == manifest.run_id


def test_a_later_release_may_add_keys() -> None:
    written = program().canonical_bytes().replace(b'"unit":', b'"queue":7,"unit":')
    read = SignedManifest(written, ISSUER.peer_id, b"").manifest()
    assert isinstance(read, ProgramManifest) and read.program == program().program
    assert read.canonical_bytes() == written


def test_the_order_in_which_a_script_defines_its_tensors_does_not_matter() -> None:
    reordered = dict(reversed(SHAPES.items()))
    assert program(model={"shapes": reordered}).run_id == program().run_id


def test_a_program_run_is_no_text_run_and_the_other_way_round() -> None:
    text = Manifest()
    assert need_text(text) is text
    shown = program(program={"source": "https://example.org/cifar", "revision": "1a2b3c"})
    with pytest.raises(BadManifest) as caught:
        need_text(shown)
    assert str(caught.value).endswith("a program of its members: cifar-resnet, source https://example.org/cifar, revision 1a2b3c")
    assert caught.value.hint == "start that program with this invite"
    for read in (lambda: Manifest.from_toml(shown.to_toml()), lambda: Manifest.from_canonical(shown.canonical_bytes())):
        with pytest.raises(BadManifest, match="the manifest of a program run") as caught:
            read()
        assert caught.value.hint
    with pytest.raises(BadManifest, match="the manifest of a text run, and a program run is wanted"):
        ProgramManifest.from_canonical(text.canonical_bytes())


@pytest.mark.parametrize(
    ("section", "key", "value", "legal"),
    [
        ("program", "name", "", "1 to 200 printable"),
        ("program", "unit", "", "1 to 32 printable"),
        ("program", "unit", "x" * 33, "1 to 32 printable"),
        ("program", "unit", "a\x1b[31m", "1 to 32 printable"),
        ("program", "source", "two\nlines", "0 to 200 printable"),
        ("program", "source", "x" * 201, "0 to 200 printable"),
        ("program", "revision", "\u202e", "0 to 200 printable"),
        ("program", "base", "", "SHA-256 in 64 hex digits"),
        ("model", "layout", "ABC", "SHA-256 in 64 hex digits"),
        ("model", "weights", "abc", "SHA-256 in 64 hex digits"),
        ("model", "shapes", [], "should be a table"),
        ("outer", "gamma", 2.5, "gamma must satisfy"),
    ],
)
def test_an_invalid_value_is_reported_with_its_key_and_the_legal_values(section: str, key: str, value: object, legal: str) -> None:
    reason = fault(**{section: {key: value}})
    assert reason.startswith(f"{section}.{key}")
    assert legal in reason


@pytest.mark.parametrize(
    ("shapes", "reason"),
    [
        ({}, "at least 1 item"),
        ({"a": [0]}, "model.shapes.a.0 is 0: should be greater than or equal to 1"),
        ({"a": [True]}, "model.shapes.a.0 is true: should be a valid integer"),
        ({"a": ["1"]}, "model.shapes.a.0 is "),
        ({"a": [2.0]}, "model.shapes.a.0 is 2.0: should be a valid integer"),
        ({"a": 3}, "model.shapes.a is 3: should be a valid tuple"),
        ({"": [3]}, "1 to 200 printable characters"),
        ({"\u202e": [3]}, "1 to 200 printable characters"),
        ({"a": [limits.PARAMETERS, 2]}, "billion values"),
        ({"a": [limits.PARAMETERS], "b": [1]}, "billion values"),
        ({"a": [limits.PARAMETERS + 1]}, "less than or equal to"),
        ({"a": [limits.PARAMETERS] * 1000}, "billion values"),
        ({f"layer.{number}": [7, 7] for number in range(limits.LAYOUT_CHARS // 8)}, f"at most {limits.LAYOUT_CHARS} characters"),
        ({"head.weight": [10, 128]}, "layout is not the digest of shapes"),
    ],
    ids=lambda value: str(value)[:32],
)
def test_shapes_that_no_model_has_are_refused(shapes: dict[str, Any], reason: str) -> None:
    assert reason in fault(model={"shapes": shapes})


def test_a_founder_begins_with_its_own_weights_and_others_take_them_over() -> None:
    for manifest in (program(), program(model={"weights": "0" * 64})):
        assert manifest.has_start(is_founder=True) and not manifest.has_start(is_founder=False)
    assert all(Manifest().has_start(is_founder=is_founder) for is_founder in (True, False)), "they follow from the seed"
    given = Manifest.checked({"model": {"weights": "0" * 64}})
    assert not any(given.has_start(is_founder=is_founder) for is_founder in (True, False)), "they are given with --model"


def test_a_layout_is_required_and_so_is_a_name() -> None:
    for section, key in (("model", "layout"), ("program", "name")):
        without = tables()
        del without[section][key]
        with pytest.raises(BadManifest, match=f"{section}.{key}"):
            ProgramManifest.checked(without)
    with pytest.raises(BadManifest, match="program"):
        ProgramManifest.checked({"model": tables()["model"]})


@pytest.mark.parametrize(("section", "near"), [("inner", "the legal keys are"), ("modle", "did you mean model?")])
def test_a_section_that_it_does_not_have_is_refused(section: str, near: str) -> None:
    reason = fault(**{section: {"optimizer": "adamw"}})
    assert f"{section} is not a key of a manifest" in reason and near in reason


WORDS = st.text(st.characters(exclude_categories=["C", "Z"]), max_size=32)
NAMES = st.text(st.characters(exclude_categories=["C", "Z"]), min_size=1, max_size=8)
LAYOUTS = st.dictionaries(NAMES, st.lists(st.integers(1, 99), max_size=4).map(tuple), min_size=1, max_size=5)


@given(NAMES, WORDS, WORDS, LAYOUTS)
@settings(max_examples=200)
def test_any_words_and_shapes_survive_round_trips(name: str, source: str, revision: str, shapes: dict[str, tuple[int, ...]]) -> None:
    model = {"layout": layout_digest(by_name(shapes)), "shapes": shapes}
    manifest = ProgramManifest.checked({"program": {"name": name, "source": source, "revision": revision}, "model": model})
    assert ProgramManifest.from_canonical(manifest.canonical_bytes()).run_id == manifest.run_id
    assert ProgramManifest.from_toml(manifest.to_toml()) == manifest
    assert manifest.model.shapes == shapes


@given(st.binary(max_size=60))
@settings(max_examples=200)
def test_a_mutated_program_manifest_raises_only_declared_errors(junk: bytes) -> None:
    canonical = program().canonical_bytes()
    at = sum(junk) % len(canonical)
    try:
        SignedManifest(canonical[:at] + junk + canonical[at + len(junk) :], ISSUER.peer_id, b"").manifest()
    except (BadManifest, WrongVersion) as error:
        assert error.hint
