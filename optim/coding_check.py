"""Whether this machine codes as every other does: tried when a trainer starts, for a difference would spoil merges and nobody would see it.

The two sides of a meeting each compute their gap and outer step from the same bytes, and never compare them (optim/codecs/interface.py).
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from gossamer.optim.codecs import Codec
from gossamer.optim.codecs.modulo import Modulo, ModuloEncoded
from gossamer.optim.compiled import CompiledLibrary, coded_with, coding_words, compiled_for, compiled_step_for, reject
from gossamer.optim.noloco import NoLoCo

SIZES: Final = (5 * 1024 + 517, 5 * 1024 + 512)  # the last block is short; Triton compiles a kernel for each of the two kinds
SEED: Final = 1
SCALES: Final = (0.02, 0.002)  # of weights, and of the difference between two peers' weights
DAMAGED: Final = slice(3000, None, 97)  # bytes of the payload: some blocks need correction, some fail
MOST_REASON: Final = 120  # characters
MOST_OTHER_BYTES: Final = 0.01  # of a sketch or payload: a value halfway between two numbers may be rounded either way
RULE: Final = NoLoCo()


def settle_coding(coder: Codec, device: torch.device) -> str:
    """Return what codes messages on this device, for people. Where the compiled part fails or computes other bits, torch codes from now on.

    It compiles what codes on a GPU, so no meeting waits for that. Raises ArithmeticError where torch computes other bits too: the device,
    its driver or this build of torch is broken.
    """
    if isinstance(coder, Modulo):
        compiled = compiled_for(device)
        if compiled is not None and (lack := _lack_of(coder, device)):
            reject(device, f"{compiled.name} {lack} on {device.type}")
            compiled = None
        if compiled is None and not _codes_right(coder, device):
            raise ArithmeticError(f"torch {torch.__version__} computes other bits on {device} than on the CPU")
    return coding_words(device)


def _lack_of(coder: Modulo, device: torch.device) -> str:
    """Return what is wrong with the compiled part for a device, empty for nothing."""
    try:
        library = compiled_step_for(device)
        is_right = _codes_right(coder, device) and (library is None or _steps_right(library))
    except Exception as error:  # noqa: BLE001 - Triton raises what its compiler, its cache, the driver or the C compiler does
        return f"does not run ({' '.join(str(error).split())[:MOST_REASON]})"
    return "" if is_right else "computes other bits"


def _codes_right(coder: Modulo, device: torch.device) -> bool:
    return all(codes_as_the_cpu(coder, device, size) for size in SIZES)


def codes_as_the_cpu(coder: Modulo, device: torch.device, size: int) -> bool:
    """Return whether what codes on a device has the bits of torch on the CPU, for messages of so many values.

    That is: steps, and gaps of a whole and of a damaged payload, have all of them; sketch and payload nearly all.
    """
    own = _drawn(SCALES[0], SEED, size)
    other = own + _drawn(SCALES[1], SEED + 1, size)
    with coded_with(None):
        sketches = coder.sketch(own, SEED), coder.sketch(other, SEED)
        here = coder.encode(own, SEED, *sketches)
        whole = coder.encode(other, SEED, *sketches[::-1]).payload
        damaged = whole.clone()
        damaged[DAMAGED] ^= 0x5A
        expected = [coder.gap(here, payload) for payload in (whole, damaged)]
    there = own.to(device)
    sent = coder.encode(there, SEED, *(sketch.to(device) for sketch in sketches))
    if not all(_nearly_same(one, other) for one, other in ((coder.sketch(there, SEED), sketches[0]), (sent.payload, here.payload))):
        return False
    moved = ModuloEncoded(here.payload.to(device), here.num_values, *(part.to(device) for part in (here.sums, here.steps, here.signs)))
    found = [coder.gap(moved, payload.to(device)) for payload in (whole, damaged)]
    return _same_bits(sent.steps, here.steps) and all(
        _same_bits(one.values, other.values) and torch.equal(one.failed.cpu(), other.failed)
        for one, other in zip(found, expected, strict=True)
    )


def _nearly_same(one: Tensor, other: Tensor) -> bool:
    return int((one.cpu() != other).sum()) <= MOST_OTHER_BYTES * other.numel()


def _steps_right(library: CompiledLibrary) -> bool:
    """Return whether an outer step with some failed values has the bits of torch on the CPU."""
    slow, momentum, gap = (_drawn(scale, SEED + number, SIZES[0]) for number, scale in enumerate((SCALES[0], SCALES[1], SCALES[1])))
    fast, failed = slow + _drawn(SCALES[1], SEED + 3, SIZES[0]), torch.arange(SIZES[0], device="cpu") % 7 == 0
    expected = RULE.pair_step(slow, momentum, fast, 0.3, gap, failed, 0.6)
    found = RULE.compiled_pair_step(library, slow, momentum, fast, 0.3, gap, failed, 0.6)
    return found[1] is not None and _same_bits(found[0], expected[0]) and _same_bits(found[1], expected[1])


def _drawn(scale: float, seed: int, size: int) -> Tensor:
    return scale * torch.randn(size, generator=torch.Generator().manual_seed(seed), device="cpu")


def _same_bits(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.cpu().view(torch.int32), other.cpu().view(torch.int32))
