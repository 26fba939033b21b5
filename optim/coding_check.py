"""Whether this machine codes as every other does: tried when a trainer starts, for a difference would spoil merges and nobody would see it.

The two sides of a meeting each compute their gap and outer step from the same bytes, and never compare them (optim/codecs/interface.py).
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from gossamer.optim.codecs import Codec
from gossamer.optim.codecs.modulo import Modulo, ModuloEncoded
from gossamer.optim.compiled import Compiled, coded_with, coding_words, compiled_for, reject
from gossamer.optim.noloco import NoLoCo
from gossamer.protocol.errors import BadSettings

NUM_VALUES: Final = 5 * 1024 + 517  # the last block is short
SEED: Final = 1
SCALES: Final = (0.02, 0.002)  # of weights, and of the difference between two peers' weights
DAMAGED: Final = slice(3000, None, 97)  # bytes of the payload: some blocks need correction, some fail
MOST_OTHER_BYTES: Final = 0.01  # of a payload: a value halfway between two integers may be rounded either way
RULE: Final = NoLoCo()


def settle_coding(coder: Codec, device: torch.device) -> str:
    """Return what codes messages on this device, for people. Where the compiled part computes other bits, torch codes from now on.

    Raises BadSettings where torch does so too: the device, its driver or this build of torch is broken.
    """
    if isinstance(coder, Modulo) and not _codes_right(coder, device):
        compiled = compiled_for(device)
        if compiled is not None:
            reject(device, f"{compiled.name} computes other bits on this {device.type}")
        if compiled is None or not _codes_right(coder, device):
            raise BadSettings(
                f"torch {torch.__version__} computes other bits on {device} than on the CPU: the device or its driver is broken",
                hint="train on another device (--devices cpu); `peer doctor` checks it",
            )
    return coding_words(device)


def _codes_right(coder: Modulo, device: torch.device) -> bool:
    compiled = compiled_for(device)
    return _decodes_right(coder, device) and (compiled is None or _steps_right(compiled, device))


def _decodes_right(coder: Modulo, device: torch.device) -> bool:
    """Return whether steps, and gaps of a whole and of a damaged payload, have the CPU's bits, and a coded message nearly all of them."""
    own, other = _drawn(SCALES[0], SEED), _drawn(SCALES[0], SEED) + _drawn(SCALES[1], SEED + 1)
    with coded_with(None):
        sketches = coder.sketch(own, SEED), coder.sketch(other, SEED)
        here = coder.encode(own, SEED, *sketches)
        whole = coder.encode(other, SEED, *sketches[::-1]).payload
        damaged = whole.clone()
        damaged[DAMAGED] ^= 0x5A
        expected = [coder.gap(here, payload) for payload in (whole, damaged)]
    sent = coder.encode(own.to(device), SEED, *(sketch.to(device) for sketch in sketches))
    if not _same_bits(sent.steps, here.steps) or int((sent.payload.cpu() != here.payload).sum()) > MOST_OTHER_BYTES * len(here.payload):
        return False
    there = ModuloEncoded(here.payload.to(device), here.num_values, *(part.to(device) for part in (here.sums, here.steps, here.signs)))
    found = [coder.gap(there, payload.to(device)) for payload in (whole, damaged)]
    return all(
        _same_bits(one.values, other.values) and torch.equal(one.failed.cpu(), other.failed)
        for one, other in zip(found, expected, strict=True)
    )


def _steps_right(compiled: Compiled, device: torch.device) -> bool:
    """Return whether an outer step with some failed values has the bits of torch on the CPU."""
    slow, momentum, gap = (_drawn(scale, SEED + number) for number, scale in enumerate((SCALES[0], SCALES[1], SCALES[1])))
    fast, failed = slow + _drawn(SCALES[1], SEED + 3), torch.arange(NUM_VALUES) % 7 == 0
    expected = RULE.pair_step(slow, momentum, fast, 0.3, gap, failed, 0.6)
    moved = slow.to(device), momentum.to(device), fast.to(device)
    found = RULE.compiled_pair_step(compiled, moved[0], moved[1], moved[2], 0.3, gap.to(device), failed.to(device), 0.6)
    return found[1] is not None and _same_bits(found[0], expected[0]) and _same_bits(found[1], expected[1])


def _drawn(scale: float, seed: int) -> Tensor:
    return scale * torch.randn(NUM_VALUES, generator=torch.Generator().manual_seed(seed))


def _same_bits(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.cpu().view(torch.int32), other.cpu().view(torch.int32))
