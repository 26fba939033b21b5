"""How a session ends, in words: what was reached, and what can be done next."""

from __future__ import annotations

from pathlib import Path

from cli.session import farewell
from peer.machine.config import PeerConfig
from peer.machine.status import Status

CONFIG = PeerConfig(home=Path("/home/somebody/peer"))


def test_the_end_of_the_run_leads_to_the_model() -> None:
    said = farewell(Status(state="done", step=800, total_steps=800, loss=2.04), CONFIG)
    assert said.startswith("the run is over: step 800 of 800, loss 2.040\nhint: ")
    assert "peer export FOLDER --home /home/somebody/peer" in said


def test_leaving_says_how_to_come_back() -> None:
    said = farewell(Status(state="left", step=12, total_steps=800), CONFIG)
    assert said.startswith("left the run: step 12 of 800, loss -\nhint: ")
    assert "peer join --home /home/somebody/peer" in said
