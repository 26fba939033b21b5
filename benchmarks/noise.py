"""What a codec's noise costs in final loss: pairs with each codec beside pairs with fp32, seed by seed, on a job of seconds.

    python -m benchmarks.noise [--codecs NAME ...] [--inner-steps N] [--steps N] [--seeds N ...]

Four peers with Muon, the demo's model and batch made smaller, 200 inner steps, meetings that take one step. `noisy30` is fp32 with noise on
every gap, the opposite on both sides, whose energy is 30 % of the gap's (modulo4's own: 8 %, benchmarks.gap_error); any number may stand
there. `modulo2` is measured here alone; `modulo2-44` takes only 44 % of each gap that it decodes: what is best in the
mean is 1 / (1 + noise). `modulo3@8` meets every 8 steps, for as many bytes as another every 10. The last lines say by
how many percent a codec ends above fp32 on the same seed: the loss of the peers, that of the mean of their weights, the spread of the
weights, and the distance of the outputs. A quarter of a minute of a core for each run.
"""

from __future__ import annotations

import argparse
import math
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.gate import MODEL
from benchmarks.runs import mean_and_error
from gossamer.optim.codecs import CODECS, Encoded, Gap
from gossamer.optim.codecs.modulo import Modulo
from gossamer.optim.codecs.packings import Dense
from gossamer.peer.simulator.choices import scenario, setting
from gossamer.peer.simulator.results import Result
from gossamer.peer.simulator.training import Venue, simulate
from gossamer.protocol.run.manifest import Manifest

BASE = "method=noloco peers=4 delay=1 batch_size=2 sequence_length=64"
NOISY = "noisy"
KAPPA = 5.5


@dataclass(frozen=True, slots=True)
class NoisyEncoded(Encoded):
    """A message as it is, and the seed of its noise."""

    seed: int


class Noisy(Dense):
    """fp32, with noise of so many percent of the gap's energy."""

    def __init__(self, percent: int) -> None:
        super().__init__(f"{NOISY}{percent}", 255, torch.float32)
        self._share = math.sqrt(percent / 100)

    def encode(self, message: Tensor, seed: int, own_sketch: Tensor, partner_sketch: Tensor) -> Encoded:
        """Pack the message."""
        return NoisyEncoded(self.pack(message), message.numel(), seed)

    def gap(self, own: Encoded, partner_payload: Tensor, room: int = 0) -> Gap:
        """Return the gap with its noise, which changes its sign with the gap."""
        exact = super().gap(own, partner_payload, room)
        values = exact.values[: own.num_values]
        if isinstance(own, NoisyEncoded) and values.numel():
            noise = torch.randn(values.shape, generator=torch.Generator().manual_seed(own.seed))
            values += noise * (math.copysign(1.0, float(values[0])) * self._share * float(values.norm() / noise.norm()))
        return exact


class Shrunk(Modulo):
    """A modulo codec that takes a part of what it decodes."""

    def __init__(self, name: str, bits: int, part: float) -> None:
        super().__init__(bits, 255, KAPPA)
        self.name, self._part = name, part

    def gap(self, own: Encoded, partner_payload: Tensor, room: int = 0) -> Gap:
        """Return the gap, made smaller."""
        whole = super().gap(own, partner_payload, room)
        whole.values[: own.num_values] *= self._part
        return whole


def known(codec: str) -> str:
    """Make a codec of this module known by its name; return the name."""
    if codec.startswith(NOISY):
        CODECS[codec] = Noisy(int(codec.removeprefix(NOISY)))
    elif codec not in CODECS:
        bits, _, part = codec.removeprefix("modulo").partition("-")
        CODECS[codec] = Shrunk(codec, int(bits), int(part or 100) / 100)
    return codec


def run(named: str, given: argparse.Namespace, seed: int) -> Result:
    """Simulate one swarm."""
    codec, _, every = named.partition("@")
    small = Manifest.checked({"model": {"config": Manifest().model.config | MODEL}})
    settings = f"{BASE} steps={given.steps} inner_steps={every or given.inner_steps} codec={known(codec)} seed={seed}"
    with tempfile.TemporaryDirectory() as folder:
        made = scenario(small, dict(setting(text) for text in settings.split()))
        return simulate(made, Venue(Path(folder), device="cpu", num_eval_batches=128), lambda headway: None)


def main() -> None:
    """Print each seed's row, then the means."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--codecs", nargs="+", default=["modulo4", "noisy30"])
    parser.add_argument("--inner-steps", type=int, default=10)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seeds", type=int, nargs="+", default=list(range(6)))
    given = parser.parse_args()
    torch.set_num_threads(1)
    excess: dict[str, list[tuple[float, float, float, float]]] = {codec: [] for codec in given.codecs}
    print(f"{'seed':>4} {'codec':>15} {'peers':>8} {'averaged':>9} {'spread':>9} {'outputs':>9}")
    for seed in given.seeds:
        results = {codec: run(codec, given, seed) for codec in ["fp32", *given.codecs]}
        for codec, found in results.items():
            losses = f"{found.eval_loss_mean:>8.4f} {found.eval_loss_averaged:>9.4f}"
            print(f"{seed:>4} {codec:>15} {losses} {found.weight_std:>9.2e} {found.output_distance:>9.2e}", flush=True)
        exact = results.pop("fp32")
        for codec, found in results.items():
            pairs = (
                (found.eval_loss_mean, exact.eval_loss_mean),
                (found.eval_loss_averaged, exact.eval_loss_averaged),
                (found.weight_std, exact.weight_std),
                (found.output_distance, exact.output_distance),
            )
            peers, averaged, spread, outputs = (100.0 * (one / other - 1.0) for one, other in pairs)
            excess[codec].append((peers, averaged, spread, outputs))
    for codec, rows in excess.items():
        columns = [mean_and_error(column) for column in zip(*rows, strict=True)]
        named = zip(("peers", "averaged", "spread of the weights", "distance of outputs"), columns, strict=True)
        print(f"{codec}: " + ", ".join(f"{name} {mean:+.2f} +- {error:.2f} %" for name, (mean, error) in named))


if __name__ == "__main__":
    main()
