"""Unlike data is not malice: five honest peers, each on another kind of text, judge each other's messages on their own text alone."""

from __future__ import annotations

import json
import sysconfig
from collections.abc import Callable
from pathlib import Path
from random import Random

import torch

from gossamer.peer.simulator.choices import scenario
from gossamer.peer.simulator.hostile import members
from gossamer.peer.simulator.methods import method, pair_rule
from gossamer.peer.simulator.pairs import PairPeer, gossip
from gossamer.peer.simulator.population import Population, populate
from gossamer.peer.simulator.texts import Texts
from gossamer.peer.text.batches import Draw
from gossamer.peer.text.corpus import load_corpus
from gossamer.peer.text.tokenizer import load_tokenizer
from gossamer.protocol.run.manifest import Manifest

ROOT = Path(__file__).parents[3]
NUM_BYTES = 200_000  # of each kind
MODEL = {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 3}
CHOICES = {"codec": "modulo4", "batch_size": 2, "sequence_length": 64, "steps": 60, "inner_steps": 5, "seed": 11}


def sources(_: Random) -> str:
    """Return large modules of the standard library."""
    paths = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"), key=lambda path: -path.stat().st_size)
    return "".join(path.read_text() for path in paths[:4])


def prose(_: Random) -> str:
    """Return this project's pages."""
    return "".join(path.read_text() for path in sorted((ROOT / "docs").rglob("*.md")))


def markup(_: Random) -> str:
    """Return this project's web page and pictures: HTML, CSS, JavaScript and SVG."""
    return "".join(path.read_text() for ending in ("html", "css", "js", "svg") for path in sorted(ROOT.glob(f"[cd]*/p*/*.{ending}")))


def records(draws: Random) -> str:
    """Return lines of JSON."""
    return "".join(json.dumps({"id": number, "ok": draws.random() < 0.5, "at": draws.randrange(10**6)}) + "\n" for number in range(4000))


def log(draws: Random) -> str:
    """Return a log file."""
    events = "connected to", "lost", "served a page to", "refused a request of"
    lines = (
        f"10:{number // 60 % 60:02}:{number % 60:02} host {draws.choice(events)} 10.0.0.{draws.randrange(99)}" for number in range(4000)
    )
    return "\n".join(lines)


KINDS: tuple[Callable[[Random], str], ...] = (sources, prose, markup, records, log)


def swarm(folder: Path) -> Population:
    base = Manifest.checked({"model": {"config": Manifest().model.config | MODEL}, "data": {"source": "text"}})
    made = scenario(base, {"method": "noloco", "peers": len(KINDS), **CHOICES})
    manifest, tokenizer, corpora = made.manifest, load_tokenizer(made.manifest.tokenizer), []
    for number, kind in enumerate(KINDS):
        own = folder / kind.__name__
        own.mkdir()
        (own / "text.txt").write_text(kind(Random(number))[:NUM_BYTES])
        draw = Draw(made.seed, b"%d" % number, manifest.inner.batch_size, manifest.inner.sequence_length)
        corpora.append(load_corpus(manifest.data, tokenizer, draw, own, folder / "cache"))
    torch.manual_seed(made.seed)
    texts = Texts(tuple(corpora), tuple(corpora))
    return populate(made, tokenizer, texts, torch.device("cpu"), method("noloco").schedules(made))


def test_five_peers_on_five_kinds_of_text_merge_with_each_other(tmp_path: Path) -> None:
    population, met = swarm(tmp_path), list[PairPeer]()

    def enter(population: Population) -> list[PairPeer]:
        met.extend(members(population))
        return met

    for _ in gossip(population, pair_rule(population.scenario), enter):
        pass
    assert population.traffic.refused == 0
    assert population.traffic.completed > 25
    for peer in met:
        merged = {str(partner): peer.records.get(partner).merged for partner in peer.records.peers()}
        assert len(merged) == len(KINDS) - 1 and min(merged.values()) > 0
        assert not any(peer.records.is_shunned(partner, peer.now_s) for partner in peer.records.peers())
