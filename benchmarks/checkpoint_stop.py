"""The time for which a checkpoint stops the trainer: written at the step boundary, or copied there and written beside the inner steps.

    python -m benchmarks.checkpoint_stop [--millions N] [--rounds N] [--json]

A llama of about 125 million parameters with AdamW on the CPU, on the working directory's disk. `stop` is the wall time without an inner
step, `share` its share of the default interval of 60 s, and `interval` the interval that the trainer chooses from it (checkpoints may stop
it for 1 % of its time, and be written in a tenth of it). Inner steps are timed with and without a concurrent write: the difference is what
the writing costs them. The aim is a share of at most 1 %.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
import timeit
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from gossamer.peer.machine.config import PeerConfig
from gossamer.peer.machine.events import CheckpointSaved, Event
from gossamer.peer.machine.home import Home
from gossamer.peer.model.model import build_model
from gossamer.peer.text.batches import Draw
from gossamer.peer.text.corpus import load_corpus
from gossamer.peer.text.tokenizer import load_tokenizer
from gossamer.peer.trainer.saver import LONGEST_S, STOP_SHARE, WRITE_SHARE, Saver
from gossamer.peer.trainer.text_training import TextProgram, TextReplica
from gossamer.protocol.run.manifest import Manifest

INTERVAL_S = 60.0


def manifest(millions: float) -> Manifest:
    """Return a job of about this many million parameters with small batches: 12 blocks and an embedding of 32,000."""
    width = 64 * max(1, round((millions / 110) ** 0.5 * 12))
    model = {
        "hidden_size": width, "intermediate_size": 64 * round(width * 8 / 3 / 64), "num_hidden_layers": 12,
        "num_attention_heads": width // 64, "num_key_value_heads": width // 64, "vocab_size": 32_000,
        "max_position_embeddings": 128, "tie_word_embeddings": True,
    }  # fmt: skip
    return Manifest.checked({"model": {"config": model}, "inner": {"optimizer": "adamw", "batch_size": 1, "sequence_length": 64}})


def build(job: Manifest, folder: Path) -> TextReplica:
    """Build a replica in a folder."""
    draw = Draw(0, b"me", job.inner.batch_size, job.inner.sequence_length)
    corpus = load_corpus(job.data, load_tokenizer(job.tokenizer), draw, None, folder)
    return TextReplica(job, TextProgram(job, build_model(job.model, 0), corpus, lambda event: None), 0)


@dataclass(frozen=True, slots=True)
class Figures:
    """Medians over the rounds, seconds."""

    params: int
    checkpoint_bytes: int
    boundary_stop_s: float
    copy_stop_s: float
    write_s: float  # beside the inner steps
    calm_step_s: float
    beside_step_s: float

    @property
    def interval_s(self) -> float:
        """Return the shortest interval at which the trainer saves."""
        return max(INTERVAL_S, self.copy_stop_s / STOP_SHARE, min(self.write_s / WRITE_SHARE, LONGEST_S))


def measure(job: Manifest, rounds: int, folder: Path) -> Figures:
    """Save in both ways, alternating."""
    replica, happened = build(job, folder), list[Event]()
    home = Home(folder / "home")
    home.create()
    saver = Saver(home, PeerConfig(home=home.path), happened.append, time.monotonic)
    replica.inner_step()
    saver.begin(replica)  # makes the place for the copies
    saver.finish()
    stops, calm, beside = list[float](), list[float](), list[float]()
    for _ in range(rounds):
        calm += timeit.repeat(replica.inner_step, number=1, repeat=2)
        stops.append(timeit.timeit(lambda: saver.save(replica), number=1))
        saver.begin(replica)
        while saver.is_writing:
            beside.append(timeit.timeit(replica.inner_step, number=1))
            saver.look()
    copied = [event for event in happened if isinstance(event, CheckpointSaved) and event.stopped_s]
    return Figures(
        sum(parameter.numel() for parameter in replica.parameters.values()),
        copied[0].num_bytes,
        statistics.median(stops),
        statistics.median(event.stopped_s for event in copied),
        statistics.median(event.seconds for event in copied),
        statistics.median(calm),
        statistics.median(beside),
    )


def main() -> None:
    """Print the table, or JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--millions", type=float, default=125.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="checkpoint-stop-", dir=Path.cwd()) as folder:
        figures = measure(manifest(given.millions), given.rounds, Path(folder))
    if given.json:
        print(json.dumps(asdict(figures) | {"interval_s": figures.interval_s}))
        return
    print(f"{figures.params / 1e6:.0f} million parameters, {figures.checkpoint_bytes / 1e6:.0f} MB a checkpoint")
    print(f"{'':<28}{'stop':>10}{'share':>9}{'interval':>10}")
    for name, stop_s, interval_s in (
        ("written at the boundary", figures.boundary_stop_s, INTERVAL_S),
        ("copied, written beside", figures.copy_stop_s, figures.interval_s),
    ):
        print(f"{name:<28}{stop_s:>8.2f} s{stop_s / interval_s:>9.2%}{interval_s:>8.0f} s")
    print(f"writing takes {figures.write_s:.1f} s; an inner step {figures.calm_step_s:.2f} s, beside a write {figures.beside_step_s:.2f} s")


if __name__ == "__main__":
    main()
