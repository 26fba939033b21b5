from __future__ import annotations

import socket

import pytest

from gossamer.cli.dashboard import invite_link, listening, listening_for_all, public_url
from gossamer.peer.machine.home import Home
from gossamer.peer.machine.status import Status
from gossamer.protocol.errors import BadSettings
from gossamer.protocol.identity import Identity
from gossamer.protocol.run.invite import Invite
from gossamer.protocol.run.manifest import SignedManifest
from tests.cli.running import ADDRESS, Running
from tests.cli.shell import CommandResult, Shell
from tests.unused_port import unused_port


def test_the_page_listens_on_this_machine_alone() -> None:
    with listening(0) as listener:
        assert listener.getsockname()[0] == "127.0.0.1"


def test_a_busy_port_is_refused_with_a_hint(busy_port: int) -> None:
    with pytest.raises(BadSettings, match="in use") as caught:
        listening(busy_port)
    assert "--port" in caught.value.hint


def test_the_public_page_listens_at_every_address_or_at_the_one_that_is_given() -> None:
    with listening_for_all(str(unused_port())) as listener:
        port = listener.getsockname()[1]
        assert public_url(listener, "run.example") == f"http://run.example:{port}/"
        socket.create_connection(("127.0.0.1", port)).close()
    with listening_for_all(f"127.0.0.1:{unused_port()}") as listener:
        port = listener.getsockname()[1]
        assert public_url(listener, "run.example") == f"http://127.0.0.1:{port}/"


def test_a_public_port_that_is_busy_or_none_is_refused_with_a_hint(busy_port: int) -> None:
    with pytest.raises(BadSettings, match="in use") as caught:
        listening_for_all(f"127.0.0.1:{busy_port}")
    assert "--public" in caught.value.hint
    with pytest.raises(BadSettings, match="not an IP address"):
        listening_for_all("run.example:8080")


def test_an_invite_on_the_page_needs_an_issuer(shell: Shell, host: Identity) -> None:
    home = Home(shell.home)
    with pytest.raises(BadSettings, match="no bootstrap address"):
        invite_link(home, None)
    peer = Running(shell)
    peer.status = Status(addresses=[f"{ADDRESS}/p2p/{host.peer_id}"])
    links: list[str] = []

    def asks() -> CommandResult:
        links.append(invite_link(home, 3))
        return CommandResult(0, "", "")

    peer.during(asks)
    assert Invite.from_text(links[0]).run_id == SignedManifest.from_bytes(home.manifest.read_bytes()).run_id
    home.identity.unlink()
    with pytest.raises(BadSettings, match="may not write invites"):
        invite_link(home, None)


@pytest.mark.usefixtures("host")
def test_a_public_address_that_cannot_be_is_refused_before_anything_is_printed_or_issued(shell: Shell) -> None:
    result = shell("dashboard", "--public", "99999", "--invite")
    assert (result.code, result.out) == (2, "") and "is not a port" in result.complaint[0]
    assert not Home(shell.home).invites.exists()
