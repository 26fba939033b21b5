"""The port that a peer takes again."""

from __future__ import annotations

from pathlib import Path

import pytest

from gossamer.peer.machine.config import PeerConfig
from gossamer.peer.machine.home import Home
from gossamer.peer.machine.port import address_and_port, free_port, keep_port
from gossamer.protocol.errors import BadSettings
from tests.unused_port import unused_port

ADDRESSES = ["/ip4/127.0.0.1/tcp/{port}/p2p/12D3Koo"]


def test_a_new_home_takes_any_port(tmp_path: Path) -> None:
    assert free_port(Home(tmp_path), "127.0.0.1", None) == 0


def test_the_port_of_last_time_is_taken_again(tmp_path: Path) -> None:
    port = unused_port()
    keep_port(PeerConfig(home=tmp_path), [address.format(port=port) for address in ADDRESSES])
    assert free_port(Home(tmp_path), "127.0.0.1", None) == port


def test_a_busy_usual_port_is_replaced_by_any_free_port(tmp_path: Path, busy_port: int) -> None:
    keep_port(PeerConfig(home=tmp_path), [f"/ip4/127.0.0.1/tcp/{busy_port}"])
    assert free_port(Home(tmp_path), "127.0.0.1", None) == 0


def test_a_busy_port_is_refused_with_a_hint(tmp_path: Path, busy_port: int) -> None:
    with pytest.raises(BadSettings, match="in use") as caught:
        free_port(Home(tmp_path), "127.0.0.1", busy_port)
    assert "--port" in caught.value.hint


@pytest.mark.parametrize(
    ("listen", "complaint"), [("192.0.2.1", "cannot listen"), ("::ffff:ffff:1", "cannot listen"), ("localhost", "not an IP address")]
)
def test_an_address_that_is_not_of_this_machine_is_refused(listen: str, complaint: str, tmp_path: Path) -> None:
    with pytest.raises(BadSettings, match=complaint) as caught:
        free_port(Home(tmp_path), listen, 0)
    assert caught.value.hint


def test_the_kept_port_survives_a_status_without_addresses(tmp_path: Path) -> None:
    keep_port(PeerConfig(home=tmp_path), ["/ip4/127.0.0.1/tcp/4001"])
    keep_port(PeerConfig(home=tmp_path), [])
    assert (tmp_path / "port").read_text() == "4001"


def test_only_the_own_port_counts(tmp_path: Path) -> None:
    keep_port(PeerConfig(home=tmp_path), ["/ip4/203.0.113.9/tcp/4009/p2p/12D3Koo/p2p-circuit"])
    keep_port(PeerConfig(home=tmp_path, announce=("/ip4/203.0.113.7/tcp/4007",)), ["/ip4/203.0.113.7/tcp/4007"])
    assert not (tmp_path / "port").exists()


@pytest.mark.parametrize("content", ["", "many", "99999999", "-1"])
def test_an_unreadable_port_file_counts_as_none(content: str, tmp_path: Path) -> None:
    (tmp_path / "port").write_text(content)
    assert free_port(Home(tmp_path), "127.0.0.1", None) == 0


@pytest.mark.parametrize(
    ("text", "where"), [("9464", ("127.0.0.1", 9464)), ("0.0.0.0:9464", ("0.0.0.0", 9464)), ("[::1]:9464", ("::1", 9464))]
)
def test_a_port_is_this_machines_unless_an_address_is_given(text: str, where: tuple[str, int]) -> None:
    assert address_and_port(text, "--metrics", "127.0.0.1") == where


@pytest.mark.parametrize("text", ["", "many", "0", "70000", "localhost:9464", "0.0.0.0:"])
def test_an_invalid_address_is_refused_with_a_hint(text: str) -> None:
    with pytest.raises(BadSettings) as caught:
        address_and_port(text, "--metrics", "127.0.0.1")
    assert caught.value.hint
