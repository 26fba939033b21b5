"""Calling on peers over real p2pds: on one that answers, and on one that is not there."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import random
import socket
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gossamer.peer.doctor.finding import Level
from gossamer.peer.doctor.network_checks import bootstraps, clock
from gossamer.peer.doctor.visit import Call, CallRound
from gossamer.peer.machine.home import write_whole
from gossamer.peer.node.dispatcher import Dispatcher
from gossamer.peer.swarm.address_book import AddressBook
from gossamer.peer.swarm.peer_exchange import PeerExchange
from gossamer.peer.swarm.swarm_time import SwarmTime
from gossamer.peer.sync.server import FetchServer
from gossamer.protocol.libp2p.p2pd import Daemon, DaemonSettings
from gossamer.protocol.libp2p.splice import CarriedBytes
from gossamer.protocol.libp2p.tunnel import tunnel_transport
from gossamer.protocol.messages.terms import RunTerms
from gossamer.protocol.streams.admission import Admission
from gossamer.protocol.streams.transport import Purpose
from tests.peer.doctor.cases import HOST, SIGNED, case, invite_text

VISIT = """
import json, sys
from dataclasses import asdict
from pathlib import Path
from tests.peer.doctor.cases import case
said = []
for text in sys.argv[2:]:
    visit = case(Path(sys.argv[1]), text).visit()
    call = visit.calls[0]
    run_id = visit.manifest.run_id.hex() if visit.manifest else ""
    seen = [call.clock_ahead_s, call.observed, call.is_open, visit.line]
    said.append([visit.trouble, call.trouble, str(call.refused or ""), run_id, *seen])
print(json.dumps(said))
"""


async def reply_of_one_that_answers(home: Path, clock_ahead_s: float, lifetimes_s: Sequence[int]) -> list[Any]:
    """Call on a peer whose clock is so far ahead, with invites that are good for so long."""
    with tempfile.TemporaryDirectory() as short:
        key, folder = Path(short) / "key", Path(short) / "net"
        write_whole(key, HOST.to_bytes())
        terms = RunTerms.from_manifest(SIGNED.manifest())
        peer_exchange = PeerExchange(terms, AddressBook(HOST.peer_id), SwarmTime(lambda: time.time() + clock_ahead_s), random.Random(0))
        server = FetchServer(HOST, terms, SIGNED.to_bytes(), time.time, peer_exchange)
        dispatcher = Dispatcher(AddressBook(HOST.peer_id), "not yet", {Purpose.FETCH: server.answer}.get)
        async with (
            Daemon(DaemonSettings(key, folder, "127.0.0.1")) as daemon,
            tunnel_transport(daemon.control, folder, dispatcher.answer, Admission(), CarriedBytes()),
        ):
            return await looked_around(home, [invite_text(at=daemon.addresses[0], lifetime_s=lifetime_s) for lifetime_s in lifetimes_s])


def test_a_bootstrap_that_answers_members_and_whose_clock_is_an_hour_behind(tmp_path: Path) -> None:
    member, stranger = asyncio.run(reply_of_one_that_answers(tmp_path / "home", -3600.0, [3600, -3600]))
    gc.collect()  # gRPC's thread ends with its last object
    run_id, ahead_s, observed, is_open, line = member[3:]
    assert member[:3] == ["", "", ""] and run_id == SIGNED.run_id.hex()
    assert clock([ahead_s]).level is Level.WARN and -3605 < ahead_s < -3595
    assert observed.startswith("/ip4/127.0.0.1/tcp/") and is_open is None, "it is on the same machine"
    assert min(line) > 1e5
    assert stranger[:2] == ["", ""] and "an expired invite" in stranger[2] and not stranger[3]
    assert not (tmp_path / "home").exists()


async def looked_around(home: Path, texts: Sequence[str]) -> list[Any]:
    """Let another process look: gRPC knows one event loop a process."""
    command = [sys.executable, "-c", VISIT, str(home), *texts]
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE, env={**os.environ, "OMP_NUM_THREADS": "1"})
    output, _ = await process.communicate()
    answer: list[Any] = json.loads(output)
    return answer


def test_a_bootstrap_that_is_not_there(tmp_path: Path) -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # and does not listen
        text = invite_text(at=f"/ip4/127.0.0.1/tcp/{nobody.getsockname()[1]}")
        visit = case(tmp_path / "home", text).visit()
    gc.collect()
    assert not visit.trouble
    assert [call.trouble for call in visit.calls] == ["connection refused"]
    assert not (tmp_path / "home").exists()


def test_an_unroutable_bootstrap_fails(tmp_path: Path) -> None:
    visit = case(tmp_path / "home", invite_text(at="/ip6/2001:db8::1/tcp/4001")).visit()  # of documentation: nobody has a route
    gc.collect()
    assert visit.calls[0].trouble in ("network is unreachable", "no route to host", "i/o timeout")
    finding = bootstraps(visit)
    assert finding.level is Level.FAIL and visit.calls[0].trouble in finding.found


def test_without_an_invite_no_peer_is_called(tmp_path: Path) -> None:
    assert case(tmp_path / "home").visit() == CallRound()


def test_an_unreadable_invite_causes_no_call(tmp_path: Path) -> None:
    assert "nobody can be asked" in case(tmp_path / "home", "hello").visit().trouble


def test_a_peer_is_named_by_the_end_of_its_id_and_its_address() -> None:
    call = Call(f"/ip4/203.0.113.5/tcp/4001/p2p/{HOST.peer_id}")
    assert call.name == f"{str(HOST.peer_id)[-6:]} at 203.0.113.5:4001"
