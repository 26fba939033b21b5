"""The page on processes lists the files that a meeting, a join and a stranger's call enter, in the order of a recorded run.

`python -m tests.swarm.test_processes_page` writes the lists again; a file that is new gets its first function and that one's docstring.
"""

from __future__ import annotations

import ast
import asyncio
import hashlib
import re
import tempfile
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from gossamer.peer.meeting.interface import pairing
from gossamer.protocol.messages.messages import Chunk, Commitment, Hello, Message, Part, Refusal, exchange_digest
from gossamer.protocol.streams.transport import Purpose, Stream
from tests.swarm.entered import ROOT, Entered
from tests.swarm.mallory import MALLORY, hello_to, nobody
from tests.swarm.tiny import tiny_manifest
from tests.swarm.world import Swarm, play

PAGE = ROOT / "docs" / "concepts" / "processes.md"
END = "<!-- end of the list -->\n"
STEP = re.compile(r"^\d+\. `([\w/]+\.py)` `([\w.]+)`: (.+)$", re.MULTILINE)
FILE = re.compile(r"`((?:peer|protocol|optim)/[\w/]+\.py)`")
QUIET = tiny_manifest(run={"total_steps": 100_000})

# What runs at the same time, whether or not anybody meets. The page says the same in words.
BACKGROUND = {
    "AntiEntropy.run": "gossip with a random peer every few seconds",
    "Presence.run": "announcements, looks at the directory and status reports",
    "Presence._announce_for_ever": "the same",
    "Presence._look_for_ever": "the same",
    "Presence._report_for_ever": "the same",
    "MembershipWatch.run": "the membership and revocations",
    "StateSync._rest": "the pause between two decisions about weights",
    "NodePeer.__init__": "construction of the node",
    "NodePeer._make_member": "the same",
    "NodePeer._make_node": "the same",
    "TextProgram.device": "where the model lies",
    "TextProgram.losses": "the measurement of a loss",
    "TextProgram.forget_optimizer": "the optimizer",
    "has_own_memory": "the order of work on a device",
    "mark": "the same",
    "behind": "the same",
    "finish": "the same",
    "acquire": "the lock of the weights",
    "Stopwatch.blocked": "the count of time for the status",
    "Stopwatch.evaluating": "the same",
    "Stopwatch.training": "the same",
    "Stopwatch.step": "the same",
    "InnerLoop.gradient": "the inner step itself: text, model, devices",
    "OneDevice.step": "the same",
    "held_out_loss": "the measurement of a loss",
    "Boundary._report_and_save": "status, evaluation and checkpoints between two inner steps",
    "Peer.on_event": "the supervisor's work: it folds events into the status",
    "sends": "the stranger's own calls",
    "Peer.start_trainer": "construction of the trainer",
    "Peer.start_node": "construction of the node's seams",
}


async def meeting(swarm: Swarm, entered: Entered) -> None:
    """A fragment of the first peer comes due while the second has nothing to do."""
    peers = swarm.start(2)
    for peer in peers:
        peer.trainer.frozen = True
    await swarm.until(lambda: all(peer.lifecycle.may_meet and peer.book.live(asyncio.get_running_loop().time()) for peer in peers))
    entered.is_on, peers[0].trainer.frozen = True, False
    await swarm.until(lambda: all(peer.num_completed for peer in peers))
    entered.is_on = False


async def join(swarm: Swarm, entered: Entered) -> None:
    """A peer that knows two bootstrap addresses and nothing else takes over the state of two peers that have long trained."""
    residents = swarm.start(2)
    await swarm.until(lambda: min(peer.trainer.replica.own_steps for peer in residents) >= 100)
    for peer in residents:
        peer.trainer.frozen = True
    await asyncio.sleep(5.0)
    bootstraps = tuple(f"{peer.addresses[0]}/p2p/{peer.peer_id}" for peer in residents)
    joiner = swarm.add(waits_for_start=True, is_founder=False, bootstraps=bootstraps)
    joiner.trainer.frozen = True
    entered.is_on = True
    joiner.start()
    await swarm.until(lambda: joiner.transfers and joiner.lifecycle.may_meet)
    entered.is_on = False


async def call(swarm: Swarm, entered: Entered) -> None:
    """A stranger keeps to the protocol and sends a payload of bytes that no codec has made."""
    (victim,) = swarm.start(1)
    victim.trainer.frozen = True
    await asyncio.sleep(1.0)
    transport = swarm.network.start_peer(MALLORY.peer_id, nobody)
    hello = replace(hello_to(swarm, victim.peer_id), global_step=victim.global_step, signature=b"").signed(MALLORY)
    payload = (np.float32(1000.0).tobytes() * hello.payload_bytes)[: hello.payload_bytes]
    no_sketch = hashlib.sha256().digest()
    digest = exchange_digest(no_sketch, no_sketch, hashlib.sha256(payload).digest())
    entered.is_on = True
    stream = await transport.connect(victim.peer_id, (), Purpose.MEET)
    answer = await sends(stream, hello)
    assert isinstance(answer, Hello)
    entered.is_on = False
    commitment = Commitment(pairing(hello, answer).meeting_id, digest).signed(MALLORY)
    entered.is_on = True
    answer = await sends(stream, commitment, Chunk(Part.PAYLOAD, 0, payload))
    while not isinstance(answer, Refusal):
        answer = await sends(stream)
    await swarm.until(lambda: victim.outcomes()["gated"])
    entered.is_on = False


async def sends(stream: Stream, *sent: Message) -> Message:
    for message in sent:
        await stream.send(message)
    return await stream.receive()


@dataclass(frozen=True)
class Direction:
    """A section of the page whose list is recorded."""

    title: str
    story: Callable[[Swarm, Entered], Awaitable[None]]
    folders: tuple[str, ...] = ("peer/",)
    background: tuple[str, ...] = ()  # beside BACKGROUND
    turn: str = ""
    event: str = ""

    def record(self, folder: Path) -> dict[str, dict[str, None]]:
        """Return the files entered, in order, each with its functions."""
        entered = Entered(self.folders, (*BACKGROUND, *self.background), self.turn, self.event)
        with entered.watching():
            play(Swarm(folder, manifest=QUIET), lambda swarm: self.story(swarm, entered))
        return entered.files

    @property
    def begin(self) -> str:
        return f"<!-- {self.title}: written by tests/swarm/test_processes_page.py -->\n"

    def parts(self, page: str) -> tuple[str, str, str]:
        """Return the page before the list, the list, and the page after it."""
        before, begin, rest = page.partition(self.begin)
        written, end, after = rest.partition(END)
        assert begin and end, f"the page has no place for {self.title}"
        return before, written, after

    def passing(self, page: str) -> list[str]:
        """Return the files that the first paragraph below the list names: entered, but without a step of their own."""
        return FILE.findall(self.parts(page)[2].lstrip().partition("\n\n")[0])


MEETING = Direction(
    "A meeting", meeting, background=("StateSync.run", "Node._on_progress"), turn="TextTrainer.tick", event="TrainerExchange.announce"
)
JOIN = Direction("A join", join)
CALL = Direction(
    "A stranger's call",
    call,
    folders=("peer/", "protocol/messages/", "protocol/streams/"),
    background=("StateSync.run", "Node._on_progress", "Boundary.answer", "ProbeCost.share"),
)
WAYS = (MEETING, JOIN, CALL)


def steps(text: str) -> list[tuple[str, str]]:
    """Return the numbered files of a text, each with the name beside it."""
    return [(match[1], match[2]) for match in STEP.finditer(text)]


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.title)
def test_the_list_is_the_order_of_a_run(way: Direction, tmp_path: Path) -> None:
    page, entered = PAGE.read_text(), way.record(tmp_path)
    written, passing = steps(way.parts(page)[1]), way.passing(page)
    assert [file for file, _ in written] == [file for file in entered if file not in passing], (
        "run python -m tests.swarm.test_processes_page"
    )
    assert not set(passing) - entered.keys(), "named as entered in passing, but not entered"
    for file, name in written:
        assert name in defined(file), f"{file} has no {name}"
        assert any(f"{entry}.".startswith(f"{name}.") for entry in entered[file]), f"{name} of {file} is not entered"


def test_a_meeting_passes_few_files() -> None:
    page = PAGE.read_text()
    files = [file for file, _ in steps(MEETING.parts(page)[1])]
    assert len(files) <= 26 and len([file for file in files if file.startswith("peer/trainer/")]) <= 9
    assert len(MEETING.passing(page)) <= 10


def test_every_file_on_the_page_is_there() -> None:
    """Of the libp2p part too, for which a network in memory stands in the runs that are recorded."""
    named = set(FILE.findall(PAGE.read_text()))
    assert any(file.startswith("protocol/libp2p/") for file in named)
    assert not [file for file in named if not (ROOT / file).is_file()]


def test_the_reading_path_is_short_and_its_length_is_that_on_the_page() -> None:
    _, found, path = PAGE.read_text().partition("\n## A reading path\n")
    files = [match[1] for match in STEP.finditer(path)]
    num_lines = sum(len((ROOT / file).read_text().splitlines()) for file in files)
    assert found and 10 <= len(set(files)) == len(files) <= 12
    assert num_lines <= 3100
    stated = re.search(r"(\d+) files, about ([\d,]+) lines", path)
    assert stated is not None and int(stated[1]) == len(files)
    assert abs(int(stated[2].replace(",", "")) - num_lines) <= 100, f"they have {num_lines} lines"
    for file, name in steps(path):
        assert name in defined(file), f"{file} has no {name}"


def defined(file: str) -> set[str]:
    """Return the classes and functions of a file, methods as Class.method."""
    names = set()
    for node in ast.parse((ROOT / file).read_text()).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            names |= {node.name, *(f"{node.name}.{inner.name}" for inner in getattr(node, "body", ()) if hasattr(inner, "name"))}
    return names


def described(file: str, name: str) -> str:
    """Return the first line of a function's docstring, or of its class's, or of its file's."""
    tree, text = ast.parse((ROOT / file).read_text()), ""
    text = ast.get_docstring(tree) or ""
    nodes: list[ast.stmt] = tree.body
    for part in name.split("."):
        node = next((node for node in nodes if getattr(node, "name", "") == part), None)
        if not isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            break
        text, nodes = ast.get_docstring(node) or text, node.body
    return text.splitlines()[0].removesuffix(".")


def rewrite() -> None:
    """Write every list anew. A file keeps the name and the sentence that the page has for it."""
    for way in WAYS:
        page = PAGE.read_text()
        before, written, after = way.parts(page)
        passing, known = way.passing(page), {match[1]: match for match in STEP.finditer(written)}
        with tempfile.TemporaryDirectory() as folder:
            entered = way.record(Path(folder))
        lines = []
        for number, file in enumerate((file for file in entered if file not in passing), 1):
            match, first = known.get(file), next(iter(entered[file]))
            name, text = (match[2], match[3]) if match else (first, described(file, first))
            lines.append(f"{number}. `{file}` `{name}`: {text}\n")
        PAGE.write_text(before + way.begin + "".join(lines) + END + after)


if __name__ == "__main__":
    rewrite()
