"""A program's own supervisor that cannot start; with one that runs: tests/api."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gossamer.peer.machine import own_supervisor as module
from gossamer.peer.machine.child import GuestRequest
from gossamer.peer.machine.config import PeerConfig
from gossamer.peer.machine.home import Home
from gossamer.protocol.errors import GossamerError


def test_a_supervisor_that_has_ended_before_it_is_asked_is_the_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def line_after_its_end(self: GuestRequest) -> bytes:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)
        return b"{}\n"

    monkeypatch.setattr(module, "PROGRAM", "gossamer.no_such_program")
    monkeypatch.setattr(GuestRequest, "to_line", line_after_its_end)
    home = Home(tmp_path / "home")
    home.create()
    with pytest.raises(GossamerError, match="the supervisor has ended with exit code 1") as caught:
        module.OwnSupervisor(GuestRequest(config=PeerConfig(home=home.path)))
    assert str(home.log) in caught.value.hint and "no_such_program" in home.log.read_text()
