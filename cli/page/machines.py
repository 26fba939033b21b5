"""Further machines of the same owner on the page: each is asked over the address that its own `peer dashboard` has printed.

A token goes to its own machine and nowhere else: not to the browser, not through a proxy, and no redirect is followed. The others only
answer: the page cannot change anything there.
"""

from __future__ import annotations

import asyncio
import http.client
import ipaddress
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, Final

from pydantic import Field, TypeAdapter, ValidationError

from gossamer.cli.figures import ENDED, age_text, number_text
from gossamer.protocol.errors import BadSettings
from gossamer.protocol.tasks import spawn

LOOK_S: Final = 2.0  # between two questions to a machine
ANSWER_S: Final = 5.0  # that a machine may take
MOST_BYTES: Final = 1 << 18  # of an answer
MOST_PEERS: Final = 64  # of one machine
MOST_TOKENS: Final = 1 << 62  # what is larger, or no number, is no answer of a page
PATH: Final = "machine"  # where a page tells of its peers
HERE: Final = "this machine"
HINT: Final = "give the address that `peer dashboard` has printed there, like http://127.0.0.1:8421/?token=..., reached through ssh -L"

Text = Annotated[str, Field(max_length=2000)]


@dataclass(frozen=True, slots=True)
class PeerRow:
    """One peer, as its own machine tells of it."""

    peer_id: Text
    run: Text
    state: Text
    sentence: Text  # state, since when, why, what ends it
    runs: bool
    tokens_per_second: Annotated[float, Field(ge=0.0, le=MOST_TOKENS)]
    tokens: Annotated[int, Field(ge=0, le=MOST_TOKENS)]
    unit: Text

    @classmethod
    def of(cls, peer: Mapping[str, Any]) -> PeerRow:
        """Make the row of what the page shows of a peer (cli/page/peers.py)."""
        status = peer["status"]
        return cls(
            peer_id=status.get("peer_id", ""),
            run=status.get("run_name", ""),
            state=status.get("state", ""),
            sentence=_sentence(peer),
            runs=peer["runs"],
            tokens_per_second=status.get("tokens_per_second", 0.0) if peer["runs"] else 0.0,
            tokens=status.get("tokens", 0),
            unit=status.get("unit", "tokens"),
        )


def _sentence(peer: Mapping[str, Any]) -> str:
    """Return what is said of a peer; of one that does not run and has not ended, its last state too."""
    state = peer["status"].get("state", "")
    if peer["runs"] or state in ENDED:
        return str(peer["sentence"])
    return f"not running; its last state: {peer['sentence']}" if state else str(peer["words"])


_ROWS: Final = TypeAdapter(Annotated[list[PeerRow], Field(max_length=MOST_PEERS)])


@dataclass(slots=True)
class Machine:
    """One further machine, and its last answer. Times are Unix seconds."""

    url: str  # with the token: it is a secret
    name: str  # host and port
    rows: list[PeerRow] = field(default_factory=list)
    heard: float = 0.0  # when it last answered; 0: never
    silent_since: float = 0.0  # when it first did not; 0: it answers
    trouble: str = ""  # why it does not

    def note(self, rows: list[PeerRow] | None, trouble: str, now_s: float) -> None:
        """Take its answer, or why there is none."""
        if rows is not None:
            self.rows, self.heard, self.silent_since, self.trouble = rows, now_s, 0.0, ""
        else:
            self.silent_since, self.trouble = self.silent_since or now_s, trouble


class Machines:
    """The further machines. Belongs to one event loop; no machine is waited for. `ask` returns a machine's rows, or raises BadSettings."""

    def __init__(self, given: Iterable[Machine], ask: Callable[[str], list[PeerRow]] | None = None) -> None:
        self.all = list(given)
        self._ask = ask or asked
        self._looked_s = -LOOK_S
        self._asking: dict[str, set[asyncio.Task[None]]] = {machine.url: set() for machine in self.all}

    def look(self) -> None:
        """Ask each machine again, if the last question is old enough and answered."""
        if time.monotonic() - self._looked_s < LOOK_S:
            return
        self._looked_s = time.monotonic()
        for machine in self.all:
            if not self._asking[machine.url]:
                spawn(self._ask_one(machine), self._asking[machine.url], f"machine {machine.name}")

    async def _ask_one(self, machine: Machine) -> None:
        try:
            rows = await asyncio.to_thread(self._ask, machine.url)
        except BadSettings as error:
            machine.note(None, str(error), time.time())
        else:
            machine.note(rows, "", time.time())

    def shown(self, own: Sequence[PeerRow], now_s: float) -> dict[str, Any]:
        """Return what the page shows: a row for each peer of each machine, this one first, and what they do together. No token."""
        rows = [_row(HERE, row) for row in own]
        for machine in self.all:
            rows += [_row(machine.name, row) for row in machine.rows] if not machine.silent_since else _silent(machine, now_s)
        return {
            "rows": rows,
            "together": together([*own, *(row for machine in self.all for row in machine.rows if not machine.silent_since)]),
        }


def together(rows: Sequence[PeerRow]) -> str:
    """Return what these peers train together, in words: one clause for each run."""
    clauses = []
    for run, unit in dict.fromkeys((row.run, row.unit) for row in rows if row.run):
        mine = [row for row in rows if (row.run, row.unit) == (run, unit)]
        rate, tokens = sum(row.tokens_per_second for row in mine), sum(row.tokens for row in mine)
        peers = f"{len(mine)} {'peer' if len(mine) == 1 else 'peers'}"
        clauses.append(f"{run}: {peers}, {number_text(rate)} {unit}/s, {number_text(tokens)} {unit} in all")
    return "; ".join(clauses)


def _row(machine: str, row: PeerRow) -> dict[str, Any]:
    rate = f"{number_text(row.tokens_per_second)} {row.unit}/s"
    figures = f"{rate}, {number_text(row.tokens)} {row.unit}" if row.run else ""
    state = row.state if row.runs or row.state in ENDED else "silent"
    return asdict(row) | {"machine": machine, "shown_state": state, "figures": figures}


def _silent(machine: Machine, now_s: float) -> list[dict[str, Any]]:
    """Return the rows of a machine that does not answer: why, since when, and what it said last."""
    since = f"no answer for {age_text(now_s - machine.silent_since)}: {machine.trouble}"
    if not machine.rows:
        nobody = PeerRow("", "", "", since, False, 0.0, 0, "tokens")
        return [_row(machine.name, nobody)]
    heard = f"{age_text(now_s - machine.heard)} ago"
    return [
        _row(machine.name, row)
        | {"shown_state": "silent", "sentence": f"{since}; {heard} it was {row.state or 'without a peer'}", "figures": ""}
        for row in machine.rows
    ]


# ---------------------------------------------------------------------- addresses


def machines_of(given: Iterable[str]) -> list[Machine]:
    """Return the machines of `--with`: URLs, or files with a URL a line. Raises BadSettings that names no token."""
    urls = [url for text in given for url in ([text] if "://" in text else _in_file(Path(text)))]
    return [_machine(url) for url in dict.fromkeys(urls)]


def _in_file(path: Path) -> list[str]:
    try:
        lines = path.expanduser().read_text().splitlines()
    except (OSError, ValueError) as error:
        raise BadSettings(f"--with {path}: not a URL, and not a file that can be read", hint=HINT) from error
    return [line.strip() for line in lines if line.strip() and not line.startswith("#")]


def _machine(url: str) -> Machine:
    try:
        parts = urllib.parse.urlsplit(url)
        host, port = parts.hostname or "", parts.port
        url.encode("ascii")
        host.encode("idna")
    except ValueError as error:
        raise BadSettings("--with was given what is no URL", hint=HINT) from error
    if parts.scheme not in ("http", "https") or not host or parts.username is not None:
        raise BadSettings("--with takes a URL that begins with http:// or https://", hint=HINT)
    (token,) = urllib.parse.parse_qs(parts.query).get("token", [""])[:1]
    if not token:
        raise BadSettings(f"the URL of {host} holds no token", hint=HINT)
    if parts.scheme == "http" and not _is_here(host):
        raise BadSettings(
            f"http:// would send the token of {host} where everybody on the way can read it",
            hint="reach that machine through ssh -L, as its `peer dashboard` prints, or by https://",
        )
    shown = f"[{host}]" if ":" in host else host
    name = shown if port is None else f"{shown}:{port}"
    path = parts.path.rsplit("/", 1)[0]
    return Machine(f"{parts.scheme}://{name}{path}/{PATH}?{urllib.parse.urlencode({'token': token})}", name)


def _is_here(host: str) -> bool:
    """Return whether a host is this machine: the near end of a tunnel."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Follows no redirect: it would take the token elsewhere."""

    def redirect_request(self, *_: Any) -> None:
        """Return no new request."""


_OPENER: Final = urllib.request.build_opener(urllib.request.ProxyHandler({}), _NoRedirect())


def _read(answer: http.client.HTTPResponse) -> bytes:
    """Read an answer, within ANSWER_S in all and up to one byte more than MOST_BYTES. Raises OSError."""
    until_s, content = time.monotonic() + ANSWER_S, b""
    while len(content) <= MOST_BYTES and (data := answer.read1(MOST_BYTES + 1 - len(content))):
        content += data
        if time.monotonic() > until_s:  # each read has the time-out of the socket alone
            raise TimeoutError
    return content


def asked(url: str) -> list[PeerRow]:
    """Return the rows of the machine at a URL. Blocks for some seconds at most. Raises BadSettings in words without the token."""
    try:
        with _OPENER.open(url, timeout=ANSWER_S) as answer:  # http or https: `machines_of` checks it
            content = _read(answer)
    except urllib.error.HTTPError as error:
        known = {
            403: "it refuses the token, or the near port of the tunnel is not its own port",
            404: "its release of Gossamer does not tell others of its peers",
        }
        raise BadSettings(known.get(error.code, f"it answers with code {error.code}"), hint=HINT) from error
    except (OSError, http.client.HTTPException) as error:
        reason = error.reason if isinstance(error, urllib.error.URLError) else error
        slow = isinstance(reason, TimeoutError)
        words = (
            f"nothing came within {ANSWER_S:.0f} s" if slow else "nothing listens there: start `peer dashboard` on it, and the tunnel to it"
        )
        raise BadSettings(words, hint=HINT) from error
    try:
        if len(content) > MOST_BYTES:
            raise ValueError
        return _ROWS.validate_json(content)
    except (ValidationError, ValueError) as error:
        raise BadSettings("what answers there is no page of this release of Gossamer", hint=HINT) from error
