"""The finished runs of a sweep, after an interruption at any place."""

from __future__ import annotations

from pathlib import Path

from gossamer.peer.simulator.kept_runs import KeptRuns
from gossamer.peer.simulator.results import Row
from tests.peer.simulator.results import result
from tests.peer.simulator.swarms import small_scenario


def test_a_run_is_kept_behind_a_line_that_was_cut(tmp_path: Path) -> None:
    kept = KeptRuns(tmp_path, [small_scenario()], None)
    kept.add(1, Row({}, result()))
    assert kept.read() == {1: (result(), "")}
    [file] = tmp_path.iterdir()
    file.write_text(file.read_text()[:-20])
    kept.add(2, Row({}, None, "diverged"))
    assert kept.read() == {2: (None, "diverged")}
    kept.remove()
    assert kept.read() == {}
