"""A home that a peer left behind on 2026-11-23, before events, settings and status got today's names: today's peer goes on from it.

The archive is never rewritten. It holds what the home keeps between two starts, and the text that the peer trained on.
"""

from __future__ import annotations

import json
import tarfile
from pathlib import Path
from typing import Any

import pytest

from gossamer.cli.local_swarm import local_swarm
from gossamer.peer.machine.events import MeetingDone, StateTransferred, StepDone, read_events
from gossamer.peer.machine.home import Home
from gossamer.peer.machine.status import of_events
from gossamer.peer.meeting.journal import Journal
from gossamer.peer.swarm.address_book import AddressBook
from gossamer.protocol.identity import Identity
from gossamer.protocol.run.invite import Invite
from gossamer.protocol.run.manifest import SignedManifest
from tests.cli.shell import Shell
from tests.peer.waiting import wait_until

ARCHIVE = Path(__file__).parent / "home_of_2026_11_23.tar.xz"
SOURCE = "12D3KooWAfCfFNLt2741XxjRmRFMjN7eoCti1QZZY2mZdn996PxU"
OWN_STEPS, GLOBAL_STEP = 356, 3367  # at its end

SAFELY: Any = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}  # Python before 3.11.4 has no filters


@pytest.fixture
def home(tmp_path: Path) -> Home:
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(tmp_path, **SAFELY)
    (tmp_path / "home").chmod(0o700)
    return Home(tmp_path / "home")


def test_every_event_of_its_log_is_read(home: Home) -> None:
    happened = list(read_events(home.events))
    assert len(happened) == len(home.events.read_bytes().splitlines())
    (transferred,) = (event for event in happened if isinstance(event, StateTransferred))
    assert transferred.sources == (SOURCE,) and transferred.global_step > 0
    assert all(event.route == "local" for event in happened if isinstance(event, MeetingDone) and event.outcome == "completed")
    assert max(event.global_step for event in happened if isinstance(event, StepDone)) == GLOBAL_STEP


def test_its_status_and_its_logs_are_shown(home: Home, capsys: pytest.CaptureFixture[str]) -> None:
    status, last = of_events(read_events(home.events)), home.last_status()
    assert (status.state, status.step, status.own_steps) == ("left", GLOBAL_STEP, OWN_STEPS)
    assert (last["state"], last["step"], last["own_steps"], last["meetings"]) == ("left", GLOBAL_STEP, OWN_STEPS, dict(status.meetings))
    shell = Shell(home.path, capsys)
    assert "its last state: left" in shell("status").complaint[0]
    logs = shell("logs")
    assert logs.code == 0 and "StateTransferred" in logs.out and "StateCloned" not in logs.out


def test_its_documents_and_its_peers_are_read(home: Home) -> None:
    invite = Invite.from_text(home.invite.read_text().strip())
    signed = SignedManifest.from_bytes(home.manifest.read_bytes(), invite.run_id)
    assert signed.manifest().run.total_steps == 20000
    book = AddressBook(Identity.load_or_create(home.identity).peer_id)
    book.load(home.peers, 0.0)
    assert SOURCE in {str(entry.peer_id) for entry in book.known(0.0)}
    decisions = [json.loads(line) for line in home.journal.read_text().splitlines()]
    journal = Journal(home.journal)
    try:
        assert decisions and all(journal.failed_blocks(bytes.fromhex(one["meeting"])) is not None for one in decisions)
    finally:
        journal.close()


@pytest.mark.timeout(180)
def test_a_peer_goes_on_from_its_checkpoint(home: Home, tmp_path: Path) -> None:
    with local_swarm(tmp_path) as swarm:
        text = str(tmp_path / "text.txt")
        peer = swarm.start("home", ["join", "--data", text, "--listen", "127.0.0.1", "--threads", "1", "--devices", "cpu"])

        def own_steps() -> int:
            peer.refresh()
            return int(peer.status["own_steps"]) if peer.status and peer.status["state"] == "training" else 0

        wait_until(lambda: own_steps() > OWN_STEPS, "step after those of the checkpoint", 120)
    status = of_events(read_events(home.events))
    assert status.state == "left" and status.step > GLOBAL_STEP and status.own_steps < GLOBAL_STEP
