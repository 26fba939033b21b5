"""What a peer does when the system removes its runtime folder, as logind does at the end of a user's last session."""

from __future__ import annotations

import asyncio
import os
import shutil
from pathlib import Path

import pytest

from gossamer.peer.machine import runtime_folder
from gossamer.peer.machine.control_socket import SOCKET_NAME, ask
from gossamer.peer.machine.events import Event
from gossamer.peer.machine.home import Home
from gossamer.peer.supervisor.runtime_watch import RuntimeWatch
from tests.peer.supervised import peer, run, until_training
from tests.peer.waiting import eventually


@pytest.mark.parametrize("removed", [".", SOCKET_NAME])
def test_a_peer_whose_runtime_folder_is_removed_makes_it_again_and_meets_on(tmp_path: Path, removed: str) -> None:
    async def test() -> None:
        async with peer(tmp_path) as (running, work):
            await until_training(running)
            folder = running.supervisor.children._runtime
            (folder / removed).unlink() if removed == SOCKET_NAME else shutil.rmtree(folder)
            await eventually(lambda: (folder / SOCKET_NAME).exists() and len(running.lives("node")) == 2, "another node")
            await until_training(running)
            answer = await asyncio.to_thread(ask, running.home.path, {"verb": "status"})
            assert answer["state"] == "training" and len(running.lives("trainer")) == 1 and not work.done()
            assert "enable-linger" in answer["warnings"][-1]
            os.utime(folder, (0.0, 0.0))
            with runtime_folder.runtime_folder(0):
                assert folder.exists(), "a second peer takes it for an orphan"

    run(test())


def test_a_runtime_folder_that_another_user_has_made_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    emitted: list[Event] = []
    watch = RuntimeWatch(Home(tmp_path), tmp_path / "runtime", lambda request: {}, emitted.append)
    (tmp_path / "runtime").mkdir()
    own = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: own + 1)
    assert not asyncio.run(watch.look())
    assert not list((tmp_path / "runtime").iterdir()) and not emitted
