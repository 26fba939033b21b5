"""Homes of a program run, as a member's script leaves them; made in a moment."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from gossamer.optim.fragments import gather
from gossamer.peer.machine.home import Home
from gossamer.peer.model.checkpoint import CheckpointContents, save
from gossamer.peer.model.plan import fragment_codecs
from gossamer.peer.model.trainable import shapes_of
from gossamer.protocol.identity import Identity
from gossamer.protocol.run.manifest import ProgramManifest, SignedManifest
from gossamer.run import Run

RUN = Run("cifar", 300, "images", source="https://example.org/cifar", revision="1a2b3c", access="open")


def tensors(seed: int) -> dict[str, Tensor]:
    """Return a small model's tensors: of four dimensions to none, in no order."""
    draw = torch.Generator().manual_seed(seed)
    shapes = {"stem.weight": (16, 3, 5, 5), "head.weight": (10, 500), "head.bias": (10,), "scale": (), "norm.running_var": (16,)}
    return {name: torch.randn(shape, generator=draw) for name, shape in shapes.items()}


def program_manifest(run: Run = RUN) -> ProgramManifest:
    return run.manifest(shapes_of(tensors(0)))


def program_home(path: Path, manifest: ProgramManifest, *, is_trained: bool = True) -> Home:
    """Make the home of this run's host; a trained one has a checkpoint with fast and slow weights, and an optimizer's state."""
    home = Home(path)
    home.create()
    identity = Identity.load_or_create(home.identity)
    manifest = manifest.with_host(identity.peer_id)
    home.manifest.write_bytes(SignedManifest.sign(manifest, identity).to_bytes())
    if is_trained:
        fast, slow = tensors(2), dict(sorted(tensors(1).items()))
        kept = {f"fast/{name}": tensor for name, tensor in fast.items()} | {"optimizer/stem.weight/exp_avg": torch.ones(16, 3, 5, 5)}
        for codec in fragment_codecs(manifest, shapes_of(slow)):
            kept[f"slow/{codec.fragment.id}"] = gather(codec.fragment, slow)
        save(home.checkpoints, CheckpointContents(manifest.run_id, 40, kept, {"clock_steps": 42, "tokens": 1000}))
    return home
