"""A program of one or several ranks, as the tests start it: `program_of_ranks.py HOME [--invite WORD] [--go-on] [--steps N] ...`.

RANK and WORLD_SIZE in the environment make it one of several; the store of their process group is a file beside HOME.
Prints what happens, a line each.
"""

import argparse
import itertools
import os
import sys
import time
import zlib
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parallel import DistributedDataParallel

import gossamer

parser = argparse.ArgumentParser()
parser.add_argument("home")
parser.add_argument("--invite")
parser.add_argument("--go-on", action="store_true")
parser.add_argument("--steps", type=int, default=200)
parser.add_argument("--peers", type=int, default=0)
parser.add_argument("--own-steps", type=int, default=0, help="leave after so many")
parser.add_argument("--leaves", type=int, default=0, help="the rank that leaves")
parser.add_argument("--stops-early", type=int, default=-1, help="the rank that makes a step less than the others")
parser.add_argument("--goes-back", action="store_true", help="to step 20, at step 40")
parser.add_argument("--pause-s", type=float, default=0.0)
parser.add_argument("--wider", type=int, default=-1, help="the rank with another model")
parser.add_argument("--unsteady", action="store_true")
parser.add_argument("--raises", type=int, default=-1, help="the rank whose evaluate raises")
parser.add_argument("--miscounts", type=int, default=-1, help="the rank whose step has no whole number of tokens")
parser.add_argument("--frozen", action="store_true", help="train the last layer alone, as of an adapter")
parser.add_argument("--unjudged", action="store_true")
parser.add_argument("--sharded", choices=("rows", "columns", "mesh"), help="FSDP2 in place of DDP, and how")
given = parser.parse_args()
rank = int(os.environ.get("RANK", "0"))

torch.set_num_threads(1)
torch.manual_seed(0)
target = nn.Linear(8, 1).requires_grad_(False)
torch.manual_seed(0 if given.frozen else rank)
width = 33 if rank == given.wider else 31  # which two ranks cannot share evenly
bare = nn.Sequential(nn.Linear(8, width), nn.BatchNorm1d(width), nn.Tanh(), nn.Linear(width, 1))
bare[0].requires_grad_(not given.frozen)
model: nn.Module = bare
if "RANK" in os.environ:
    store = Path(f"{given.home}.{os.environ['STORE']}").absolute()
    dist.init_process_group("gloo", init_method=store.as_uri(), rank=rank, world_size=int(os.environ["WORLD_SIZE"]))
    if given.sharded:
        shape = (dist.get_world_size(), 1) if given.sharded == "mesh" else (dist.get_world_size(),)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicas", "shards")[: len(shape)])
        place = None if given.sharded == "rows" else lambda parameter: Shard(parameter.ndim - 1)
        for module in (bare[0], bare):  # the rest with the whole
            fully_shard(module, mesh=mesh, shard_placement_fn=place if given.sharded == "columns" and module is not bare else None)
    elif given.wider < 0:  # else DDP refuses it
        model = DistributedDataParallel(bare)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
held_out = torch.randn(256, 8, generator=torch.Generator().manual_seed(1))
draws = torch.Generator().manual_seed(zlib.crc32(f"{given.home}/{rank}".encode()))


calls = itertools.count()


def loss_on(network, x):
    return (network(x) - target(x).tanh()).square().flatten()


def evaluate():
    if given.unsteady:
        return float(next(calls))
    losses = loss_on(bare, held_out)
    if rank == given.raises:
        raise ValueError("no data here")
    return losses


def whole(tensor):
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()


def digest(*tensors):
    return f"{zlib.crc32(torch.cat([whole(tensor).float().flatten() for tensor in tensors]).numpy().tobytes()):08x}"


def moments():
    return [value for state in optimizer.state.values() for value in state.values()]


settings = {"listen": "127.0.0.1", "wait_for_peers": given.peers, "checkpoint_interval_steps": 10}
common = {"evaluate": None if given.unjudged else evaluate, "home": given.home, "settings": settings}
try:
    if given.invite or given.go_on:
        swarm = gossamer.join(given.invite, model, optimizer, **common)
    else:
        outer = {"max_clock_gap_steps": 200}  # so that a peer is soon too far behind
        run = gossamer.Run("regression", given.steps, "rows", inner_steps=5, settings={"outer": outer})
        swarm = gossamer.host(run, model, optimizer, **common)
        if rank == 0:
            print("invite", swarm.invite(), flush=True)
    print("began", swarm.clock.steps, digest(*model.parameters(), *moments()) if swarm.clock.steps else "", len(moments()), flush=True)
    own_steps = 0
    swarm.on_adopted(lambda: print("adopted after", own_steps, len(moments()), flush=True))
    with swarm:
        for _ in swarm.batches([None] * 100):
            for group in optimizer.param_groups:
                group["lr"] = swarm.rate(1e-2, warmup_steps=5)
            loss = loss_on(model, torch.randn(32, 8, generator=draws)).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if rank == given.stops_early and own_steps == 20:
                swarm.finish()
            swarm.step(loss=loss, tokens=31.5 if rank == given.miscounts else 32)
            own_steps += 1
            if given.goes_back and own_steps == 20:
                kept = swarm.state_dict()
            if given.goes_back and own_steps == 40:
                swarm.load_state_dict(kept)
                print("back at", swarm.clock.steps, digest(*model.parameters(), *moments()), flush=True)
            if given.pause_s:
                time.sleep(given.pause_s)
            if own_steps % 20 == 0:
                print("step", own_steps, swarm.clock.steps, digest(*model.parameters(), *moments()), flush=True)
            if own_steps == given.own_steps > 0 and rank == given.leaves:
                swarm.leave()
        kept = swarm.state_dict().get("state")
        if kept is not None:
            print("counted", kept["tokens"] / kept["own_steps"], "a step", flush=True)
    print("left", swarm.clock.steps, digest(*model.parameters(), *moments()), flush=True)
    trained = [value for value in bare.state_dict().values() if value.is_floating_point()]  # not how many batches a norm has seen
    end = digest(*trained)
    with torch.no_grad():
        print("end", swarm.clock.steps, end, loss_on(bare.eval(), held_out).mean().item(), flush=True)
except gossamer.errors.GossamerError as error:
    print("failed", type(error).__name__, error, "|", error.hint, flush=True)
    os._exit(2)  # torch may abort at exit where another rank has gone before
finally:
    if dist.is_initialized():  # else torch may abort at exit
        dist.destroy_process_group()
# A thread of gloo drops the tensors of the last all-gather: if it needs the interpreter's lock for that while the interpreter ends, it
# aborts.
sys.stdout.flush()
os._exit(0)
