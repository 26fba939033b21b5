"""A session's settings, the port that it takes again, and how it ends in words: what was reached, and what can be done next."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from cli.session import farewell, keep_port, need_port, settings, usual_port
from peer.machine.config import PeerConfig
from peer.machine.home import Home
from peer.machine.status import Status
from protocol.errors import BadSettings

CONFIG = PeerConfig(home=Path("/home/somebody/peer"))
ADDRESSES = ["/ip4/127.0.0.1/tcp/{port}/p2p/12D3Koo"]


def test_options_become_settings(tmp_path: Path) -> None:
    config = settings(tmp_path, tmp_path / "text", "cpu", 2, listen="127.0.0.1", port=4001, announce=["/ip4/203.0.113.7/tcp/4001"])
    assert (config.home, config.data, config.num_threads, config.listen_port) == (tmp_path, tmp_path / "text", 2, 4001)
    assert config.announce == ("/ip4/203.0.113.7/tcp/4001",)


def test_who_says_when_to_save_is_not_overruled_by_steps(tmp_path: Path) -> None:
    config = settings(tmp_path, listen="127.0.0.1", port=0, announce=None, checkpoint_every_s=600.0)
    assert (config.checkpoint_interval_s, config.checkpoint_interval_steps) == (600.0, None)
    config = settings(tmp_path, listen="127.0.0.1", port=0, announce=None)
    assert (config.checkpoint_interval_s, config.checkpoint_interval_steps) == (60.0, 100)


def test_home_may_begin_with_a_tilde(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert settings(Path("~/peer"), listen="0.0.0.0", port=0, announce=None).home == tmp_path / "peer"


def test_a_device_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadSettings, match="device") as caught:
        settings(tmp_path, device="abacus", listen="0.0.0.0", port=0, announce=None)
    assert caught.value.hint


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_a_new_home_takes_any_port(tmp_path: Path) -> None:
    assert usual_port(Home(tmp_path), "127.0.0.1") == 0


def test_the_port_of_last_time_is_taken_again(tmp_path: Path) -> None:
    port = free_port()
    keep_port(PeerConfig(home=tmp_path), [address.format(port=port) for address in ADDRESSES])
    assert usual_port(Home(tmp_path), "127.0.0.1") == port


def test_a_port_that_is_taken_is_left_alone(tmp_path: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        keep_port(PeerConfig(home=tmp_path), [f"/ip4/127.0.0.1/tcp/{other.getsockname()[1]}"])
        assert usual_port(Home(tmp_path), "127.0.0.1") == 0


def test_a_busy_port_is_refused_with_a_hint() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        with pytest.raises(BadSettings, match="in use") as caught:
            need_port("127.0.0.1", other.getsockname()[1])
    assert "--port" in caught.value.hint


@pytest.mark.parametrize(
    ("listen", "complaint"), [("192.0.2.1", "cannot listen"), ("::ffff:ffff:1", "cannot listen"), ("localhost", "not an IP address")]
)
def test_an_address_that_is_not_of_this_machine_is_refused(listen: str, complaint: str) -> None:
    with pytest.raises(BadSettings, match=complaint) as caught:
        need_port(listen, 0)
    assert caught.value.hint


def test_a_peer_that_is_not_up_yet_forgets_nothing(tmp_path: Path) -> None:
    keep_port(PeerConfig(home=tmp_path), ["/ip4/127.0.0.1/tcp/4001"])
    keep_port(PeerConfig(home=tmp_path), [])
    assert (tmp_path / "port").read_text() == "4001"


def test_only_the_own_port_counts(tmp_path: Path) -> None:
    keep_port(PeerConfig(home=tmp_path), ["/ip4/203.0.113.9/tcp/4009/p2p/12D3Koo/p2p-circuit"])
    keep_port(PeerConfig(home=tmp_path, announce=("/ip4/203.0.113.7/tcp/4007",)), ["/ip4/203.0.113.7/tcp/4007"])
    assert not (tmp_path / "port").exists()


@pytest.mark.parametrize("content", ["", "many", "99999999", "-1"])
def test_nonsense_counts_as_nothing(content: str, tmp_path: Path) -> None:
    (tmp_path / "port").write_text(content)
    assert usual_port(Home(tmp_path), "127.0.0.1") == 0


def test_the_end_of_the_run_leads_to_the_model() -> None:
    said = farewell(Status(state="done", step=800, total_steps=800, loss=2.04), CONFIG)
    assert said.startswith("the run is over: step 800 of 800, loss 2.040\nhint: ")
    assert "peer export FOLDER --home /home/somebody/peer" in said


def test_leaving_says_how_to_come_back() -> None:
    said = farewell(Status(state="left", step=12, total_steps=800), CONFIG)
    assert said.startswith("left the run: step 12 of 800, loss -\nhint: ")
    assert "peer join --home /home/somebody/peer" in said
