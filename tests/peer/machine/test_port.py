"""The port that a peer takes again."""

from __future__ import annotations

import socket
from pathlib import Path

from gossamer.peer.machine.config import PeerConfig
from gossamer.peer.machine.home import Home
from gossamer.peer.machine.port import free_port, keep_port

ADDRESSES = ["/ip4/127.0.0.1/tcp/{port}/p2p/12D3Koo"]


def unused_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_a_new_home_takes_any_port(tmp_path: Path) -> None:
    assert free_port(Home(tmp_path), "127.0.0.1", None) == 0


def test_the_port_of_last_time_is_taken_again(tmp_path: Path) -> None:
    port = unused_port()
    keep_port(PeerConfig(home=tmp_path), [address.format(port=port) for address in ADDRESSES])
    assert free_port(Home(tmp_path), "127.0.0.1", None) == port


def test_a_busy_usual_port_is_replaced_by_any_free_port(tmp_path: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        keep_port(PeerConfig(home=tmp_path), [f"/ip4/127.0.0.1/tcp/{other.getsockname()[1]}"])
        assert free_port(Home(tmp_path), "127.0.0.1", None) == 0
