"""Examinations for tests: a home, an invite, and what one check says of them."""

from __future__ import annotations

import time
from pathlib import Path

from gossamer.peer.doctor.case import Case
from gossamer.peer.doctor.examination import CHECKS, examine
from gossamer.peer.doctor.finding import Finding
from gossamer.peer.machine.config import LocalSettings
from gossamer.peer.machine.home import Home
from gossamer.protocol.identity import Identity, PeerId
from gossamer.protocol.run.invite import Invite
from gossamer.protocol.run.manifest import Manifest, SignedManifest

HOST = Identity(b"h" * 32)
SIGNED = SignedManifest.sign(Manifest().with_host(HOST.peer_id), HOST)
HOUR_S = 3600


def invite_text(*, subject: PeerId | None = None, lifetime_s: int = 30 * 24 * HOUR_S, at: str = "/ip4/127.0.0.1/tcp/4001") -> str:
    address = f"{at}/p2p/{HOST.peer_id}"
    return Invite.issue(HOST, SIGNED.run_id, (address,), subject, int(time.time()) + lifetime_s).to_text()


def case(home: Path, invite: str | None = None, devices: str = "cpu", listen: str = "127.0.0.1", port: int | None = None) -> Case:
    return Case(Home(home), invite, LocalSettings(devices=devices, listen=listen), port)


def examined(check: str, of: Case) -> Finding:
    """Return what the check that is shown under this name finds."""
    return dict(examine(of, {check: CHECKS[check]}))[check]


def made_home(path: Path) -> Home:
    home = Home(path)
    home.create()
    Identity.load_or_create(home.identity)
    return home
