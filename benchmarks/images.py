"""What a swarm brings a user's own loop: examples/images.py with 1, 2 and 4 peers, each with its own thousand images, for three seeds.

    python -m benchmarks.images [--peers 1,2,4] [--seeds 0,1,2]

Real processes on this machine. Prints the held-out loss at the end, whether all peers end bit for bit alike, the meetings, and the share of
the time for which `step()` has blocked. One peer alone is the same loop without a swarm.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Sequence
from pathlib import Path

import torch
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from gossamer.peer.machine.home import Home

SCRIPT = Path(__file__).parents[1] / "examples" / "images.py"
sys.path.insert(0, str(SCRIPT.parent))
import images  # type: ignore[import-not-found]  # noqa: E402 - the example


def alone(home: str) -> float:
    """Train the example's loop without a swarm; return the held-out loss."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    data = TensorDataset(*images.images(1024, seed=zlib.crc32(home.encode())))
    loader, model = DataLoader(data, batch_size=64, shuffle=True, drop_last=True), images.network()
    optimizer, num_steps = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.05), 0
    while num_steps < images.STEPS:
        for batch, labels in loader:
            functional.cross_entropy(model(batch), labels).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
            num_steps += 1
            if num_steps == images.STEPS:
                break
    held_out = images.images(1000, seed=1)
    model.eval()
    with torch.no_grad():
        return float(functional.cross_entropy(model(held_out[0]), held_out[1]))


def together(homes: Sequence[str]) -> tuple[list[str], list[dict[str, object]]]:
    """Run a swarm of the example; return the last line of each peer, and its last status."""
    environment = os.environ | {"PYTHONPATH": str(SCRIPT.parents[1]), "OMP_NUM_THREADS": "1", "PEERS": str(len(homes))}

    def start(*arguments: str) -> subprocess.Popen[str]:
        return subprocess.Popen([sys.executable, "-P", str(SCRIPT), *arguments], stdout=subprocess.PIPE, text=True, env=environment)

    host = start(homes[0])
    assert host.stdout is not None
    invite = host.stdout.readline().strip()
    peers = [host, *(start(home, invite) for home in homes[1:])]
    lines = [peer.communicate()[0].splitlines()[-1] for peer in peers]
    return lines, [Home(Path(home)).last_status() for home in homes]


def row(num_peers: int, seed: int, folder: Path) -> str:
    """Run one experiment and return its row."""
    homes = [str(folder / f"seed-{seed}-of-{num_peers}-peer-{number}") for number in range(num_peers)]
    if num_peers == 1:
        return f"| 1 | {seed} | {alone(homes[0]):.3f} | | | |"
    lines, ends = together(homes)
    loss = lines[0].removeprefix("held-out loss ").split(",")[0]
    met = statistics.mean(float(end["meetings"]["completed"]) for end in ends)  # type: ignore[index]
    blocked = statistics.mean(float(end["blocked_seconds"]) / float(end["train_seconds"]) for end in ends)  # type: ignore[arg-type]
    return f"| {num_peers} | {seed} | {loss} | {'yes' if len(set(lines)) == 1 else 'no'} | {met:.0f} | {100 * blocked:.1f} % |"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", default="1,2,4")
    parser.add_argument("--seeds", default="0,1,2")
    given = parser.parse_args()
    print("| peers | seed | held-out loss | ends alike | meetings of a peer | blocked |\n|---|---|---|---|---|---|")
    for num_peers in map(int, given.peers.split(",")):
        for seed in map(int, given.seeds.split(",")):
            with tempfile.TemporaryDirectory() as folder:
                print(row(num_peers, seed, Path(folder)), flush=True)


if __name__ == "__main__":
    main()
