from __future__ import annotations

import os
from pathlib import Path

import pytest

from benchmarks.side_by_side import systems
from benchmarks.side_by_side.__main__ import RATES, main, parser, settings
from benchmarks.side_by_side.estimate import estimate_s, stop_after_s
from benchmarks.side_by_side.results import Setting, keep
from benchmarks.side_by_side.systems import SYSTEMS
from gossamer.protocol.errors import BadSettings
from tests.benchmarks.side_by_side.made import made_run


def test_a_table_is_every_system_on_every_line_and_the_floor_once() -> None:
    listed = settings(parser().parse_args(["faultless", "--inner-steps", "5"]), "none")
    assert len(listed) == (len(SYSTEMS) - 1) * len(RATES) + 1 == len(set(listed))
    assert {one.system for one in listed if one.gossamer_every == "5"} == {"gossamer"}


def test_a_fault_needs_a_system_that_exchanges() -> None:
    listed = settings(parser().parse_args(["killed", "--systems", "floor", "ddp"]), "kill")
    assert [(one.system, one.mbit_per_s) for one in listed] == [("ddp", 20.0)]


def test_only_an_exact_system_is_sampled() -> None:
    for system, fault, expected_s in (("ddp", "none", 100.0), ("ddp", "kill", 900.0), ("torchft", "none", 900.0)):
        assert stop_after_s(Setting(system, 2.0, fault), 900.0, 100.0) == expected_s
    assert estimate_s(Setting("ddp", 2.0), 900.0, 100.0) < 200.0
    assert stop_after_s(Setting("local_sgd", 100.0), 900.0, 100.0) == 900.0  # not worth it


def test_without_root_it_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert main(["faultless", "--results", str(tmp_path / "none.jsonl")]) == 2
    assert "root" in capsys.readouterr().err


def test_a_missing_environment_gives_a_hint_how_to_make_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(systems, "ROOT", tmp_path)
    assert SYSTEMS["ddp"].python()
    with pytest.raises(BadSettings) as raised:
        SYSTEMS["torchft"].python()
    assert raised.value.hint.startswith("python3 -m venv ") and "\n" not in raised.value.hint


def test_tables_and_picture_are_drawn_without_root(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file, drawn = tmp_path / "runs.jsonl", tmp_path / "picture.svg"
    keep(file, made_run("gossamer", 20.0))
    assert main(["report", "--results", str(file)]) == 0
    assert "| 20 Mbit/s | Gossamer | 100 |" in capsys.readouterr().out
    assert main(["picture", str(drawn), "--results", str(file)]) == 0
    assert drawn.read_text().startswith("<svg")
    assert main(["picture", "--results", str(file)]) == 2
