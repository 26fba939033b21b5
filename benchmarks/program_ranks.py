"""Time of a step boundary in a program of several ranks, and memory of each rank: DDP beside FSDP2, over gloo on this machine.

    python -m benchmarks.program_ranks [--millions N] [--ranks N] [--steps N]

A stack of square linear layers, hosted alone. `step` is `swarm.step` with nothing due. `snapshot` gathers a fragment on rank 0, as a
meeting does when it opens; `move` adds an outer step to it, on all ranks. Times are medians on rank 0. `resident` is the memory of a rank's
process in bytes per parameter, over what it had before the model was built: after the steps, and at most, with a checkpoint. The C library
returns freed memory at once here (MALLOC_MMAP_THRESHOLD_), else it keeps what FSDP2 frees.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import tempfile
import timeit
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import psutil
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import gossamer
from gossamer.channel import Call
from gossamer.ranks import LeadingSwarm

WIDTH: Final = 1024


def high_bytes() -> int:
    """Return the most memory that this process has had resident."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return 1024 * int(line.split()[1])


def train(kind: str, number: int, given: argparse.Namespace, folder: Path, results: Any) -> None:
    """Be one rank."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=(folder / "store").as_uri(), rank=number, world_size=given.ranks)
    before = psutil.Process().memory_info().rss
    torch.manual_seed(0)
    bare = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(max(1, int(given.millions * 1e6 / WIDTH**2)))))
    model: nn.Module = DistributedDataParallel(bare) if kind == "DDP" else bare
    if kind == "FSDP2":
        mesh = init_device_mesh("cpu", (given.ranks,))
        for module in (*bare, bare):
            fully_shard(module, mesh=mesh)
    optimizer, held_out = torch.optim.AdamW(model.parameters(), lr=1e-4), torch.randn(1, WIDTH)
    steps: list[float] = []
    run = gossamer.Run("benchmark", 1_000_000)
    swarm = gossamer.host(
        run, model, optimizer, evaluate=lambda: float(bare(held_out).square().mean()), home=folder / "home", settings={"alone": True}
    )
    for _ in range(given.steps):
        model(torch.randn(1, WIDTH)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        steps.append(timeit.timeit(lambda: swarm.step(tokens=1), number=1))
    resident = psutil.Process().memory_info().rss
    found: dict[str, float] = {"step": statistics.median(steps)}
    if isinstance(swarm, LeadingSwarm):
        found |= moved(swarm)
    else:
        swarm.wait()
    found["save"] = timeit.timeit(swarm.save, number=1)
    num_params = sum(parameter.numel() for parameter in bare.parameters())
    found |= {"resident": (resident - before) / num_params, "most": (high_bytes() - before) / num_params, "params": num_params}
    swarm.leave()
    swarm.finish()
    dist.destroy_process_group()
    results.put((number, found))


def moved(swarm: LeadingSwarm) -> dict[str, float]:
    """Time the parts of a meeting that need the weights, on rank 0, while the others wait in a call."""
    with swarm._together(Call.WAIT):
        fragments, own = [state.codec.fragment for state in swarm._replica.fragments], swarm._own
        largest = max(fragments, key=lambda fragment: fragment.numel)
        shift = torch.zeros(largest.numel)

        def move() -> None:
            own.weights.add(largest, shift)
            own.even_out(largest)

        snapshots, moves = (timeit.repeat(call, number=1, repeat=9) for call in (lambda: own.weights.gather(largest), move))
        return {"values": largest.numel, "snapshot": statistics.median(snapshots), "move": statistics.median(moves)}


def measured(kind: str, given: argparse.Namespace) -> list[dict[str, float]]:
    """Run a program of this kind; return what each rank has found."""
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        started = [context.Process(target=train, args=(kind, number, given, Path(folder), results)) for number in range(given.ranks)]
        for process in started:
            process.start()
        found = dict(results.get() for _ in started)
        for process in started:
            process.join()
    return [found[number] for number in range(given.ranks)]


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure both kinds, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--millions", type=float, default=64.0)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=20)
    given = parser.parse_args(arguments)
    os.environ["MALLOC_MMAP_THRESHOLD_"] = "1048576"
    print("kind   step ms  fragment MB  snapshot ms  move ms  save s  resident B/param (at most), by rank")
    for kind in ("DDP", "FSDP2"):
        ranks = measured(kind, given)
        first = ranks[0]
        held = ", ".join(f"{one['resident']:.1f} ({one['most']:.1f})" for one in ranks)
        print(
            f"{kind:5}  {1e3 * first['step']:7.2f}  {4e-6 * first['values']:11.1f}  {1e3 * first['snapshot']:11.1f}"
            f"  {1e3 * first['move']:7.1f}  {first['save']:6.2f}  {held}",
            flush=True,
        )


if __name__ == "__main__":
    main()
