"""Estimates for models of real size on a line: joining, meetings, bytes per day, and memory; computed by the code of real peers.

    python -m benchmarks.estimates [--step-seconds S]

Nothing is downloaded, built or trained: only the shapes of the models, cut as in a default manifest, with `modulo4` and AdamW. All lines
are symmetrical, and all peers have the same one. `join` is the time until a new peer meets with a weight above 0. `apart` is the shortest
mean countdown that the line carries in half of its time, `a day` the bytes sent in a day at that countdown (as many are received). If that
exceeds half of the line, the longest countdown (1000 steps) is too short: such a peer meets rarely and late. For one run:
`peer simulate --network MANIFEST --bandwidth MBIT`.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import Any, Final

from gossamer.cli.figures import duration_text
from gossamer.peer.machine.units import bytes_text
from gossamer.peer.trainer.interval import estimate
from gossamer.peer.trainer.need import needs, places
from gossamer.protocol.run.manifest import Manifest

LINES_MBIT: Final = (5, 20, 100, 1000)
# hidden size, intermediate size, layers, heads, heads of keys and values, vocabulary, one matrix for embedding and head
SIZES: Final = {
    "125M": (768, 2048, 12, 12, 12, 50_304, True),
    "1.2B": (2048, 5632, 22, 32, 32, 32_000, True),
    "7B": (4096, 11_008, 32, 32, 32, 32_000, False),
    "8B": (4096, 14_336, 32, 32, 8, 128_256, False),
}


def manifest(size: str) -> Manifest:
    """Return a run of a llama of this size, one sequence of 2048 tokens at a time."""
    hidden, intermediate, layers, heads, kv_heads, vocabulary, is_tied = SIZES[size]
    config = {
        "hidden_size": hidden, "intermediate_size": intermediate, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "vocab_size": vocabulary, "max_position_embeddings": 2048, "tie_word_embeddings": is_tied,
    }  # fmt: skip
    inner = {"optimizer": "adamw", "batch_size": 64, "sequence_length": 2048}
    return Manifest.checked({"model": {"config": config}, "inner": inner})


def found_for(size: str, step_s: float) -> dict[str, Any]:
    """Return the estimates of one size, by line."""
    job = manifest(size)
    need = needs(job)
    by_line = {mbit: asdict(estimate(need["cpu"].plan, job.outer.max_clock_gap_steps, 1e6 * mbit / 8, step_s)) for mbit in LINES_MBIT}
    return {"params": need["cpu"].num_params, "lines": by_line, "bytes_needed": {device: places(one) for device, one in need.items()}}


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--step-seconds", type=float, default=10.0)
    given = parser.parse_args()
    found = {size: found_for(size, given.step_seconds) for size in SIZES}
    print(f"{'model':<8}{'Mbit/s':>8}{'join':>12}{'a meeting':>12}{'apart':>12}{'steps':>8}{'a day':>12}{'of the line':>13}")
    for size, of_size in found.items():
        for mbit, row in of_size["lines"].items():
            times = "".join(f"{duration_text(row[key]):>12}" for key in ("join_s", "meeting_s", "interval_s"))
            print(f"{size:<8}{mbit:>8}{times}{row['interval_steps']:>8}{bytes_text(row['day_bytes']):>12}{row['line_share']:>13.0%}")
    print(f"\n{'model':<8}{'parameters':>12}{'':<6}{'device':>10}{'memory':>10}{'shared':>10}{'disk':>10}")
    for size, of_size in found.items():
        for device, sizes in of_size["bytes_needed"].items():
            print(f"{size:<8}{of_size['params']:>12}  {device:<4}" + "".join(f"{bytes_text(size):>10}" for size in sizes.values()))


if __name__ == "__main__":
    main()
