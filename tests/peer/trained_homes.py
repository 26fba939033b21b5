"""Homes with a tiny model's checkpoint in them, as a trainer leaves them; made in a moment."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from gossamer.optim.fragments import gather
from gossamer.peer.machine.home import Home
from gossamer.peer.model.checkpoint import CheckpointContents, save
from gossamer.peer.model.model import build_model, parameter_shapes
from gossamer.peer.model.plan import fragment_codecs
from gossamer.protocol.identity import Identity
from gossamer.protocol.run.manifest import Manifest, SignedManifest

LLAMA = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 256,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
}


def tiny_manifest(name: str = "tiny", source: str = "builtin") -> Manifest:
    return Manifest.checked(
        {
            "run": {"name": name, "access": "open"},
            "model": {"architecture": "llama", "config": LLAMA},
            "data": {"source": source},
            "inner": {"batch_size": 2, "sequence_length": 32},
            "fragments": {"blocks_per_fragment": 1},
        }
    )


def weights_from(manifest: Manifest, seed: int) -> dict[str, Tensor]:
    """Other weights than the run's initial ones."""
    return {name: tensor.detach() for name, tensor in build_model(manifest.model, seed).named_parameters()}


def trained_home(path: Path, manifest: Manifest, fast_seed: int, slow_seed: int = 1) -> Home:
    """Make a home whose newest checkpoint holds the weights of these two seeds."""
    home = Home(path)
    home.create()
    home.manifest.write_bytes(SignedManifest.sign(manifest, Identity.load_or_create(home.identity)).to_bytes())
    save(home.checkpoints, checkpoint(manifest, fast_seed, slow_seed))
    return home


def checkpoint(manifest: Manifest, fast_seed: int, slow_seed: int) -> CheckpointContents:
    slow = weights_from(manifest, slow_seed)
    cut = [codec.fragment for codec in fragment_codecs(manifest, parameter_shapes(manifest.model))]
    tensors = {f"fast/{name}": tensor for name, tensor in weights_from(manifest, fast_seed).items()}
    tensors |= {f"slow/{fragment.id}": gather(fragment, slow) for fragment in cut}
    tensors |= {f"momentum/{fragment.id}": torch.zeros(fragment.numel) for fragment in cut}
    return CheckpointContents(manifest.run_id, 40, tensors, {"clock_steps": 42, "tokens": 1000})
