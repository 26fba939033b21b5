"""How much of what a peer reads others read too, from a data set of one file or of several: units by hash, and as it was before.

    python -m benchmarks.overlap [--peers N] [--documents N] [--share S] [--json]

Makes small data sets on this disk, has each peer read the same share of one, and prints which share of a peer's documents some other peer
has read as well, over several runs' seeds. `chance` is what peers that draw each document at random would have in common; `before` is a
reader that begins at one of the first ten thousand documents and goes on from there, as peers did.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path

import pyarrow
import pyarrow.parquet

from gossamer.peer.text.batches import Draw
from gossamer.peer.text.document_stream import Bookmark, DocumentStream, open_stream
from gossamer.protocol.run.sections import DataSection

SEEDS = 20
FIRST_DOCUMENTS = 10_000  # before
LAYOUTS = {"1 file, row groups": (1, "parquet"), "1 file, no row groups": (1, "jsonl"), "8 files": (8, "jsonl"), "64 files": (64, "jsonl")}


def write(folder: Path, num_files: int, kind: str, num_documents: int) -> None:
    """Make a data set whose documents are their own numbers."""
    folder.mkdir()
    for file in range(num_files):
        texts = [str(number) for number in range(file * num_documents // num_files, (file + 1) * num_documents // num_files)]
        path = folder / f"train-{file:03}.{kind}"
        if kind == "parquet":
            pyarrow.parquet.write_table(pyarrow.table({"text": texts}), path, row_group_size=1000)
        else:
            path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))


def by_units(folder: Path, seed: int, peer: bytes, num_read: int) -> set[int]:
    """Read as peers do."""
    stream: DocumentStream = open_stream(
        DataSection(source="huggingface", name=str(folder), revision="0" * 40), Draw(seed, peer, batch_size=1, sequence_length=2)
    )
    return {int(str(text)) for text, _ in itertools.islice(stream.read(Bookmark(0, 0, 0, 0)), num_read)}


def as_before(num_files: int, num_documents: int, seed: int, peer: bytes, num_read: int) -> set[int]:
    """Read file after file in a random order, from one of the first documents on."""
    draw = random.Random(f"{seed}/{peer!r}")
    files, each = draw.sample(range(num_files), num_files), num_documents // num_files
    first = draw.randrange(FIRST_DOCUMENTS)
    order = [file * each + number for place, file in enumerate(files) for number in range(0 if place else min(first, each), each)]
    return set((order + list(range(num_documents)))[:num_read])


def shared(read: list[set[int]]) -> float:
    """Return which share of what a peer has read some other has read too, the mean of all peers."""
    return statistics.fmean(
        len(mine & set().union(*(others for place, others in enumerate(read) if place != at))) / len(mine) for at, mine in enumerate(read)
    )


def over_seeds(num_peers: int, reader: Callable[[int, bytes], set[int]]) -> float:
    """Return the mean of `shared` over the seeds."""
    return statistics.fmean(shared([reader(seed, b"%d" % peer) for peer in range(num_peers)]) for seed in range(SEEDS))


def main() -> None:
    """Print the table, or JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=int, default=4)
    parser.add_argument("--documents", type=int, default=100_000)
    parser.add_argument("--share", type=float, default=0.05, help="of the data set that each peer reads")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    num_read, found = int(given.share * given.documents), {}
    with tempfile.TemporaryDirectory() as root:
        for name, (num_files, kind) in LAYOUTS.items():
            folder = Path(root) / f"{num_files}-{kind}"
            write(folder, num_files, kind, given.documents)

            def before(seed: int, peer: bytes, num_files: int = num_files) -> set[int]:
                return as_before(num_files, given.documents, seed, peer, num_read)

            def now(seed: int, peer: bytes, folder: Path = folder) -> set[int]:
                return by_units(folder, seed, peer, num_read)

            found[name] = {"before": over_seeds(given.peers, before), "now": over_seeds(given.peers, now)}
    chance = 1 - (1 - given.share) ** (given.peers - 1)
    if given.json:
        print(json.dumps({"chance": chance, **found}))
        return
    print(f"{given.peers} peers, each has read {given.share:.0%} of {given.documents} documents; by chance {chance:.1%}")
    print(f"{'read by others too':<26}{'before':>8}{'now':>8}")
    for name, row in found.items():
        print(f"{name:<26}{row['before']:>8.1%}{row['now']:>8.1%}")


if __name__ == "__main__":
    main()
