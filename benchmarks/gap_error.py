"""What the codecs lose of the gap between two partners that really trained, and how kappa trades lost blocks against noise.

    python -m benchmarks.gap_error [--inner-steps N] [--periods N]

Two replicas of the default model train on their own batches and meet every N inner steps in full precision (alpha 0, beta 1, gamma 1).
At the last meeting every codec codes both messages, as shares of the squared gap: `noise` is the squared error where blocks decoded, `lost`
what lies in blocks that did not; `failed` counts these. A meeting loses `noise` + `lost`. Half a minute.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch
from torch import Tensor

from gossamer.optim.codecs import CODECS, Codec
from gossamer.optim.codecs.modulo import Modulo
from gossamer.optim.fragment_codec import FragmentCodec
from gossamer.optim.fragments import Fragment, gather, scatter
from gossamer.peer.model.model import build_model
from gossamer.peer.text.batches import Draw
from gossamer.peer.text.corpus import load_corpus
from gossamer.peer.text.tokenizer import load_tokenizer
from gossamer.peer.trainer.replica import Replica
from gossamer.protocol.run.manifest import Manifest

KAPPAS = (3.5, 4.0, 4.5, 5.0, 5.5, 6.0)
SEED = 7


def replica(manifest: Manifest, number: int, folder: Path) -> Replica:
    """Build a replica with batches of its own."""
    inner = manifest.inner
    draw = Draw(0, bytes([number]) * 38, inner.batch_size, inner.sequence_length)
    corpus = load_corpus(manifest.data, load_tokenizer(manifest.tokenizer), draw, None, folder)
    return Replica(manifest, build_model(manifest.model, 0), corpus, number, lambda solo: None)


def lost(codec: Codec, fragment: Fragment, messages: tuple[Tensor, Tensor]) -> tuple[float, float, float, int, int]:
    """Return squared error, squared gap, the part of it in failed blocks, failed blocks and blocks of one fragment's large tensors."""
    fragment_codec = FragmentCodec(fragment, codec)
    own, partner = (fragment_codec.sketch(message, SEED) for message in messages)
    here, there = fragment_codec.encode(messages[0], SEED, own, partner), fragment_codec.encode(messages[1], SEED, partner, own)
    gap = fragment_codec.gap(here, there.payload)
    failed = fragment_codec.failed_values(gap.failed)
    failed = torch.zeros(fragment.numel, dtype=torch.bool) if failed is None else failed
    wanted, failed = (messages[1] - messages[0])[: fragment.num_coded].double(), failed[: fragment.num_coded]
    error = gap.values[: fragment.num_coded].double() - wanted
    noise, whole, unread = (float(values.square().sum()) for values in (error[~failed], wanted, wanted[failed]))
    return noise, whole, unread, int(gap.failed.sum()), gap.failed.numel()


def train(pair: tuple[Replica, Replica], num_steps: int) -> list[tuple[Fragment, tuple[Tensor, Tensor]]]:
    """Train both and return their messages, fragment by fragment."""
    for one in pair:
        for _ in range(num_steps):
            one.inner_step()
    fragments = [state.codec.fragment for state in pair[0].fragments]
    return [(fragment, (gather(fragment, pair[0].parameters), gather(fragment, pair[1].parameters))) for fragment in fragments]


def last_messages(inner_steps: int, num_periods: int) -> list[tuple[Fragment, tuple[Tensor, Tensor]]]:
    """Train two replicas that average every period, and return what they would send each other at the end of the last one."""
    torch.set_num_threads(1)
    manifest = Manifest()
    with tempfile.TemporaryDirectory() as folder:
        pair = replica(manifest, 0, Path(folder)), replica(manifest, 1, Path(folder))
        for _ in range(num_periods - 1):
            for fragment, (one, other) in train(pair, inner_steps):
                for peer in pair:
                    scatter(fragment, (one + other) / 2, peer.parameters)
        return train(pair, inner_steps)


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--inner-steps", type=int, default=10)
    parser.add_argument("--periods", type=int, default=12)
    given = parser.parse_args()
    last = last_messages(given.inner_steps, given.periods)
    print(f"{'codec':<14}{'bit/value':>10}{'noise':>9}{'lost':>9}{'failed':>9}")
    codecs = list(CODECS.items()) + [(f"modulo4 k={kappa:g}", Modulo(4, 18, kappa)) for kappa in KAPPAS]
    for name, codec in codecs:
        rows = [lost(codec, fragment, messages) for fragment, messages in last]
        error, gap, unread, failed, blocks = (sum(column) for column in zip(*rows, strict=True))
        values = sum(fragment.numel for fragment, _ in last)
        num_bits = sum(FragmentCodec(fragment, codec).bits_per_value * fragment.numel for fragment, _ in last) / values
        print(f"{name:<14}{num_bits:>10.2f}{error / gap:>9.4f}{unread / gap:>9.4f}{failed / max(1, blocks):>9.2%}")


if __name__ == "__main__":
    main()
