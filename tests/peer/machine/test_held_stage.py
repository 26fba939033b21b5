"""Which stage a peer may be asked to hold."""

from __future__ import annotations

from pathlib import Path

import pytest

from gossamer.peer.machine.held_stage import held_stage, need_stage
from gossamer.peer.machine.home import Home
from gossamer.protocol.errors import BadSettings
from gossamer.protocol.run.manifest import Manifest

WHOLE = Manifest.checked({"run": {"access": "open"}})
STAGED = Manifest.checked({"stages": {"count": 3}})


@pytest.fixture
def home(tmp_path: Path) -> Home:
    made = Home(tmp_path)
    made.create()
    return made


@pytest.mark.parametrize(
    ("manifest", "wanted", "words", "hint"),
    [
        (WHOLE, 1, "--stage 1: this run has no stages", "leave out --stage"),
        (STAGED, 4, "there is no stage 4: the model is cut into 3 stages", "from 1 to 3"),
    ],
)
def test_a_stage_that_does_not_exist_is_refused(home: Home, manifest: Manifest, wanted: int, words: str, hint: str) -> None:
    with pytest.raises(BadSettings, match=words) as caught:
        need_stage(manifest, home, wanted)
    assert hint in caught.value.hint


def test_a_home_with_weights_of_one_stage_takes_no_other(home: Home) -> None:
    home.stage.write_text("2\n")
    need_stage(STAGED, home, 3)  # nothing was trained yet
    (home.checkpoints / "step-1").write_bytes(b"weights")
    need_stage(STAGED, home, 2)
    need_stage(STAGED, home, None)
    with pytest.raises(BadSettings, match="holds weights of stage 2, not of stage 3") as caught:
        need_stage(STAGED, home, 3)
    assert "--home DIR" in caught.value.hint
    assert held_stage(home) == 2
