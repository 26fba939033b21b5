"""Classify images in a swarm: a convolutional network, with the loop, the loss, the data and the optimizer of a single-machine script.

The first peer: `python examples/images.py ~/first`. It prints an invite. Others: `python examples/images.py ~/second INVITE`.
The images are drawn by the script: noisy copies of ten patterns. Each peer has a thousand of its own.
"""

import os
import sys
import zlib

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import gossamer

STEPS = 300
PEERS = int(os.environ.get("PEERS", "2"))  # that begin together


def images(number, seed):
    patterns = torch.randn(10, 1, 16, 16, generator=torch.Generator().manual_seed(7))
    draws = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 10, (number,), generator=draws)
    return patterns[labels] + 3.5 * torch.randn(number, 1, 16, 16, generator=draws), labels


def network():
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(512, 128), nn.ReLU(), nn.Linear(128, 10)),
    )


def main(home, invite=None):
    torch.set_num_threads(1)
    torch.manual_seed(0)
    loader = DataLoader(TensorDataset(*images(1024, seed=zlib.crc32(home.encode()))), batch_size=64, shuffle=True, drop_last=True)
    held_out = images(1000, seed=1)
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.05)

    def evaluate():
        return functional.cross_entropy(model(held_out[0]), held_out[1], reduction="none")

    if invite is None:
        run = gossamer.Run("images", STEPS, unit="images")
        swarm = gossamer.host(run, model, optimizer, evaluate=evaluate, home=home, settings={"wait_for_peers": PEERS - 1})
        print(swarm.invite(), flush=True)
    else:
        swarm = gossamer.join(invite, model, optimizer, evaluate=evaluate, home=home)

    with swarm:
        for batch, labels in swarm.batches(loader):
            loss = functional.cross_entropy(model(batch), labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            swarm.step(loss=loss, tokens=len(labels))

    model.eval()
    with torch.no_grad():
        weights = torch.cat([tensor.flatten() for tensor in model.state_dict().values() if tensor.is_floating_point()])
        digest = zlib.crc32(weights.numpy().tobytes())
        print(f"held-out loss {evaluate().mean():.3f}, weights {digest:08x}, {swarm.clock.steps} steps of the run")


if __name__ == "__main__":
    main(*sys.argv[1:])
