"""The job of every system: the demo's model on a text, with equal initial weights and the same batches at peer k.

A peer of any system has a home folder like a Gossamer peer: its key, the signed manifest, checkpoints with `fast/NAME` tensors, and
`events.jsonl`. So one reader follows all systems, and one function measures their held-out loss. A system that exchanges every n steps
takes n from the job; Gossamer may be given its own interval.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, Self

from gossamer.peer.machine.home import Home, write_whole
from gossamer.peer.text.batches import Draw
from gossamer.peer.text.corpus import Corpus, load_corpus
from gossamer.peer.text.tokenizer import load_tokenizer
from gossamer.protocol.identity import Identity
from gossamer.protocol.run.manifest import Manifest, SignedManifest, need_text

NANOGPT: Final = "nanogpt"
TASKS: Final[dict[str, dict[str, Any]]] = {  # what the manifest says beside its defaults, by name
    "": {},
    NANOGPT: {"data": {"source": "text"}, "inner": {"batch_size": 12, "sequence_length": 64, "learning_rate": 0.02}},
}


@dataclass(frozen=True, slots=True)
class Job:
    """One training run that every system can do."""

    num_peers: int = 4
    total_steps: int = 300  # inner steps of each peer
    seed: int = 0
    every_steps: int = 10  # inner steps between two exchanges of those that exchange weights
    gossamer_every: str = ""  # Gossamer's mean interval, a number or `auto`; empty: the manifest's default
    task: str = ""  # of TASKS
    data: str = ""  # path of the text of a task that has none of its own

    @property
    def text(self) -> Path | None:
        """Return the path of the text; None where the task has its own."""
        return Path(self.data) if self.data else None

    def identity(self, number: int) -> Identity:
        """Return the key of peer 1, 2, ...; the same in every run, since it decides the batches."""
        return Identity(hashlib.sha256(f"gossamer side by side, peer {number}".encode()).digest())

    def manifest(self, outer: dict[str, Any] | None = None) -> SignedManifest:
        """Return the run's manifest, signed by peer 1; `outer` are settings of Gossamer's outer loop. Raises BadManifest."""
        run = {"name": "side by side", "seed": self.seed, "total_steps": self.total_steps}
        values = {"run": run, "outer": outer or {}, **TASKS[self.task]}
        host = self.identity(1)
        return SignedManifest.sign(Manifest.checked(values).with_host(host.peer_id), host)

    def gossamer_outer(self) -> dict[str, Any]:
        """Return the settings of Gossamer's outer loop that differ from the manifest's defaults."""
        given = self.gossamer_every
        return {"inner_steps": int(given) if given.isdecimal() else given} if given else {}

    def furnish(self, home: Home, number: int) -> None:
        """Create the home of a peer with its key."""
        home.create()
        write_whole(home.identity, self.identity(number).to_bytes())

    def corpus(self, number: int, cache: Path) -> Corpus:
        """Return the corpus of a peer's trainer."""
        manifest = need_text(self.manifest().manifest())
        inner = manifest.inner
        draw = Draw(manifest.run.seed, self.identity(number).peer_id.raw, inner.batch_size, inner.sequence_length)
        return load_corpus(manifest.data, load_tokenizer(manifest.tokenizer), draw, self.text, cache)


@dataclass(frozen=True, slots=True)
class Seat:
    """The command-line arguments of a rival's process."""

    system: str
    number: int  # 1, 2, ...
    home: Path
    meeting_place: Path  # a folder that all peers of the run see: who is where
    addresses: tuple[str, ...]  # of all peers, in their order
    job: Job

    @property
    def address(self) -> str:
        """Return this peer's own address."""
        return self.addresses[self.number - 1]

    def to_text(self) -> str:
        """Return the seat as one word of a command line."""
        return json.dumps(asdict(self) | {"home": str(self.home), "meeting_place": str(self.meeting_place)})

    @classmethod
    def from_text(cls, text: str) -> Self:
        """Read what `to_text` wrote."""
        read = json.loads(text)
        paths = {name: Path(read[name]) for name in ("home", "meeting_place")}
        return cls(**read | paths | {"addresses": tuple(read["addresses"]), "job": Job(**read["job"])})
