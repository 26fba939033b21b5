"""A form of coding that computes other bits is found before the first meeting, and torch codes in its place."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from gossamer.optim import compiled as forms
from gossamer.optim.codecs import codec
from gossamer.optim.coding_check import settle_coding
from gossamer.optim.compiled import CompiledLibrary, coding_words, compiled_for
from tests.optim.codecs.test_modulo import NAMES
from tests.optim.codings import FORMS

CPU = torch.device("cpu")
needs_compiled = pytest.mark.skipif("compiled" not in FORMS, reason="no C compiler built the compiled part")


@pytest.fixture(autouse=True)
def forms_as_before() -> Iterator[None]:
    before = compiled_for(CPU), coding_words(CPU)
    yield
    forms._forms.clear()
    assert (compiled_for(CPU) is None, coding_words(CPU)) == (before[0] is None, before[1])


@pytest.mark.parametrize("name", [*NAMES, "int8", "fp32"])
def test_this_machine_codes_as_every_other_does(name: str) -> None:
    expected = coding_words(CPU)
    assert settle_coding(codec(name), CPU) == expected


def spoil_gap(own: tuple[Tensor, Tensor, Tensor]) -> None:
    own[0][3, 70] = torch.nextafter(own[0][3, 70], torch.tensor(torch.inf))  # the last bit of one value


def spoil_ties(own: tuple[Tensor, Tensor, Tensor]) -> None:
    own[2].logical_not_()


@needs_compiled
@pytest.mark.parametrize("spoil", [spoil_gap, spoil_ties])
def test_other_bits_of_a_gap_are_found(spoil: Callable[[tuple[Tensor, Tensor, Tensor]], None], monkeypatch: pytest.MonkeyPatch) -> None:
    decode = CompiledLibrary.decode

    def decode_wrongly(library: CompiledLibrary, *arguments: object) -> None:
        decode(library, *arguments)  # type: ignore[arg-type]
        spoil(arguments[-1])  # type: ignore[arg-type]

    monkeypatch.setattr(CompiledLibrary, "decode", decode_wrongly)
    assert settle_coding(codec("modulo4"), CPU) == "torch (compiled computes other bits on cpu)"
    assert compiled_for(CPU) is None


@needs_compiled
def test_a_form_that_fails_is_named_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def encode(*arguments: object) -> None:
        raise FileNotFoundError("no such compiler:\ncc")

    monkeypatch.setattr(CompiledLibrary, "encode", encode)
    assert settle_coding(codec("modulo4"), CPU) == "torch (compiled does not run (no such compiler: cc) on cpu)"
    assert compiled_for(CPU) is None


@needs_compiled
def test_other_bits_of_an_outer_step_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    pair_step = CompiledLibrary.pair_step

    def step_once_rounded(library: CompiledLibrary, *arguments: object) -> tuple[Tensor, Tensor | None, Tensor]:
        slow, momentum, shift = pair_step(library, *arguments)  # type: ignore[arg-type]
        return slow * (1 + 2.0**-23), momentum, shift

    monkeypatch.setattr(CompiledLibrary, "pair_step", step_once_rounded)
    assert settle_coding(codec("modulo8"), CPU).startswith("torch (compiled computes other bits")


def test_a_torch_that_computes_other_bits_ends_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    coder = codec("modulo4")
    gap, calls = coder.gap, iter(range(100))

    def gap_on_a_broken_device(*arguments: object) -> object:
        found = gap(*arguments)  # type: ignore[arg-type]
        if next(calls) % 4 >= 2:  # the first two at each size are the CPU's
            found.values[7] += 1.0
        return found

    monkeypatch.setattr(coder, "gap", gap_on_a_broken_device)
    with pytest.raises(ArithmeticError, match="computes other bits on cpu than on the CPU"):
        settle_coding(coder, CPU)
