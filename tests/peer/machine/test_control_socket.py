from __future__ import annotations

import asyncio
import json
import os
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gossamer.peer.machine import control_socket as control
from gossamer.peer.machine.control_socket import NobodyRuns, ask, serving
from gossamer.peer.machine.home import Home
from gossamer.peer.machine.runtime_folder import runtime_folder
from gossamer.peer.machine.status import Status
from gossamer.protocol.errors import BadSettings


@pytest.fixture
def home(tmp_path: Path) -> Home:
    home = Home(tmp_path / "home")
    home.create()
    return home


@pytest.fixture
def runtime() -> Iterator[Path]:
    with runtime_folder(0) as folder:
        yield folder


def answer(request: dict[str, Any]) -> dict[str, Any]:
    return {"heard": request}


def during(home: Home, runtime: Path, work: Callable[[], Any]) -> Any:
    """Do something that blocks, in a thread, while a peer serves its control socket."""

    async def both() -> Any:
        async with asyncio.timeout(30), serving(home, runtime, answer):
            return await asyncio.to_thread(work)

    return asyncio.run(both())


def raw(runtime: Path, sent: bytes) -> bytes:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(20.0)
        connection.connect(str(runtime / control.SOCKET_NAME))
        connection.sendall(sent)
        connection.shutdown(socket.SHUT_WR)
        data = b""
        while more := connection.recv(1000):
            data += more
        return data


def test_a_question_is_answered(home: Home, runtime: Path) -> None:
    assert during(home, runtime, lambda: ask(home.path, {"verb": "status"})) == {"heard": {"verb": "status"}}


@pytest.mark.real_time
async def test_many_questions_at_once(home: Home, runtime: Path) -> None:
    async with asyncio.timeout(30), serving(home, runtime, answer):
        answers = await asyncio.gather(*(asyncio.to_thread(ask, home.path, {"number": number}) for number in range(20)))
    assert answers == [{"heard": {"number": number}} for number in range(20)]


def test_the_running_file_exists_while_the_socket_serves(home: Home, runtime: Path) -> None:
    def look() -> None:
        record = json.loads(home.running.read_text())
        assert record["pid"] == os.getpid()
        assert record["control"] == str(runtime / control.SOCKET_NAME)
        assert record["started"] > 1e9

    during(home, runtime, look)
    assert not home.running.exists()


@pytest.mark.parametrize("sent", [b"", b"\n", b"nonsense\n", b"[]\n", b'{"cut', b"\xff\n", b"x" * (control.LINE_BYTES + 10) + b"\n"])
def test_invalid_requests_do_not_stop_the_server(home: Home, runtime: Path, sent: bytes) -> None:
    def work() -> dict[str, Any]:
        reply = raw(runtime, sent)
        assert reply == b"" or "error" in json.loads(reply)
        return ask(home.path, {"verb": "status"})

    assert during(home, runtime, work) == {"heard": {"verb": "status"}}


def test_a_silent_client_does_not_block_other_clients(home: Home, runtime: Path) -> None:
    def work() -> dict[str, Any]:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as silent:
            silent.connect(str(runtime / control.SOCKET_NAME))
            return ask(home.path, {"verb": "status"})

    assert "heard" in during(home, runtime, work)


def test_no_peer_runs_in_an_empty_home(tmp_path: Path) -> None:
    with pytest.raises(BadSettings, match="no peer is running in") as caught:
        ask(tmp_path, {"verb": "status"})
    assert "peer join" in caught.value.hint


@pytest.mark.parametrize(
    ("status", "hint"),
    [
        ({"state": "done", "program": "images"}, "peer export FOLDER --home"),
        ({"state": "done", "stage": "2 of 3"}, "--with HOME` writes the model, with a home of each other stage"),
        ({"state": "left", "program": "images"}, "start the program of this run, images, again"),
        ({"state": "left", "program": ""}, "start one with `peer join`"),
        ({"state": "training", "own_steps": 5}, "`peer join --home /"),
    ],
)
def test_the_hint_for_a_home_without_a_peer_fits_its_last_state(home: Home, status: dict[str, str | int], hint: str) -> None:
    home.status.write_text(json.dumps(Status().to_json() | status))
    with pytest.raises(NobodyRuns) as caught:
        ask(home.path, {"verb": "status"})
    assert hint in caught.value.hint


@pytest.mark.parametrize("left", ["", "{}", "[]", "not json", '{"control": 5}'])
def test_a_stale_running_file_counts_as_no_peer(home: Home, left: str) -> None:
    home.running.write_text(left)
    with pytest.raises(BadSettings, match="no peer is running"):
        ask(home.path, {"verb": "status"})


def test_a_stale_socket_counts_as_no_peer(home: Home, runtime: Path) -> None:
    path = runtime / control.SOCKET_NAME
    home.running.write_text(json.dumps({"pid": 1, "control": str(path)}))
    with pytest.raises(BadSettings, match="no peer is running"):
        ask(home.path, {"verb": "status"})
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as dead:
        dead.bind(str(path))
    with pytest.raises(BadSettings, match="no peer is running"):
        ask(home.path, {"verb": "status"})


def test_a_peer_that_hangs_is_distinguished_from_none(home: Home, runtime: Path) -> None:
    path = runtime / control.SOCKET_NAME
    home.running.write_text(json.dumps({"pid": 1, "control": str(path)}))
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as hangs:
        hangs.bind(str(path))
        hangs.listen(1)
        with pytest.raises(BadSettings, match="does not answer"):
            ask(home.path, {"verb": "status"}, wait_s=0.05)


@pytest.mark.real_time
async def test_a_peer_that_dies_while_it_is_asked(home: Home, runtime: Path) -> None:
    path = runtime / control.SOCKET_NAME
    home.running.write_text(json.dumps({"pid": 1, "control": str(path)}))
    server = await asyncio.start_unix_server(lambda _, writer: writer.close(), path=str(path))
    async with asyncio.timeout(20), server:
        with pytest.raises(BadSettings):
            await asyncio.to_thread(ask, home.path, {"verb": "status"})


def test_a_peer_that_ends_before_it_answers_is_no_peer(home: Home, runtime: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listening:
        listening.bind(str(runtime / control.SOCKET_NAME))
        listening.listen()
        home.running.write_text(json.dumps({"control": str(runtime / control.SOCKET_NAME)}))

        def end() -> None:
            connection, _ = listening.accept()
            with connection:
                connection.recv(1000)

        ending = threading.Thread(target=end)
        ending.start()
        with pytest.raises(NobodyRuns):
            ask(home.path, {"verb": "status"})
        ending.join()
