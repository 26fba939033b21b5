"""`peer leave`: the running peer is asked, once."""

from __future__ import annotations

from tests.cli.running import Running
from tests.cli.shell import Shell


def test_the_running_peer_is_asked_to_leave(shell: Shell) -> None:
    peer = Running(shell)
    assert peer.during(lambda: shell("leave")).code == 0
    assert [request["verb"] for request in peer.asked] == ["leave"]
