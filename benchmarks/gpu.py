"""All figures of a GPU in one command, in at most nine minutes: one JSON line, and a table.

    python -m benchmarks.gpu [--device cuda] [--sizes 125M,350M,1.2B] [--seconds S] [--quality] [--without tests,meetings] [--out FILE]

`speed`: tokens per second and MFU of our inner loop with each optimizer, beside a plain torch loop (autocast, the whole model compiled,
fused AdamW, the same batch); the aim is 90 % of it with AdamW, and an MFU of 40 % from 350 M on. `codec`: GB of f32 per second by each
form of coding, beside a copy on the same device; the aim is 25 %. `decode`: whether this device and the CPU decode the same payload bit
for bit. `meetings`: two real peers on this device meet over shaped lines (`--line`); for which share of the time they are blocked,
checkpoints included; the aim is 1 %. `tests`: those that are marked for CUDA. `quality`, with `--quality`: what meeting in pairs costs in
loss (benchmarks/quality.py), in the remaining time. It also runs on a CPU, at sizes for a CPU (`--sizes tiny`).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.codecs import copies, forms, measure
from benchmarks.quality import lines as quality_lines
from benchmarks.quality import quality
from benchmarks.step_rate import BenchedPeer, running
from gossamer.optim.codecs import codec
from gossamer.optim.codecs.hadamard import keep_products_exact
from gossamer.optim.codecs.modulo import Modulo
from gossamer.optim.coding_check import codes_as_the_cpu
from gossamer.optim.compiled import coded_with
from gossamer.peer.model.accelerator import finish
from gossamer.peer.model.computing import Computing, compute_dtype, computing_in
from gossamer.peer.model.model import build_model
from gossamer.peer.model.throughput import flops_per_token, peak_flops
from gossamer.peer.text.batches import Draw
from gossamer.peer.text.corpus import ResidentCorpus
from gossamer.peer.text.token_cache import Tokens
from gossamer.peer.trainer.inner_loop import InnerLoop
from gossamer.protocol.run.manifest import Manifest

WARM_UP_STEPS: Final = 3
MINUTES: Final = 9.0
CODEC: Final = "modulo4"  # the default
VOCABULARY: Final = 32_000


@dataclass(frozen=True, slots=True)
class Size:
    """A llama and its batch."""

    width: int
    num_layers: int
    batch_size: int
    sequence_length: int
    vocabulary: int = VOCABULARY

    def manifest(self, optimizer: str) -> Manifest:
        """Return a job of this size."""
        heads = max(1, self.width // 64)
        config = {
            "hidden_size": self.width, "intermediate_size": self.width * 8 // 3 // 8 * 8, "num_hidden_layers": self.num_layers,
            "num_attention_heads": heads, "num_key_value_heads": heads, "vocab_size": self.vocabulary,
            "max_position_embeddings": self.sequence_length, "tie_word_embeddings": True,
        }  # fmt: skip
        inner = {"optimizer": optimizer, "learning_rate": 1e-3, "batch_size": self.batch_size, "sequence_length": self.sequence_length}
        return Manifest.checked({"model": {"config": config}, "inner": inner, "run": {"total_steps": 10_000_000}})

    def corpus(self) -> ResidentCorpus:
        """Return a corpus of random tokens."""
        noise = torch.randint(0, self.vocabulary, (self.batch_size * (self.sequence_length + 1) * 4,)).numpy()
        return ResidentCorpus(Tokens(noise, noise, 1.0), Draw(0, b"me", self.batch_size, self.sequence_length))

    @property
    def step_tokens(self) -> int:
        """Return the number of tokens of a step."""
        return self.batch_size * self.sequence_length


SIZES: Final[Mapping[str, Size]] = {
    "tiny": Size(64, 2, 2, 32, 256),
    "100M": Size(768, 14, 16, 512, 256),  # of bytes: the text is there on every machine
    "125M": Size(768, 14, 32, 1024),
    "350M": Size(1024, 26, 16, 1024),
    "1.2B": Size(2048, 23, 8, 1024),
}


def tokens_per_s(step: Callable[[], object], step_tokens: int, device: torch.device, seconds: float) -> float:
    """Return the tokens per second of a step, after a warm-up."""
    for _ in range(WARM_UP_STEPS):
        step()
    finish(device)
    start_s, num_steps = time.monotonic(), 0
    while not num_steps or time.monotonic() - start_s < seconds:
        step()
        finish(device)
        num_steps += 1
    return num_steps * step_tokens / (time.monotonic() - start_s)


def our_step(size: Size, optimizer: str, device: torch.device, on_host: bool = False) -> Callable[[], object]:
    """Return a step of a peer's own inner loop; `on_host`: the optimizer's state rests on the host between steps."""
    manifest = size.manifest(optimizer)
    computing = Computing(compute_dtype("auto", device), compiles=device.type == "cuda", optimizer_on_host=on_host)
    inner = InnerLoop(manifest, build_model(manifest.model, 0).to(device), size.corpus(), computing, lambda event: None)
    number = iter(range(1_000_000))

    def step() -> None:
        loss, norm, _ = inner.gradient(next(number), 0)
        assert bool(torch.isfinite(loss + norm))  # as a replica looks at it
        inner.devices.step(1e-4)

    return step


def plain_step(size: Size, device: torch.device) -> Callable[[], object]:
    """Return a step of a plain loop of torch with the same model and batch."""
    model = build_model(size.manifest("adamw").model, 0).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    call: Any = torch.compile(model) if device.type == "cuda" else model
    batch, dtype = size.corpus().batch(0).to(device), compute_dtype("auto", device)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        with computing_in(dtype, device):
            logits: Tensor = call(input_ids=batch[:, :-1], use_cache=False).logits
            loss = functional.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return step


def speed(name: str, device: torch.device, seconds: float) -> dict[str, Any]:
    """Return tokens per second and MFU of both steps, one after the other on the same device."""
    size = SIZES[name]
    with torch.device("meta"):
        model = build_model(size.manifest("adamw").model, 0)
    shapes = {key: tuple(parameter.shape) for key, parameter in model.named_parameters()}
    flops, peak = flops_per_token(model.config, shapes, size.sequence_length), peak_flops(device, compute_dtype("auto", device))
    ways: dict[str, Callable[[], Callable[[], object]]] = {
        "plain torch": lambda: plain_step(size, device),
        "adamw": lambda: our_step(size, "adamw", device),
        "muon": lambda: our_step(size, "muon", device),
        "muon, host": lambda: our_step(size, "muon", device, on_host=True),
    }
    rates = {}
    for way, make in ways.items():
        rates[way] = tokens_per_s(make(), size.step_tokens, device, seconds)
        torch.compiler.reset()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    num_params = sum(parameter.numel() for parameter in model.parameters())
    mfu = {way: rate * flops / peak for way, rate in rates.items()} if peak else {}
    return {"params": num_params, "tokens_per_second": rates, "mfu": mfu, "of_plain": rates["adamw"] / rates["plain torch"]}


def codec_speed(device: torch.device, num_values: int) -> dict[str, Any]:
    """Return the default codec's speed by each form of coding, beside a copy."""
    own = 0.02 * torch.randn(num_values, generator=torch.Generator().manual_seed(0))
    other = own + 0.002 * torch.randn(num_values, generator=torch.Generator().manual_seed(1))
    coder, (copy, _), found = codec(CODEC), copies(own.to(device), 5), dict[str, Any]()
    for name, form in forms(coder, device).items():
        with coded_with(form):
            row = measure(coder, (own.to(device), other.to(device)), 5)
        found[name] = {"encode_gb_s": row["encode"], "gap_gb_s": row["gap"], "of_copy": min(row["encode"], row["gap"]) / copy}
    return {"copy_gb_s": copy, "by": found}


async def meetings(name: str, device: torch.device, line: str, seconds: float, folder: Path) -> dict[str, Any]:
    """Run two real peers on one device that meet over lines of that rate, through which the second gets its first weights."""
    first, second = (BenchedPeer(folder / one, 0, devices=str(device), max_upload=line) for one in ("first", "second"))
    signed = first.found(SIZES[name].manifest("muon"))
    async with running(first):
        await first.invite(second, signed)
        async with running(second):
            await second.until(lambda status: status.meetings["completed"], "meeting")
            await asyncio.sleep(seconds)
            return {
                "line": line,
                "completed": second.status.meetings["completed"],
                "blocked": [peer.status.blocked_seconds / peer.status.train_seconds for peer in (first, second)],
                "mfu": [peer.status.mfu for peer in (first, second)],
            }


def marked_tests() -> dict[str, Any]:
    """Run the tests that need a GPU."""
    done = subprocess.run([sys.executable, "-m", "pytest", "-q", "-m", "cuda"], capture_output=True, text=True, check=False)
    return {"passed": done.returncode == 0, "words": done.stdout.strip().splitlines()[-1]}


def figures(given: argparse.Namespace) -> dict[str, Any]:
    """Return all requested figures."""
    began_s, device = time.monotonic(), torch.device(given.device)
    keep_products_exact()
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    found: dict[str, Any] = {"device": name, "torch": torch.__version__, "speed": {}}
    for size in given.sizes.split(",") if "speed" not in given.without else ():
        found["speed"][size] = speed(size, device, given.seconds)
    num_values = 1 << (26 if device.type == "cuda" else 20)
    found["codec"] = codec_speed(device, num_values)
    coder = codec(CODEC)
    assert isinstance(coder, Modulo)
    found["decode"] = codes_as_the_cpu(coder, device, num_values)
    if "meetings" not in given.without:
        with tempfile.TemporaryDirectory(prefix="gpu-") as folder:
            found["meetings"] = asyncio.run(meetings(given.sizes.split(",")[0], device, given.line, 6 * given.seconds, Path(folder)))
    if "tests" not in given.without:
        found["tests"] = marked_tests()
    if given.quality:
        manifest, until_s = SIZES[given.quality].manifest("muon"), began_s + 60.0 * given.minutes
        found["quality"] = quality(manifest, given.device, until_s)
    return found


def table(found: Mapping[str, Any]) -> str:
    """Return the figures as a table."""
    lines = [f"{found['device']}, torch {found['torch']}", f"{'':<8}{'':<14}{'tokens/s':>12}{'MFU':>8}{'of plain':>10}"]
    for size, row in found["speed"].items():
        for way, rate in row["tokens_per_second"].items():
            mfu, share = row["mfu"].get(way), rate / row["tokens_per_second"]["plain torch"]
            lines.append(f"{size:<8}{way:<14}{rate:>12,.0f}{'-' if mfu is None else f'{mfu:.1%}':>8}{share:>10.1%}")
    for name, coder in found["codec"]["by"].items():
        speeds = f"encode {coder['encode_gb_s']:.1f}, gap {coder['gap_gb_s']:.1f} GB/s; {coder['of_copy']:.1%} of a copy"
        lines.append(f"codec by {name}: {speeds}")
    lines.append(f"decodes as the CPU does, bit for bit: {'yes' if found['decode'] else 'NO'}")
    if "meetings" in found:
        shares = ", ".join(f"{share:.2%}" for share in found["meetings"]["blocked"])
        lines.append(f"{found['meetings']['completed']} meetings over {found['meetings']['line']}; blocked {shares} of the time")
    if "tests" in found:
        lines.append(f"tests marked for CUDA: {found['tests']['words']}")
    if "quality" in found:
        lines += quality_lines(found["quality"]) if found["quality"] else ["quality: no time was left for it"]
    return "\n".join(lines)


def options() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    has_gpu = torch.cuda.is_available()
    parser.add_argument("--device", default="cuda" if has_gpu else "cpu")
    parser.add_argument("--sizes", default="125M,350M,1.2B" if has_gpu else "tiny")
    parser.add_argument("--seconds", type=float, default=10.0, help="each speed is measured for so long")
    parser.add_argument("--line", default="100 Mbit/s", help="of the two peers that meet; they first carry the weights, 4 bytes each")
    parser.add_argument("--without", default="", help="parts to leave out: tests, meetings, speed")
    parser.add_argument("--quality", nargs="?", const="100M" if has_gpu else "tiny", help="also what pairs cost in loss, at this size")
    parser.add_argument("--minutes", type=float, default=MINUTES, help="for all of it")
    parser.add_argument("--out", type=Path, help="also write the JSON here")
    return parser


def main() -> None:
    """Print the JSON, then the table."""
    given = options().parse_args()
    found = figures(given)
    line = json.dumps(found)
    if given.out is not None:
        given.out.write_text(line + "\n")
    print(line)
    print(table(found), file=sys.stderr)


if __name__ == "__main__":
    main()
