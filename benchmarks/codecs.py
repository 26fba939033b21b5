"""Speed and error of the codecs, beside a plain memory copy in the same run.

    python -m benchmarks.codecs [--values N] [--threads T] [--device cuda] [--spread S] [NAME ...]

Speed is GB of f32 input per second, the best of several runs: `sketch`, `encode` and `gap` (decoding both sides' payloads and taking the
difference). `by` is what codes: torch, or the compiled part of the device (optim/compiled.py), which has the modulo codecs, and on the
CPU the outer step of a meeting; the last rows are that step, in milliseconds too. `noise` is the squared error of the gap over the squared
gap, for messages of deviation 0.02 that differ by `spread` of that.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
from torch import Tensor

from gossamer.optim.codecs import CODECS, Codec, Packing, codec
from gossamer.optim.codecs.modulo import Modulo
from gossamer.optim.codecs.packings import blocks, num_blocks, pack_codes, read_scales, unpack_codes
from gossamer.optim.compiled import Compiled, coded_with, compiled_for, compiled_step_for
from gossamer.optim.fragment_codec import FragmentCodec
from gossamer.optim.fragments import Fragment, Piece
from gossamer.optim.noloco import NoLoCo
from gossamer.peer.model.accelerator import finish
from gossamer.peer.trainer.fragment_state import FragmentState
from gossamer.peer.trainer.meeting import MeetingSide
from gossamer.peer.trainer.weights import Weights


class PlainInt4(Packing):
    """The reference: plain 4-bit codes relative to the largest magnitude of blocks of 128."""

    name = "int4 (yardstick)"
    wire_id = -1

    def payload_bytes(self, num_values: int) -> int:
        """Return the payload's exact size."""
        return (2 + 64) * num_blocks(num_values, 128)

    def _pack(self, values: Tensor) -> Tensor:
        """Return scales and codes, those of padding too."""
        rows = blocks(values, 128)
        scales = rows.abs().amax(1).bfloat16()
        codes = (rows * (7.0 / scales.float().clamp(min=1e-30))[:, None]).round_().add_(8.0).to(torch.uint8)
        return torch.cat((scales.view(torch.uint8), pack_codes(codes.view(-1), 4)))

    def _unpack(self, payload: Tensor, num_values: int) -> Tensor:
        """Return f32[num_values]."""
        count = num_blocks(num_values, 128)
        scales = read_scales(payload, count, self.name).mul_(1.0 / 7.0)
        codes = unpack_codes(payload[2 * count :], 4, 128 * count)
        return codes.float().sub_(8.0).view(-1, 128).mul_(scales[:, None]).view(-1)[:num_values]


def best_seconds(work: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Return the shortest of several runs after a warm-up."""
    times = []
    for _ in range(repeats + 1):
        finish(device)
        start = time.perf_counter()
        work()
        finish(device)
        times.append(time.perf_counter() - start)
    return min(times[1:])


def measure(coder: Codec, pair: tuple[Tensor, Tensor], repeats: int) -> dict[str, float]:
    """Return GB/s per stage, bits per value, noise and the share of failed blocks."""
    own, partner = pair
    num_values, device = own.numel(), own.device
    sketches = coder.sketch(own, 1), coder.sketch(partner, 1)
    encoded = coder.encode(own, 1, *sketches)
    payload = coder.encode(partner, 1, *sketches[::-1]).payload
    gap = coder.gap(encoded, payload)
    error = (gap.values - (partner - own)).double().square().sum() / (partner - own).double().square().sum()
    stages: dict[str, Callable[[], object]] = {
        "sketch": lambda: coder.sketch(own, 1),
        "encode": lambda: coder.encode(own, 1, *sketches),
        "gap": lambda: coder.gap(encoded, payload),
    }
    speeds = {name: 4e-9 * num_values / best_seconds(work, device, repeats) for name, work in stages.items()}
    if not coder.sketch_bytes(num_values):
        del speeds["sketch"]
    sent = coder.sketch_bytes(num_values) + coder.payload_bytes(num_values)
    failed = float(gap.failed.float().mean()) if gap.failed.numel() else 0.0
    return {**speeds, "bits": 8.0 * sent / num_values, "noise": float(error), "failed": failed}


def step_seconds(pair: tuple[Tensor, Tensor], repeats: int) -> float:
    """Return the time of the outer step of one side of a meeting."""
    sides = []
    for values in pair:
        fragment = Fragment(0, "all", (Piece("all", values.numel()),), values.numel())
        sides.append(MeetingSide(FragmentState(FragmentCodec(fragment, codec("modulo4")), Weights({"all": values}), has_momentum=False)))
    own, partner = sides
    sketches = [side.prepare(NoLoCo(alpha=0.0), 0.5, 1) for side in sides]
    own.encode(sketches[1])
    if reason := own.judge(partner.encode(sketches[0])):
        raise ValueError(reason)
    nothing_failed = torch.zeros_like(own.failed_blocks)
    return best_seconds(lambda: own.step(nothing_failed), pair[0].device, repeats)


def forms(coder: Codec | None, device: torch.device) -> dict[str, Compiled | None]:
    """Return what can run a codec, or None for the outer step, on this device."""
    found = compiled_step_for(device) if coder is None else compiled_for(device) if isinstance(coder, Modulo) else None
    return {"torch": None} if found is None else {"torch": None, found.name: found}


def copies(values: Tensor, repeats: int) -> tuple[float, float]:
    """Return the GB/s of a copy into used memory, and into newly allocated memory."""
    target = torch.empty_like(values)
    gigabytes = 4e-9 * values.numel()
    used = gigabytes / best_seconds(lambda: target.copy_(values), values.device, repeats)
    return used, gigabytes / best_seconds(values.clone, values.device, repeats)


def main() -> None:
    """Print one line per codec."""
    options = argparse.ArgumentParser(description="Speed and loss of the codecs.")
    options.add_argument("names", nargs="*", help="codecs; all without")
    options.add_argument("--values", type=int, default=2**24)
    options.add_argument("--threads", type=int, default=0, help="0: what torch chooses")
    options.add_argument("--device", default="cpu")
    options.add_argument("--spread", type=float, default=0.1)
    options.add_argument("--repeats", type=int, default=7)
    chosen = options.parse_args()
    if chosen.threads:
        torch.set_num_threads(chosen.threads)
    generator = torch.Generator().manual_seed(0)
    own = 0.02 * torch.randn(chosen.values, generator=generator)
    partner = own + 0.02 * chosen.spread * torch.randn(chosen.values, generator=generator)
    pair = own.to(chosen.device), partner.to(chosen.device)
    used, fresh = copies(pair[0], chosen.repeats)
    print(f"{chosen.values} values on {chosen.device}, {torch.get_num_threads()} threads, gap {chosen.spread:g} of the weights")
    print(f"memory copy: {used:.2f} GB/s into memory in use, {fresh:.2f} GB/s into fresh memory")
    print(f"{'codec':18}{'by':9}{'bits/value':>11}{'sketch':>9}{'encode':>9}{'gap':>9}  GB/s{'encode/copy':>13}{'noise':>11}{'failed':>9}")
    coders: list[Codec] = [codec(name) for name in chosen.names or CODECS]
    for coder in [*coders, PlainInt4()]:
        for name, form in forms(coder, pair[0].device).items():
            with coded_with(form):
                row = measure(coder, pair, chosen.repeats)
            sketch = f"{row['sketch']:.2f}" if "sketch" in row else "-"
            print(
                f"{coder.name:18}{name:9}{row['bits']:11.4f}{sketch:>9}{row['encode']:9.2f}{row['gap']:9.2f}"
                f"      {row['encode'] / used:13.3f}{row['noise']:11.2e}{row['failed']:9.3%}",
                flush=True,
            )
    for name, form in forms(None, pair[0].device).items():
        with coded_with(form):
            seconds = step_seconds(pair, chosen.repeats)
        print(f"{'outer step':18}{name:9}{4e-9 * chosen.values / seconds:9.2f} GB/s{1000 * seconds:9.2f} ms", flush=True)


if __name__ == "__main__":
    main()
