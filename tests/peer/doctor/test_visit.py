"""Calling on peers with a real p2pd; a whole doctor beside a real host: tests/e2e."""

from __future__ import annotations

import gc
import socket
from pathlib import Path

from peer.doctor.visit import short_reason
from tests.peer.doctor.cases import case, invite_text


def test_a_bootstrap_that_is_not_there(tmp_path: Path) -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # and does not listen
        text = invite_text(at=f"/ip4/127.0.0.1/tcp/{nobody.getsockname()[1]}")
        visit = case(tmp_path / "home", text).visit()
    gc.collect()  # gRPC's thread ends with its last object
    assert [call.trouble for call in visit.calls] == ["connection refused"]
    assert not (tmp_path / "home").exists()


def test_the_reason_is_found_in_what_p2pd_says() -> None:
    said = "p2pd: failed to dial 12D3: all dials failed * [/ip4/203.0.113.5/tcp/4001] dial tcp4 203.0.113.5:4001: connect: no route to host"
    assert short_reason(said) == "no route to host"
    assert short_reason("something new") == "something new"
