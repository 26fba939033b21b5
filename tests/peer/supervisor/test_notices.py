"""Notices: each condition once, by command or URL, and a way that fails costs the peer nothing."""

from __future__ import annotations

import asyncio
import http.server
import socket
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from gossamer.peer.machine.config import LocalSettings, peer_config
from gossamer.peer.machine.control_socket import ask
from gossamer.peer.machine.events import Event, Warned
from gossamer.peer.machine.status import Status
from gossamer.peer.supervisor import notices as module
from gossamer.peer.supervisor.notices import ALONE_S, MOST_WAITING, Notice, NoticeBoard, Notices
from gossamer.protocol.errors import BadSettings
from tests.peer.supervised import peer, run, until_training
from tests.peer.waiting import eventually

TRAINING = Status(state="training", reason="meeting others", way_out="ends with the run", peers_seen=2)
SCRIPT = '#!/bin/sh\nprintf "%s|%s|%s\\n" "$GOSSAMER_NOTICE" "$1" "$2" >> {log}\n'
NOTICE = [Notice("limit", "paused: it's full")]


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """The file to which the command `tmp_path/tell` appends."""
    (tmp_path / "tell").write_text(SCRIPT.format(log=tmp_path / "log"))
    (tmp_path / "tell").chmod(0o700)
    return tmp_path / "log"


def sent(way: str, *batches: list[Notice]) -> list[Event]:
    """Send notices, and return the events of that."""
    emitted: list[Event] = []

    async def main() -> None:
        notices = Notices(emitted.append)
        for batch in batches:
            notices._send(way, Status(peer_id="12345abc", run_name="demo"), batch)
        await notices.close()

    run(main())
    return emitted


def test_each_condition_is_told_once_until_it_has_ended() -> None:
    board = NoticeBoard()
    assert board.look(TRAINING, False, 0.0) == []
    warned = replace(TRAINING, warned={"disk": "nearly full", "version": "", "notify": "cannot be sent"})
    assert board.look(warned, False, 1.0) == [("warning", "nearly full")]
    assert board.look(replace(warned, warned={"disk": "99 MB are free"}), False, 2.0) == []
    assert board.look(TRAINING, False, 3.0) == []
    assert board.look(warned, False, 3700.0) == [("warning", "nearly full")]
    paused = replace(TRAINING, state="paused", reason="traffic is used up", way_out="ends by itself")
    assert board.look(paused, False, 3705.0) == [], "the operator's own pause"
    assert board.look(paused, True, 3706.0) == [("limit", "paused: traffic is used up; ends by itself")]
    assert board.look(paused, True, 3707.0) == []
    failed = replace(TRAINING, state="failed", reason="revoked", way_out="ask the host")
    assert board.look(failed, False, 3708.0) == [("failed", "revoked; ask the host")]


def test_an_hour_alone_is_told_and_a_partner_in_between_starts_the_hour_again() -> None:
    board, alone = NoticeBoard(), replace(TRAINING, peers_seen=0)
    assert board.look(alone, False, 0.0) == []
    assert board.look(TRAINING, False, ALONE_S - 1) == []
    assert board.look(alone, False, ALONE_S) == []
    assert board.look(alone, False, 2 * ALONE_S - 1) == []
    assert [notice.kind for notice in board.look(alone, False, 2 * ALONE_S)] == ["alone"]
    assert board.look(alone, False, 3 * ALONE_S) == []


def test_a_command_gets_kind_and_text_without_a_shell_in_between(tmp_path: Path, log: Path) -> None:
    hostile = [Notice("warning", "$(touch gone); `id` 'quoted'\nsecond line --option @file")]
    assert sent(f"{tmp_path / 'tell'} 'two words'", NOTICE, hostile) == []
    assert log.read_text() == (
        "limit|two words|Gossamer: demo, peer 345abc: paused: its full\n"
        "warning|two words|Gossamer: demo, peer 345abc: touch gone id quoted second line --option @file\n"
    )


@pytest.mark.parametrize("name", ["--config=/tmp/x", "@/etc/passwd", "$(touch gone)", "; rm x #", "-d"])
def test_the_name_of_a_run_is_no_option_and_no_command(tmp_path: Path, log: Path, name: str) -> None:
    async def main() -> None:
        notices = Notices(lambda event: None)
        notices.test(Status(run_name=name), f"{tmp_path / 'tell'} x")
        await notices.close()

    run(main())
    (line,) = log.read_text().splitlines()
    assert line.startswith("test|x|Gossamer: ") and not set("$();#`=") & set(line)


def test_a_condition_that_flaps_is_told_once_an_hour() -> None:
    board, warned = NoticeBoard(), replace(TRAINING, warned={"disk": "nearly full"})
    told = [notice for second in range(0, 7300, 2) for status in (warned, TRAINING) for notice in board.look(status, False, float(second))]
    assert len(told) == 3
    assert len(board.look(warned, False, 9000.0)) == 0
    assert len(board.look(warned, False, 11_000.0)) == 1, "still in force an hour later, and not told since"


def test_the_end_of_a_peer_waits_seconds_for_its_notices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CLOSE_S", 0.2)

    async def main() -> float:
        notices, loop = Notices(lambda event: None), asyncio.get_running_loop()
        for _ in range(30):
            notices.test(TRAINING, "sh -c 'exec sleep 1000'")
        assert len(notices._sending) == MOST_WAITING
        began_s = loop.time()
        await notices.close()
        return loop.time() - began_s

    took: list[float] = []

    async def timed() -> None:
        took.append(await main())

    run(timed())
    assert took[0] < 5.0


@pytest.mark.parametrize(("way", "words"), [("false", "ended with 1"), ("/nowhere/at/all", "No such file")])
def test_a_failing_command_is_a_warning_once(way: str, words: str) -> None:
    (event,) = sent(way, NOTICE, NOTICE, NOTICE)
    assert isinstance(event, Warned) and event.topic == "notify" and words in event.words


@pytest.mark.parametrize("way", ["", "true"])
def test_a_new_setting_ends_the_warning_of_the_one_before(way: str) -> None:
    emitted: list[Event] = []

    async def main() -> None:
        notices = Notices(emitted.append)
        for each in ("false", way):
            notices.test(Status(peer_id="12345abc"), each)
            await notices.close()

    run(main())
    assert [bool(event.words) for event in emitted if isinstance(event, Warned)] == [True, False]


@pytest.mark.usefixtures("log")
def test_a_hanging_command_is_killed_and_the_warning_ends_with_the_next_success(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SEND_S", 0.2)
    (tmp_path / "tell").write_text(f"#!/bin/sh\n[ -e {tmp_path / 'go'} ] || sleep 1000\n")
    emitted: list[Event] = []

    async def main() -> None:
        notices = Notices(emitted.append)
        notices.test(TRAINING, str(tmp_path / "tell"))
        await eventually(lambda: emitted, "warning")
        (tmp_path / "go").touch()
        monkeypatch.setattr(module, "SEND_S", 30.0)
        notices._send(str(tmp_path / "tell"), TRAINING, NOTICE)
        await eventually(lambda: len(emitted) == 2, "end of the warning")
        await notices.close()

    run(main())
    late, over = emitted
    assert isinstance(late, Warned) and "took longer than" in late.words
    assert isinstance(over, Warned) and over.words == ""


class _Server(http.server.BaseHTTPRequestHandler):
    got: list[tuple[str, str]] = []

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"])).decode()
        self.got.append((self.headers["Title"], body))
        self.send_response(200 if self.path == "/topic" else 403)
        self.end_headers()

    def log_message(self, *args: object) -> None:
        """Say nothing."""


@pytest.fixture
def server() -> Iterator[str]:
    _Server.got = []
    with http.server.HTTPServer(("127.0.0.1", 0), _Server) as serving:
        thread = threading.Thread(target=serving.serve_forever, args=(0.05,))
        thread.start()
        yield f"http://127.0.0.1:{serving.server_port}"
        serving.shutdown()
        thread.join()


def test_a_url_gets_a_post_as_ntfy_takes_it(server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    assert sent(f"{server}/topic", NOTICE) == []
    assert _Server.got == [("Gossamer: limit", "Gossamer: demo, peer 345abc: paused: it's full")]
    (event,) = sent(f"{server}/other", NOTICE)
    assert isinstance(event, Warned) and "403" in event.words


def test_a_server_that_is_no_web_server_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def greet() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(1 << 16)
                connection.sendall(b"SSH-2.0-OpenSSH_9.2\r\n")

        greeting = threading.Thread(target=greet)
        greeting.start()
        (event,) = sent(f"http://127.0.0.1:{listener.getsockname()[1]}/topic", NOTICE)
        greeting.join()
    assert isinstance(event, Warned) and "SSH-2.0" in event.words


@pytest.mark.parametrize("way", ["ftp://host/topic", "say 'half a quote"])
def test_a_way_that_cannot_work_is_refused(way: str) -> None:
    with pytest.raises(BadSettings, match="notify"):
        peer_config({"home": "/tmp", "notify": way})


def test_nothing_is_sent_by_default() -> None:
    assert LocalSettings().notify == "" and sent("", NOTICE) == []


def test_a_new_way_gets_a_notice_at_once(tmp_path: Path, log: Path) -> None:
    async def test() -> None:
        async with peer(tmp_path / "peer") as (running, _):
            await until_training(running)
            request = {"verb": "set", "key": "notify", "value": f"{tmp_path / 'tell'} x"}
            await asyncio.to_thread(ask, running.home.path, request)
            await eventually(log.exists, "the first notice")

    run(test())
    assert "test|x|Gossamer: " in log.read_text() and "come by this way" in log.read_text()
