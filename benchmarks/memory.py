"""Bytes per parameter of a run as a peer counts them before it starts: on the device, in memory, in shared memory and on disk.

    python -m benchmarks.memory [--check MILLIONS]

For the models of `benchmarks.gpu`, both optimizers, a GPU (`host`: `optimizer_on_host`), the first of 8, a CPU and two processes on it.
`passing` is the temporary memory of four meetings at once beside a fragment sync, or of the trial of a partner's weights, on the device of
the weights, and of the part of an optimizer that steps. Memory that does not grow with the parameters is left out (programs, CUDA,
activations of a batch). `--check` builds a peer's replica of that many million parameters on this CPU, lets it step, meet with its largest
fragment and save, and prints the process's peak memory beside the count.
"""

from __future__ import annotations

import argparse
import resource
import tempfile
import time
from pathlib import Path

import psutil

from benchmarks.gpu import SIZES
from gossamer.optim.noloco import NoLoCo
from gossamer.peer.machine.config import PeerConfig
from gossamer.peer.machine.home import Home
from gossamer.peer.model.computing import Computing
from gossamer.peer.model.model import build_model
from gossamer.peer.text.batches import Draw
from gossamer.peer.text.corpus import load_corpus
from gossamer.peer.text.tokenizer import load_tokenizer
from gossamer.peer.trainer.meeting import MeetingSide
from gossamer.peer.trainer.need import PROGRAMS, SYNCED, TRIED_ON, WORKING, Need, run_need
from gossamer.peer.trainer.saver import Saver
from gossamer.peer.trainer.text_training import TextProgram, TextReplica
from gossamer.protocol.run.manifest import Manifest

FIXED = {
    PROGRAMS,
    "for the GPU's runtime",
    "for what a batch leaves in the model",
    "for payloads",
}  # the last in a column of their own
PASSING = {"for meetings under way", SYNCED, TRIED_ON, WORKING}
PLACES = ("device", "memory", "payloads", "disk")


def per_parameter(need: Need) -> dict[str, float]:
    """Return bytes per parameter by place, without fixed memory; on the device and in memory also the temporary part."""
    places = {place: {what: size for what, size in getattr(need, place).items() if what not in FIXED} for place in PLACES}
    passing = sum(size for place in ("device", "memory") for what, size in places[place].items() if what in PASSING)
    steady = {
        place: sum(size for what, size in parts.items() if place in ("payloads", "disk") or what not in PASSING)
        for place, parts in places.items()
    }
    return {place: size / need.num_params for place, size in (steady | {"passing": passing}).items()}


def rows() -> dict[str, dict[str, float]]:
    """Return the table."""
    return {
        f"{name} {optimizer} {label}": per_parameter(
            run_need(SIZES[name].manifest(optimizer), device, Computing(micro_batch=1, num_devices=count, optimizer_on_host=on_host))
        )
        for name in ("125M", "350M", "1.2B")
        for optimizer in ("adamw", "muon")
        for label, device, count, on_host in (
            ("cuda", "cuda", 1, False),
            ("cuda, host", "cuda", 1, True),
            ("8 x cuda", "cuda", 8, False),
            ("cpu", "cpu", 1, False),
            ("cpu:2", "cpu", 2, False),
        )
    }


def peak_bytes() -> int:
    """Return the peak memory of this process."""
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def manifest(millions: float) -> Manifest:
    """Return a job of about this many million parameters with small batches: 12 blocks and an embedding of 32,000."""
    width = 64 * max(1, round((millions / 110) ** 0.5 * 12))
    model = {
        "hidden_size": width, "intermediate_size": 64 * round(width * 8 / 3 / 64), "num_hidden_layers": 12,
        "num_attention_heads": width // 64, "num_key_value_heads": width // 64, "vocab_size": 32_000,
        "max_position_embeddings": 128, "tie_word_embeddings": True,
    }  # fmt: skip
    return Manifest.checked({"model": {"config": model}, "inner": {"optimizer": "adamw", "batch_size": 1, "sequence_length": 64}})


def check(job: Manifest, folder: Path) -> dict[str, float]:
    """Return the peak memory of a real replica and the counted one, in bytes per parameter."""
    before, outer = psutil.Process().memory_info().rss, job.outer
    draw = Draw(0, b"me", job.inner.batch_size, job.inner.sequence_length)
    corpus = load_corpus(job.data, load_tokenizer(job.tokenizer), draw, None, folder)
    replica = TextReplica(job, TextProgram(job, build_model(job.model, 0), corpus, lambda event: None), 0)
    home = Home(folder / "home")
    home.create()
    saver = Saver(home, PeerConfig(home=home.path), lambda event: None, time.monotonic)
    for _ in range(2):
        replica.inner_step()
        side = MeetingSide(max(replica.fragments, key=lambda fragment: fragment.slow.numel()))
        sketch = side.prepare(NoLoCo(outer.alpha, outer.beta, outer.gamma), 0.5, 1)
        side.judge(side.encode(sketch))
        side.merge(side.step(side.failed_blocks))
        side.state.move_fast_weights()
        saver.begin(replica)
        saver.finish()
    need = run_need(job, "cpu", Computing())
    counted = sum(size for what, size in need.memory.items() if what not in (PROGRAMS, "for payloads"))
    return {"held": (peak_bytes() - before) / need.num_params, "counted": counted / need.num_params}


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", type=float, metavar="MILLIONS")
    given = parser.parse_args()
    if given.check:
        with tempfile.TemporaryDirectory(prefix="memory-", dir=Path.cwd()) as folder:
            found: dict[str, dict[str, float]] = {f"{given.check:g}M adamw cpu": check(manifest(given.check), Path(folder))}
    else:
        found = rows()
    names = list(next(iter(found.values())))
    print(f"{'bytes per parameter':<22}" + "".join(f"{name:>12}" for name in names))
    for row, values in found.items():
        print(f"{row:<22}" + "".join(f"{values[name]:>12.1f}" for name in names))


if __name__ == "__main__":
    main()
