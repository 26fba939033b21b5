"""The demo's folder: its own and removed, or the operator's and kept; its forecast. A whole demo runs in tests/e2e/test_demo.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from gossamer.cli.demo import Forecast, demo_folder
from gossamer.peer.supervisor.children import ChildFailed
from gossamer.protocol.errors import BadSettings, ExitCode


def test_a_temporary_folder_is_removed_whatever_happens() -> None:
    seen: list[Path] = []
    with pytest.raises(KeyboardInterrupt), demo_folder(None) as folder:
        seen.append(folder)
        (folder / "peer-1").mkdir()
        raise KeyboardInterrupt
    assert not seen[0].exists()


@pytest.mark.parametrize(("code", "is_kept"), [(ExitCode.OUR_FAULT, True), (ExitCode.BAD_INPUT, False)])
def test_the_folder_is_kept_after_a_bug(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: ExitCode, is_kept: bool) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with pytest.raises(ChildFailed), demo_folder(None) as folder:
        raise ChildFailed("peer-1 stopped", hint=f"its folder is {folder}", exit_code=code)
    assert folder.exists() == is_kept


def test_a_given_folder_is_kept(tmp_path: Path) -> None:
    with demo_folder(tmp_path / "kept") as folder:
        assert folder == tmp_path / "kept"
    assert folder.is_dir()


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(BadSettings, match="file"), demo_folder(tmp_path / "file"):
        pass


def test_the_forecast_is_given_once_after_the_first_steps_of_the_slowest_peer() -> None:
    forecast = Forecast(total_steps=600, num_peers=4, started_s=100.0)

    def announced(*steps: int, at: float) -> str:
        return forecast.sentence([{"step": step} if step else {} for step in steps], at)

    assert not announced(0, 5, at=110.0)
    assert not announced(1, 9, at=120.0)  # all train now
    assert not announced(30, 40, at=149.0)
    assert announced(31, 41, at=150.0) == "about 12 minutes in all on this machine"  # 50 s so far, 569 of training, 90 of measuring
    assert not announced(32, 42, at=151.0)


def test_a_short_demo_takes_about_a_minute() -> None:
    forecast = Forecast(total_steps=20, num_peers=2, started_s=0.0)
    forecast.sentence([{"step": 1}], 20.0)
    assert forecast.sentence([{"step": 11}], 21.0) == "about a minute in all on this machine"
