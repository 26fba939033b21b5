"""Further machines on the page: what they tell is shown, a silent one says since when, and a token goes to its own machine alone."""

from __future__ import annotations

import asyncio
import contextlib
import http.server
import json
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import pytest

from gossamer.cli.dashboard import listening, server
from gossamer.cli.page import machines
from gossamer.cli.page.machines import MOST_BYTES, Machines, PeerRow, asked, machines_of, together
from gossamer.cli.page.server import application
from gossamer.peer.machine.home import Home
from gossamer.peer.machine.states import changed
from gossamer.peer.machine.status import Status, apply
from gossamer.protocol.errors import BadSettings
from tests.peer.waiting import eventually

TOKEN = "a-secret-token"
TRAINING = PeerRow(
    "12D3KooWabcdef", "a run", "training", "training for 3 min: meeting others; ends with the run", True, 120.0, 4_000, "tokens"
)


@contextlib.contextmanager
def page(home: Path) -> Iterator[str]:
    """Serve the page of a home; yield the address that `peer dashboard` would print."""
    with listening(0) as listener:
        port = listener.getsockname()[1]
        running = server(application([home], TOKEN, port))
        thread = threading.Thread(target=lambda: asyncio.run(running.serve([listener])))
        thread.start()
        try:
            yield f"http://127.0.0.1:{port}/?token={TOKEN}"
        finally:
            running.should_exit = True
            thread.join()


class Other(http.server.BaseHTTPRequestHandler):
    """Answers with `content`, or leads elsewhere; notes what it was asked for."""

    asked: list[str]
    leads_to: str
    content: bytes

    def do_GET(self) -> None:
        self.asked.append(self.path)
        self.send_response(302 if self.leads_to else 200)
        if self.leads_to:
            self.send_header("Location", self.leads_to)
        self.end_headers()
        self.wfile.write(self.content)

    def log_message(self, *_: object) -> None:
        """Print nothing."""


@contextlib.contextmanager
def other(content: bytes = b"[]", leads_to: str = "") -> Iterator[tuple[str, list[str]]]:
    """Serve something else; yield its address, with a token, and the list of what it was asked for."""
    requests: list[str] = []
    handler = type("Handler", (Other,), {"asked": requests, "leads_to": leads_to, "content": content})
    with http.server.HTTPServer(("127.0.0.1", 0), handler) as serving:
        thread = threading.Thread(target=serving.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{serving.server_port}/?token={TOKEN}", requests
        finally:
            serving.shutdown()
            thread.join()


def url_of(given: str) -> str:
    return machines_of([given])[0].url


def test_a_page_tells_another_one_of_its_peers(tmp_path: Path) -> None:
    home = Home(tmp_path / "home")
    home.create()
    status = apply(Status(peer_id="12D3KooX", run_name="a run", tokens=7), changed("left"))
    home.status.write_text(json.dumps(status.to_json()))
    with page(home.path) as address:
        (row,) = asked(url_of(address))
        assert (row.peer_id, row.run, row.state, row.runs, row.tokens) == ("12D3KooX", "a run", "left", False, 7)
        with pytest.raises(BadSettings, match="refuses the token"):
            asked(url_of(address).replace(TOKEN, "another"))
    with pytest.raises(BadSettings, match="nothing listens there") as caught:
        asked(url_of(address))
    assert TOKEN not in str(caught.value)


def test_a_token_follows_no_redirect_and_no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    with other() as (elsewhere, requests):
        monkeypatch.setenv("http_proxy", elsewhere.split("?")[0])
        with other(leads_to=elsewhere) as (address, first), pytest.raises(BadSettings, match="answers with code 302"):
            asked(url_of(address))
        assert first == [f"/machine?token={TOKEN}"]
        assert not requests


def row_with(figure: str) -> bytes:
    """A page's answer in which `tokens` is this text."""
    return json.dumps([asdict(TRAINING)]).replace("4000", figure).encode()


@pytest.mark.parametrize(
    "content",
    [
        *(b"<html>", b'[{"peer_id": 3}]', b"[" + b" " * MOST_BYTES + b"]", json.dumps(["x"] * 100).encode()),
        *map(row_with, ("-1", "9" * 400, "NaN", "Infinity")),
        row_with("4000").replace(b"120.0", b"NaN"),
    ],
)
def test_what_is_no_page_of_ours_is_said_to_be_none(content: bytes) -> None:
    with other(content) as (address, _), pytest.raises(BadSettings, match="no page of this release"):
        asked(url_of(address))


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        (f"http://10.0.0.7:80/?token={TOKEN}", "would send the token of 10.0.0.7 where everybody"),
        ("http://127.0.0.1:80/", "holds no token"),
        (f"ftp://127.0.0.1/?token={TOKEN}", "begins with http"),
        (f"http://me:pass@127.0.0.1/?token={TOKEN}", "begins with http"),
        (f"http://127.0.0.1:eighty/?token={TOKEN}", "no URL"),
        (f"https://a..example/?token={TOKEN}", "no URL"),
        (f"http://127.0.0.1:80/caf\xe9/?token={TOKEN}", "no URL"),
        ("not-there.txt", "not a file"),
    ],
)
def test_an_address_that_does_not_do_is_refused_without_its_token(given: str, complaint: str) -> None:
    with pytest.raises(BadSettings, match=complaint) as caught:
        machines_of([given])
    assert TOKEN not in str(caught.value) and caught.value.hint


def test_addresses_may_stand_in_a_file(tmp_path: Path) -> None:
    file = tmp_path / "machines"
    file.write_text(f"# mine\nhttp://[::1]:8421/?token={TOKEN}\n\nhttps://gpu.example/peers/?token={TOKEN}\n")
    assert [(machine.name, machine.url) for machine in machines_of([str(file)])] == [
        ("[::1]:8421", f"http://[::1]:8421/machine?token={TOKEN}"),
        ("gpu.example", f"https://gpu.example/peers/machine?token={TOKEN}"),
    ]


def test_a_machine_that_falls_silent_says_since_when_and_what_it_was() -> None:
    (machine,) = machines_of([f"http://127.0.0.1:8421/?token={TOKEN}"])
    machines = Machines([machine])
    machine.note(None, "nothing listens there", 1000.0)
    (row,) = machines.shown([], 1300.0)["rows"]
    assert (row["shown_state"], row["sentence"]) == ("silent", "no answer for 5 min: nothing listens there")
    machine.note([TRAINING], "", 2000.0)
    shown = machines.shown([TRAINING], 2001.0)
    assert [row["machine"] for row in shown["rows"]] == ["this machine", "127.0.0.1:8421"]
    assert shown["together"] == "a run: 2 peers, 240 tokens/s, 8000 tokens in all"
    for now_s in (2010.0, 2020.0):
        machine.note(None, "it refuses the token", now_s)
    shown = machines.shown([TRAINING], 2130.0)
    assert shown["rows"][1]["sentence"] == "no answer for 2 min: it refuses the token; 2 min ago it was training"
    assert shown["rows"][1]["figures"] == "" and shown["together"].startswith("a run: 1 peer, ")
    assert TOKEN not in json.dumps(shown)


def test_tokens_and_samples_are_not_added_up() -> None:
    samples = PeerRow("12D3KooWghijkl", "another", "training", "", True, 5.0, 50, "samples")
    assert (
        together([TRAINING, samples]) == "a run: 1 peer, 120 tokens/s, 4000 tokens in all; another: 1 peer, 5 samples/s, 50 samples in all"
    )


def test_an_answer_that_drips_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machines, "ANSWER_S", 0.2)

    class Dripping(Other):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            with contextlib.suppress(OSError):  # the other side goes
                for _ in range(100):
                    self.wfile.write(b" ")
                    time.sleep(0.05)

    with http.server.HTTPServer(("127.0.0.1", 0), Dripping) as serving:
        thread = threading.Thread(target=serving.serve_forever)
        thread.start()
        try:
            with pytest.raises(BadSettings, match=r"nothing came within|within 0 s"):
                asked(url_of(f"http://127.0.0.1:{serving.server_port}/?token={TOKEN}"))
        finally:
            serving.shutdown()
            thread.join()


@pytest.mark.real_time
async def test_a_machine_that_does_not_answer_delays_nobody() -> None:
    release = threading.Event()
    calls: list[str] = []

    def ask(url: str) -> list[PeerRow]:
        calls.append(url)
        release.wait(30.0)
        return [TRAINING]

    machines = Machines(machines_of([f"http://127.0.0.1:8421/?token={TOKEN}"]), ask)
    began_s = time.monotonic()
    machines.look()
    machines.look()
    await asyncio.sleep(0)
    assert time.monotonic() - began_s < 5.0
    release.set()
    await eventually(lambda: machines.all[0].rows, "an answer")
    assert len(calls) == 1
