"""Where the manifest is kept; how it is asked for is tested with a seed, in test_seed.py."""

from __future__ import annotations

from pathlib import Path

from peer.machine.home import Home
from peer.node.fetching import store_manifest
from protocol.identity import Identity
from protocol.run.manifest import Manifest, SignedManifest


def test_a_stored_manifest_is_read_back_and_leaves_nothing_else(tmp_path: Path) -> None:
    home, host = Home(tmp_path), Identity(b"h" * 32)
    signed = SignedManifest.sign(Manifest().with_host(host.peer_id), host)
    store_manifest(home, signed)
    assert SignedManifest.from_bytes(home.manifest.read_bytes()) == signed
    assert list(tmp_path.iterdir()) == [home.manifest]
