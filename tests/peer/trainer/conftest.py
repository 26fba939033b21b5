from __future__ import annotations

import pytest

from gossamer.peer.trainer import stage_loop


@pytest.fixture(autouse=True)
def long_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a stage's loop serve all that waits in one call, however slow the machine is."""
    monkeypatch.setattr(stage_loop, "TURN_S", 60.0)
