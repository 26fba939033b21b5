"""A program of the library's user: a small regression. `small_program.py HOME [--invite WORD] [--steps N] [--fork]`, as the tests start it.

Prints what happens, a line each.
"""

import argparse
import os
import signal
import time
import zlib

import torch
from torch import nn

import gossamer

parser = argparse.ArgumentParser()
parser.add_argument("home")
parser.add_argument("--invite")
parser.add_argument("--go-on", action="store_true")
parser.add_argument("--steps", type=int, default=200)
parser.add_argument("--peers", type=int, default=0)
parser.add_argument("--pause-s", type=float, default=0.0)
parser.add_argument("--fork", action="store_true")
parser.add_argument("--width", type=int, default=32)
parser.add_argument("--diverges-at", type=int, default=-1)
given = parser.parse_args()

torch.set_num_threads(1)
torch.manual_seed(0)
target = nn.Linear(8, 1).requires_grad_(False)
model = nn.Sequential(nn.Linear(8, given.width), nn.Tanh(), nn.Linear(given.width, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
held_out = torch.randn(256, 8, generator=torch.Generator().manual_seed(1))
draws = torch.Generator().manual_seed(zlib.crc32(given.home.encode()))


def loss_on(x):
    return (model(x) - target(x).tanh()).square().flatten()


settings = {"listen": "127.0.0.1", "wait_for_peers": given.peers, "checkpoint_interval_steps": 10}
common = {"evaluate": lambda: loss_on(held_out), "home": given.home, "settings": settings}
if given.invite or given.go_on:
    swarm = gossamer.join(given.invite, model, optimizer, **common)
else:
    swarm = gossamer.host(gossamer.Run("regression", given.steps, "rows", inner_steps=5), model, optimizer, **common)
    print("invite", swarm.invite(), flush=True)
if given.fork and os.fork() == 0:
    signal.pause()  # as a worker of a DataLoader, which the death of its parent does not end at once
print("joined at", swarm.clock.steps, flush=True)
with swarm:
    has_told = False
    for _ in swarm.batches([None] * 100):
        loss = loss_on(torch.randn(32, 8, generator=draws)).mean()
        if swarm.clock.steps == given.diverges_at:
            loss = loss * float("nan")
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        swarm.step(loss=loss, tokens=32)
        if given.pause_s:
            time.sleep(given.pause_s)
        if swarm.clock.steps >= 20 and not has_told:
            has_told = True
            print("trains", flush=True)
weights = torch.cat([value.flatten() for value in model.state_dict().values()])
print("end", swarm.clock.steps, f"{zlib.crc32(weights.numpy().tobytes()):08x}", loss_on(held_out).mean().item(), flush=True)
