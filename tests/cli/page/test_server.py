"""The page lets in who has its address, and nobody else: no other site that is open in the same browser, no other machine."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from gossamer.cli.page.server import application
from gossamer.peer.machine.config import LIMITS, LocalSettings, PeerConfig
from gossamer.peer.machine.control_socket import serving
from gossamer.peer.machine.home import Home
from gossamer.peer.machine.run_view import RunView
from gossamer.peer.machine.runtime_folder import runtime_folder
from gossamer.peer.machine.states import changed
from gossamer.peer.machine.status import Status, apply
from gossamer.peer.supervisor.pauses import Pause, asked_pause, ruled_pause
from gossamer.peer.supervisor.surroundings import Surroundings
from gossamer.protocol.identity import Identity
from gossamer.protocol.run.manifest import Manifest, SignedManifest
from tests.cli.page.answer import Answer, request_to

TOKEN, PORT = "a-token", 4321
HERE = {"host": f"127.0.0.1:{PORT}"}
STATUS = apply(Status(peer_id="12D3KooX"), changed("training"))


async def request(homes: list[Path], path: str, headers: dict[str, str], token: str | None = TOKEN, body: bytes | None = None) -> Answer:
    """Send one request to the page of these homes, as its server would pass it on."""
    answer, has_piece = Answer(), asyncio.Event()
    scope = request_to(path, headers, method="GET" if body is None else "POST", query="" if token is None else f"token={token}")
    asked = iter([{"type": "http.request", "body": body or b""}])

    async def receive() -> dict[str, Any]:
        if (message := next(asked, None)) is not None:
            return message
        await has_piece.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        answer.take(message)
        if message["type"] != "http.response.start":
            has_piece.set()

    async with asyncio.timeout(20):
        await application(homes, TOKEN, PORT)(scope, receive, send)
    return answer


def get(path: str, headers: dict[str, str], token: str | None = TOKEN) -> Answer:
    return asyncio.run(request([], path, headers, token))


PATHS = ("/", "/page.js", "/plotly.min.js", "/live/peers", "/machine", "/peers/0/pause")


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("headers", "token"),
    [
        (HERE, None),
        (HERE, "another"),
        (HERE, ""),
        ({"host": f"evil.example:{PORT}"}, TOKEN),  # a name of theirs that leads here
        ({"host": f"127.0.0.1:{PORT + 1}"}, TOKEN),
        ({}, TOKEN),
        (HERE | {"origin": "http://evil.example"}, TOKEN),
        (HERE | {"origin": "null"}, TOKEN),
        (HERE | {"sec-fetch-site": "cross-site"}, TOKEN),
    ],
)
def test_requests_without_token_or_from_other_sites_are_refused(path: str, headers: dict[str, str], token: str | None) -> None:
    answer = get(path, headers, token)
    assert answer.code == 403
    assert answer.body.startswith(b"refused: ")


@pytest.mark.parametrize("path", PATHS[:3])
def test_the_address_with_its_token_serves_the_page_and_its_files(path: str) -> None:
    answer = get(path, HERE | {"origin": f"http://127.0.0.1:{PORT}", "sec-fetch-site": "same-origin"})
    assert answer.code == 200
    assert len(answer.body) > 100
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    if path == "/":
        assert answer.body.count(TOKEN.encode()) == 3
        assert b"http" not in answer.body


def test_an_unknown_path_is_not_found() -> None:
    assert get("/../server.py", HERE).code == 404
    assert get("/server.py", HERE).code == 404


class Running:
    """A home whose peer answers, and notes what it was asked."""

    def __init__(self, folder: Path) -> None:
        self.home = Home(folder)
        self.home.create()
        self.asked: list[dict[str, Any]] = []
        self.status = STATUS

    def answer(self, wanted: dict[str, Any]) -> dict[str, Any]:
        self.asked.append(wanted)
        answers = {
            "status": self.status.to_json(),
            "run": RunView().to_json(0.0),
            "peers": {"peers": []},
            "history": STATUS.history.to_json(),
        }
        answers["config"] = PeerConfig(home=self.home.path).model_dump(mode="json", include=set(LocalSettings.model_fields))
        return answers.get(wanted["verb"], {"state": "paused", "reason": "asked to pause"})

    def during(self, path: str, body: bytes | None = None) -> Answer:
        async def both() -> Answer:
            with runtime_folder(0) as runtime:
                async with serving(self.home, runtime, self.answer):
                    return await request([self.home.path], path, HERE, body=body)

        return asyncio.run(both())


def content(answer: Answer) -> Any:
    assert answer.headers["content-type"].startswith("text/event-stream")
    return json.loads(answer.body.removeprefix(b"data: "))


def test_the_page_receives_the_peers_answers(tmp_path: Path) -> None:
    (peer,) = content(Running(tmp_path).during("/live/peers"))
    assert peer["runs"]
    assert peer["status"] == STATUS.to_json()
    assert peer["sentence"].startswith("training for ")


def test_a_stopped_peer_is_shown_with_its_last_state(tmp_path: Path) -> None:
    Home(tmp_path).status.write_text(json.dumps(apply(STATUS, changed("failed", "no room")).to_json()))
    (peer,) = content(asyncio.run(request([tmp_path], "/live/peers", HERE)))
    assert (peer["runs"], peer["status"]["state"]) == (False, "failed")
    assert "no peer is running" in peer["words"]
    (nothing,) = content(asyncio.run(request([tmp_path / "nowhere"], "/live/peers", HERE)))
    assert (nothing["runs"], nothing["status"]) == (False, {})


@pytest.mark.parametrize(
    ("pause", "may_resume"),
    [
        (asked_pause(0.0, None), True),
        (asked_pause(0.0, 60.0), True),
        (ruled_pause(LocalSettings(schedule="mon 00:00-00:01"), 1_800_000_000.0, Surroundings()), False),
        (ruled_pause(LocalSettings(not_on_battery=True), 0.0, Surroundings(is_on_battery=True)), False),
    ],
)
def test_resume_is_there_only_where_it_works(tmp_path: Path, pause: Pause | None, may_resume: bool) -> None:
    assert pause is not None
    running = Running(tmp_path)
    running.status = apply(STATUS, changed("paused", pause.reason, pause.way_out))
    (peer,) = content(running.during("/live/peers"))
    assert peer["may_resume"] is may_resume
    (other,) = content(Running(tmp_path).during("/live/peers"))
    assert not other["may_resume"], "it trains"


def test_a_limit_that_is_yes_or_no_is_a_switch(tmp_path: Path) -> None:
    (peer,) = content(Running(tmp_path).during("/live/peers"))
    switches = {limit["key"]: limit["value"] for limit in peer["limits"] if limit["is_switch"]}
    assert switches == {"only_idle": "false", "not_on_battery": "false"}


def test_the_page_of_the_run_is_served_with_the_token_alone(tmp_path: Path) -> None:
    running = Running(tmp_path)
    identity = Identity.load_or_create(running.home.identity)
    running.home.manifest.write_bytes(SignedManifest.sign(Manifest().with_host(identity.peer_id), identity).to_bytes())
    for path in ("/runs/0/page", "/runs/0/live", "/runs/0/page.css", "/runs/0/run.js"):
        assert get(path, HERE, None).code == 403
        assert running.during(path).code == 200
    page = running.during("/runs/0/page").body.decode()
    assert f"run.js?token={TOKEN}" in page and "default-src 'none'" in running.during("/runs/0/page").headers["content-security-policy"]
    for path in ("/runs/1/page", "/runs/0/other", "/runs/0/page.html"):
        assert running.during(path).code == 404
    assert asyncio.run(request([tmp_path / "nowhere"], "/runs/0/page", HERE)).code == 503


@pytest.mark.parametrize(
    ("path", "body", "asked"),
    [
        ("pause", {"seconds": 3600}, {"verb": "pause", "seconds": 3600}),
        ("pause", {"seconds": None}, {"verb": "pause", "seconds": None}),
        ("resume", {}, {"verb": "resume"}),
        ("leave", {"finish": True}, {"verb": "leave", "finish": True}),
        ("set", {"key": LIMITS[0], "value": "2"}, {"verb": "set", "key": LIMITS[0], "value": "2"}),
    ],
)
def test_it_can_pause_resume_and_set_limits(tmp_path: Path, path: str, body: dict[str, Any], asked: dict[str, Any]) -> None:
    running = Running(tmp_path)
    assert running.during(f"/peers/0/{path}", json.dumps(body).encode()).code == 200
    assert running.asked == [asked]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("0/leave", b"{}"),
        ("0/leave", b'{"finish": 1}'),
        ("0/config", b"{}"),
        ("0/set", b'{"key": "data", "value": "/"}'),
        ("0/pause", b'{"seconds": "x"}'),
        ("0/pause", b"["),
        ("0/pause", b"[]"),
        ("1/resume", b"{}"),
    ],
)
def test_other_requests_are_refused(tmp_path: Path, path: str, body: bytes) -> None:
    running = Running(tmp_path)
    assert running.during(f"/peers/{path}", body).code == 400
    assert not running.asked


def test_a_request_to_a_stopped_peer_returns_an_error(tmp_path: Path) -> None:
    answer = asyncio.run(request([tmp_path], "/peers/0/resume", HERE, body=b""))
    assert answer.code == 409
    assert "no peer is running" in json.loads(answer.body)["error"]
