"""The page for everybody: it gives what it shows and nothing else, changes nothing, and bounds what strangers can make it do."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import re
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.pictures.members import run_of
from gossamer.cli.page import public, run_view
from gossamer.cli.page.public import ANSWERS_EACH, ANSWERS_IN_ALL, BriefConnection, PublicPage, network
from gossamer.cli.page.run_view import RunPage
from gossamer.cli.whole_run import picture, run_shown
from gossamer.peer.machine.control_socket import serving
from gossamer.peer.machine.home import Home
from gossamer.peer.machine.run_view import RunView
from gossamer.peer.machine.runtime_folder import runtime_folder
from gossamer.protocol.errors import BadSettings
from gossamer.protocol.identity import Identity
from gossamer.protocol.run.manifest import Manifest, SignedManifest
from tests.cli.page.answer import Answer, request_to
from tests.cli.page.served import sent_until_end, served, until_fewer_than
from tests.clock import Clock

NOW_S = 1_800_000_000.0
MANIFEST = Manifest.checked({"run": {"name": "<script>alert(1)</script> & more", "access": "open"}, "data": {"source": "text"}})
NAME = "run.example"
PATHS = ("/", "/live", "/page.css", "/run.js")
SECRETS = ("peer_id", "12D3Koo", "/ip4/", "/ip6/", "token=", "gossamer1", "identity", "control")


@pytest.fixture(scope="module")
def view() -> RunView:
    return run_of(8, MANIFEST, NOW_S)


class Visitor:
    """Sends requests to a public page, as its server would pass them on."""

    def __init__(self, app: PublicPage) -> None:
        self._app = app

    async def __call__(
        self, path: str, host: str = NAME, *, method: str = "GET", client: str = "192.0.2.1", query: str = "", **headers: str
    ) -> Answer:
        answer = Answer()
        given = {name.replace("_", "-"): value for name, value in headers.items()}

        async def receive() -> dict[str, Any]:
            raise AssertionError("it reads what strangers send")

        async def send(message: Any) -> None:
            answer.take(message)

        await self._app(request_to(path, {"host": host} | given, method=method, query=query, client=client), receive, send)
        return answer


def page_of(view: RunView, invite: str = "") -> RunPage:
    return RunPage(lambda: picture(view.to_json(NOW_S), MANIFEST, runs=True), invite=invite)


@pytest.fixture
def visitor(view: RunView) -> Visitor:
    return Visitor(PublicPage(page_of(view), [NAME], lambda: 0.0))


async def test_everybody_can_read_the_page_and_its_files(visitor: Visitor) -> None:
    for path in PATHS:
        answer = await visitor(path)
        assert answer.code == 200 and len(answer.body) > 500
        assert "default-src 'none'" in answer.headers["content-security-policy"]
        assert "unsafe" not in answer.headers["content-security-policy"]
    page = (await visitor("/")).body.decode()
    assert "&lt;script&gt;alert(1)" in page and "<script>" not in page
    assert "live members" in page and "by step" in page
    assert not re.search(r' (style|on\w+)="|https?://', page), "neither inline styles nor scripts, nor anything from elsewhere"


async def test_no_full_id_address_token_or_invite_is_on_the_page(view: RunView, visitor: Visitor) -> None:
    ids = list(view.members)
    assert len(ids) == 8
    for path in ("/", "/live"):
        text = (await visitor(path)).body.decode()
        assert ids[0][-6:] in text
        assert not [secret for secret in SECRETS if secret in text]
        assert not [one for one in ids if one[-7:] in text], "no more than six characters of an id"


def test_a_picture_has_the_keys_that_are_meant_and_no_others(view: RunView) -> None:
    seen = view.to_json(NOW_S) | {"addresses": ["/ip4/192.0.2.1/tcp/1"]}
    seen["members"] = [row | {"addresses": "x", "network": "x"} for row in seen["members"]]
    text = json.dumps(picture(seen, MANIFEST, runs=True))
    assert "/ip4/" not in text and "network" not in text and "12D3Koo" not in text


@pytest.mark.parametrize(
    "path", ["/peers/0/pause", "/live/peers", "/page.js", "/page.html", "/run.html", "/plotly.min.js", "/runs/0/page", "/..",
             "/../server.py", "//", "/live/", "/page.css/", "/" + "x" * 500, "/%2e%2e/identity.key", ""],
)  # fmt: skip
async def test_nothing_else_is_there(path: str, visitor: Visitor) -> None:
    answer = await visitor(path)
    assert (answer.code, answer.body) == (404, b"there is no such page\n")
    assert (await visitor("/", query="token=x")).code == 404


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "CONNECT", "TRACE"])
async def test_a_request_that_could_write_is_refused_unread(method: str, visitor: Visitor) -> None:
    for path in (*PATHS, "/peers/0/pause"):
        answer = await visitor(path, method=method)
        assert (answer.code, answer.headers["connection"]) == (405, "close")


@pytest.mark.parametrize(("host", "code"), [
    (NAME, 200), (f"{NAME.upper()}:8080", 200), (f"{NAME}.", 200), ("localhost:1", 200), ("192.0.2.9:8080", 200), ("[2001:db8::1]", 200),
    ("[2001:db8::1]:8080", 200), ("evil.example", 421), (f"{NAME}.evil.example", 421), ("", 421), ("192.0.2.9.evil.example:80", 421),
])  # fmt: skip
async def test_a_foreign_host_name_is_refused(host: str, code: int, visitor: Visitor) -> None:
    assert (await visitor("/", host)).code == code


async def test_a_flood_from_one_network_is_refused_while_others_are_served(view: RunView) -> None:
    clock = Clock()
    visitor = Visitor(PublicPage(page_of(view), [NAME], clock))
    codes = [(await visitor("/live", client=f"2001:db8::{number:x}")).code for number in range(int(ANSWERS_EACH.capacity) + 50)]
    assert codes.count(200) == ANSWERS_EACH.capacity and codes[-1] == 429
    assert (await visitor("/live", client="192.0.2.7")).code == 200
    clock.now_s += ANSWERS_EACH.refill_s
    assert (await visitor("/live", client="2001:db8::1")).code == 200


async def test_a_flood_from_many_networks_is_bounded_too(visitor: Visitor) -> None:
    codes = [(await visitor("/live", client=f"10.0.{number // 250}.{number % 250}")).code for number in range(2000)]
    assert codes.count(200) == ANSWERS_IN_ALL.capacity and set(codes) == {200, 429}


async def test_requests_that_are_refused_count_too(visitor: Visitor) -> None:
    codes = {(await visitor("/x", "evil.example", method="POST")).code for _ in range(int(ANSWERS_EACH.capacity))}
    assert codes == {405} and (await visitor("/")).code == 429


async def test_twenty_viewers_cost_one_rendering(view: RunView, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_view, "LOOK_S", 3600.0)
    looks = []

    def look() -> dict[str, Any]:
        looks.append(1)
        return picture(view.to_json(NOW_S), MANIFEST, runs=True)

    visitor = Visitor(PublicPage(RunPage(look), [NAME]))
    answers = await asyncio.gather(*(visitor(path, accept_encoding="gzip") for path in ("/", "/live") for _ in range(20)))
    assert len(looks) == 1 and len({answer.body for answer in answers}) == 2
    assert "live members" in gzip.decompress(answers[0].body).decode()
    again = await visitor("/live", if_none_match=answers[-1].headers["etag"])
    assert (again.code, again.body) == (304, b"")


async def test_twenty_viewers_of_a_silent_peer_cost_one_question(view: RunView, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_view, "LOOK_S", 3600.0)
    looks = []

    def look() -> dict[str, Any]:
        looks.append(1)
        if len(looks) == 1:
            raise BadSettings("the peer does not answer", hint="see its log")
        return picture(view.to_json(NOW_S), MANIFEST, runs=True)

    visitor = Visitor(PublicPage(RunPage(look), [NAME]))
    answers = await asyncio.gather(*(visitor(path) for path in ("/", "/live") for _ in range(20)))
    assert len(looks) == 1 and {answer.code for answer in answers} == {503}
    monkeypatch.setattr(run_view, "LOOK_S", 0.0)
    assert (await visitor("/")).code == 200


async def test_an_invite_is_on_the_page_only_if_the_host_shows_it(view: RunView, visitor: Visitor) -> None:
    link = "gossamer:gossamer1abc"
    page = (await Visitor(PublicPage(page_of(view, link), [NAME]))("/")).body.decode()
    assert f'href="{link}"' in page and page.count("<svg") > 5 and "data-copy" in page
    assert "gossamer:" not in (await visitor("/")).body.decode()


async def test_a_head_request_has_no_body(visitor: Visitor) -> None:
    answer = await visitor("/", method="HEAD")
    assert (answer.code, answer.body) == (200, b"")


@pytest.mark.real_time
async def test_the_page_asks_the_peer_for_the_run_and_nothing_else_and_a_stopped_peer_shows_what_it_saw(
    tmp_path: Path, view: RunView
) -> None:
    home, asked = Home(tmp_path / "a secret folder"), list[dict[str, Any]]()
    home.create()
    home.manifest.write_bytes(SignedManifest.sign(MANIFEST, Identity.load_or_create(home.identity)).to_bytes())
    visitor = Visitor(PublicPage(RunPage(lambda: run_shown(home.path)), [NAME]))

    def answer(request: dict[str, Any]) -> dict[str, Any]:
        asked.append(request)
        return view.to_json(NOW_S)

    with runtime_folder(0) as runtime:
        async with serving(home, runtime, answer):
            assert f"{len(view.live())} live".encode() in (await visitor("/")).body
            for path in (*PATHS, "/peers/0/pause", "/x"):
                await visitor(path, method="POST")
    assert {one["verb"] for one in asked} == {"run"}
    home.run.write_text(json.dumps(view.to_record()))
    assert run_shown(home.path)["tokens"] == view.to_json(NOW_S)["tokens"]
    assert not run_shown(home.path)["is_watched"]


async def test_a_peer_that_does_not_answer_is_reported_without_its_folder(tmp_path: Path) -> None:
    def fails() -> dict[str, Any]:
        raise BadSettings(f"the peer in {tmp_path} does not answer", hint="")

    answer = await Visitor(PublicPage(RunPage(fails), [NAME]))("/")
    assert answer.code == 503 and str(tmp_path).encode() not in answer.body


def test_a_viewers_network_is_its_address_or_its_64() -> None:
    assert network("192.0.2.1") == network("::ffff:192.0.2.1") == "192.0.2.1"
    assert network("2001:db8::1") == network("2001:db8::ffff:1%eth0") != network("2001:db8:0:1::1")
    assert network("") == network("nonsense") == ""


@pytest.fixture
def port(view: RunView) -> contextlib.AbstractAsyncContextManager[int]:
    """Serve the public page by its real server; yield the port."""
    return served(lambda port: PublicPage(page_of(view), [NAME]), BriefConnection)


@pytest.mark.real_time
async def test_a_connection_ends_in_time_whatever_its_other_end_does(monkeypatch: pytest.MonkeyPatch, port: int) -> None:
    monkeypatch.setattr(public, "LIFE_S", 0.3)
    for start in (
        "",
        "GET / HT",
        f"GET / HTTP/1.1\r\nHost: {NAME}\r\n\r\n",
        f"POST / HTTP/1.1\r\nHost: {NAME}\r\nContent-Length: 9\r\n\r\n",
    ):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(start.encode())
        await sent_until_end(reader)
        writer.close()


async def one_by_one(port: int, number: int) -> list[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    return [await asyncio.open_connection("127.0.0.1", port) for _ in range(number)]


async def at_once(port: int, number: int) -> list[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """Open connections that the server finds in its queue together."""
    return [await asyncio.open_connection(sock=one) for one in [socket.create_connection(("127.0.0.1", port)) for _ in range(number)]]


@pytest.mark.real_time
@pytest.mark.parametrize("opened", [one_by_one, at_once])
async def test_one_network_holds_a_bounded_number_of_connections_and_the_newest_is_served(
    opened: Callable[[int, int], Awaitable[list[tuple[asyncio.StreamReader, asyncio.StreamWriter]]]], port: int
) -> None:
    crowd = await opened(port, 3 * public.MAX_OF_ONE)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"GET / HTTP/1.1\r\nHost: {NAME}\r\n\r\n".encode())
    assert (await reader.readline()).startswith(b"HTTP/1.1 200")
    await until_fewer_than(public.MAX_OF_ONE, (reader for reader, _ in crowd))
    for _, one in [*crowd, (reader, writer)]:
        one.close()
