"""`peer watch`, on a terminal that is none: what the peer tells is on the screen, and q ends it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from textual.widgets import Sparkline, Static

from gossamer.cli.full_screen import FullScreen
from gossamer.peer.machine.config import LocalSettings, PeerConfig
from gossamer.peer.machine.control_socket import serving
from gossamer.peer.machine.events import ModelBuilt, RunKnown, StepDone
from gossamer.peer.machine.home import Home
from gossamer.peer.machine.runtime_folder import runtime_folder
from gossamer.peer.machine.states import changed
from gossamer.peer.machine.status import Status, apply


def trained() -> Status:
    status = apply(apply(Status(peer_id="12D3KooX", total_steps=100), changed("training")), ModelBuilt(1000, 4.1))
    status = apply(status, RunKnown("ab", 100, "images", "cifar, revision 1a2b3c"))
    for second in range(20):
        status = apply(status, StepDone(second, second, 8 * second, 5 - second / 10, 0.1, 8.0, 1.0, 0.0, 1.0, 0.0, ts=1000.0 + second))
    return status


@pytest.mark.real_time
async def test_the_full_screen_shows_the_answers_of_the_peers(tmp_path: Path) -> None:
    home, status = Home(tmp_path / "home"), trained()
    home.create()
    answers = {"status": status.to_json(), "peers": {"peers": []}, "history": status.history.to_json()}
    answers["config"] = PeerConfig(home=home.path).model_dump(mode="json", include=set(LocalSettings.model_fields))
    view = FullScreen([home.path, tmp_path / "nobody"])
    with runtime_folder(0) as runtime:
        async with serving(home, runtime, lambda request: answers[request["verb"]]), view.run_test(size=(120, 60)) as pilot:
            sentences = [str(panel.render()) for panel in view.query(".sentence").results(Static)]
            assert sentences[0].startswith("training for ")
            assert "no peer is running" in sentences[1]
            assert list(view.query("#loss").results(Sparkline))[0].data == [5 - second / 10 for second in range(20)]
            titles = view.query("#title-tokens_per_second").results(Static)
            assert [str(title.render()) for title in titles] == ["images a second", "a second"]
            assert "1a2b3c" in view.export_screenshot()
            await pilot.press("q")
    assert view.return_code == 0


def test_a_pipe_is_no_terminal(tmp_path: Path) -> None:
    command = [sys.executable, "-P", "-m", "gossamer.cli.main", "watch", "--home", str(tmp_path / "home")]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert "needs a terminal" in done.stderr and "`peer status`" in done.stderr
