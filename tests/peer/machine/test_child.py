"""Settings on their way to a child; what a child does with them is tested from the other side, in test_child_process.py."""

from __future__ import annotations

from pathlib import Path

from peer.machine.child import ChildSettings
from peer.machine.config import PeerConfig


def test_settings_cross_the_pipe_whole() -> None:
    config = PeerConfig(home=Path("/some home"), data=Path("text"), announce=("/ip4/1.2.3.4/tcp/5",), num_threads=3, alone=True)
    settings = ChildSettings(config=config, peer_id="12D3KooX", runtime=Path("/run/x"), told_to_start=True)
    line = settings.to_line()
    assert line.count(b"\n") == 1
    assert line.endswith(b"\n")
    assert ChildSettings.model_validate_json(line) == settings
