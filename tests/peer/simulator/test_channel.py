from __future__ import annotations

import pytest
import torch
from torch import Tensor

from optim.codecs import CODECS, codec
from optim.fragment_codec import FragmentCodec
from optim.fragments import Fragment, Piece
from peer.simulator.channel import FEEDBACK_DECAY, Channel, Message
from peer.simulator.replicas import Diverged

CODED, SMALL = 6000, 100
FRAGMENT = Fragment(0, "blocks", (Piece("matrix", CODED), Piece("norm", SMALL)), CODED)
CPU = torch.device("cpu")
# Mean square error over mean square, on normal values. A modulo codec's window spans the values: two thirds of a step, with dither.
NMSE = {"fp32": 0.0, "bf16": 1e-5, "int8": 1e-4, "nf4": 1e-2, "e3m0": 4e-2, "modulo8": 2e-3, "modulo6": 1e-2, "modulo4": 0.1}


def channel(name: str, decay: float | None = None) -> Channel:
    return Channel(FragmentCodec(FRAGMENT, codec(name)), decay, CPU)


def values(seed: int = 0) -> Tensor:
    return torch.randn(CODED + SMALL, generator=torch.Generator().manual_seed(seed)) * 1e-3


def nmse(decoded: Tensor, wanted: Tensor) -> float:
    return float((decoded - wanted).square().mean() / wanted.square().mean())


@pytest.mark.parametrize("name", NMSE)
def test_what_arrives_is_near_what_was_sent(name: str) -> None:
    sent = values()
    decoded = channel(name).send(sent, seed=5)
    assert nmse(decoded, sent) <= NMSE[name]
    assert torch.equal(decoded[CODED:], sent[CODED:])  # small tensors travel in fp32


@pytest.mark.parametrize("decay", [None, 0.9])
@pytest.mark.parametrize("name", CODECS)
def test_everybody_decodes_the_same(name: str, decay: float | None) -> None:
    """Bytes alone decide: one receiver is new, the other has sent something of its own; both count what the sender counts."""
    sender, twin, fresh, busy = (channel(name, decay) for _ in range(4))
    busy.send(values(seed=9), seed=4)
    for seed in (5, 6):
        counted, sent = sender.send(values(seed), seed), twin.encode(values(seed), seed)
        crossed = Message(copied(sent.sketch), copied(sent.payload))
        assert len(crossed.sketch) + len(crossed.payload) == sender.num_bytes
        assert torch.equal(fresh.decode(crossed, seed), counted)
        assert torch.equal(busy.decode(crossed, seed), counted)
    assert not torch.equal(counted, torch.zeros_like(counted))


def copied(received: Tensor) -> Tensor:
    """The same bytes somewhere else."""
    return torch.tensor(list(received.numpy().tobytes()), dtype=torch.uint8)


@pytest.mark.parametrize("name", CODECS)
def test_nothing_arrives_as_nothing(name: str) -> None:
    assert not channel(name).send(torch.zeros(CODED + SMALL), seed=5).any()


@pytest.mark.parametrize("name", FEEDBACK_DECAY)
def test_what_few_bits_lose_is_made_good_later(name: str) -> None:
    """Error feedback at decay 1: all that was sent arrives in the end, up to what is still owed."""
    given, sent = channel(name, decay=1.0), values()
    arrived = sum((given.send(sent, seed) for seed in range(60)), torch.zeros_like(sent))
    assert nmse(arrived / 60, sent) < 0.2
    without = channel(name, decay=0.0)
    lost = sum((without.send(sent, seed) for seed in range(60)), torch.zeros_like(sent))
    assert nmse(lost / 60, sent) > 2 * nmse(arrived / 60, sent)


def test_the_sketch_is_counted() -> None:
    codec4 = FragmentCodec(FRAGMENT, codec("modulo4"))
    assert channel("modulo4").num_bytes == codec4.sketch_bytes + codec4.payload_bytes > codec4.payload_bytes


def test_values_that_are_no_weights_mean_divergence() -> None:
    for name in ("fp32", "modulo4", "q2"):
        with pytest.raises(Diverged):
            channel(name).send(values() * float("inf"), seed=5)
