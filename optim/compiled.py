"""Coding in one pass over memory: on the CPU where this installation has compiled.c, on CUDA devices in Triton.

torch is the reference, and codes without them and on every other device. A pair merges the same values bit for bit, whichever form of
coding each side uses: decoding is exact on integers up to one product. A sender's own codes may differ by one where a value lies between
two integers to within the rounding of f32, since the forms add in different orders (docs/decisions/2026-11-26-compiled-coding.md).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import sysconfig
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, Protocol

import torch
from torch import Tensor

FILES: Final = "_compiled.*so"
INTERFACE: Final = 1  # of compiled.c
OLDEST_GPU: Final = (7, 0)  # compute capability
HINT: Final = "`pip install` with a C compiler builds it"


class _Pointer:
    """An argument's type: a contiguous tensor of one dtype on the CPU, or None."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def from_param(self, tensor: Tensor | None) -> ctypes.c_void_p:
        if tensor is None:
            return ctypes.c_void_p(None)
        if tensor.dtype != self._dtype or tensor.device.type != "cpu" or not tensor.is_contiguous():
            raise TypeError(f"A contiguous {self._dtype} on the CPU was expected, not {tensor.dtype} on {tensor.device}.")
        return ctypes.c_void_p(tensor.data_ptr())


F32, I32, I16, U8, BOOL = map(_Pointer, (torch.float32, torch.int32, torch.int16, torch.uint8, torch.bool))
COUNT, BITS, NUMBER = ctypes.c_int64, ctypes.c_int32, ctypes.c_float


class Compiled(Protocol):
    """Coding on contiguous tensors of one kind of device, whose sizes the caller has checked. Threads may share it."""

    @property
    def name(self) -> str:
        """Return the name for people."""

    def sketch(self, message: Tensor, signs: Tensor, out: Tensor) -> None:
        """Write the first 8 values of each rotated block, divided by 32, into f32[blocks, 8]."""

    def encode(
        self, message: Tensor, bits: int, signs: Tensor, dither: Tensor, steps: Tensor, weights: Tensor, payload: Tensor, sums: Tensor
    ) -> None:
        """Write a modulo payload (codes and checks), and the weighted sum of each block's integers into int32[blocks]."""

    def decode(
        self,
        payloads: tuple[Tensor, Tensor],
        bits: int,
        signs: Tensor,
        steps: Tensor,
        weights: Tensor,
        own_sums: Tensor,
        out: tuple[Tensor, Tensor, Tensor],
    ) -> None:
        """Write the partner's payload minus the own one into `out`: f32[blocks, 1024], shifts of the checks (int32) and ties (bool)."""


class CompiledLibrary:
    """compiled.c, for CPU tensors: coding and the pair step, on the calling thread alone, without the GIL: inner steps have other cores."""

    name: Final = "compiled"

    def __init__(self, file: Path) -> None:
        """Load the library. Raises OSError for one of another machine or another version of Gossamer."""
        library = ctypes.CDLL(str(file))
        if getattr(library, "gossamer_interface", int)() != INTERFACE:
            raise OSError(f"{file} belongs to another version of Gossamer")

        def function(name: str, *arguments: Any) -> Callable[..., None]:
            found = getattr(library, f"gossamer_{name}")
            found.argtypes, found.restype = arguments, None
            return found  # type: ignore[no-any-return] # ctypes' functions have no type of their own

        self._sketch = function("sketch", F32, COUNT, F32, F32)
        self._encode = function("encode", F32, COUNT, BITS, F32, F32, F32, I16, U8, I32)
        self._decode = function("decode", U8, U8, COUNT, BITS, F32, F32, I16, I32, F32, I32, BOOL)
        self._pair_step = function("pair_step", F32, F32, F32, F32, BOOL, COUNT, *[NUMBER] * 4, F32, F32, F32)

    def sketch(self, message: Tensor, signs: Tensor, out: Tensor) -> None:
        """Write the first 8 values of each rotated block, divided by 32, into f32[blocks, 8]."""
        self._sketch(message.contiguous(), message.numel(), signs, out)

    def encode(
        self, message: Tensor, bits: int, signs: Tensor, dither: Tensor, steps: Tensor, weights: Tensor, payload: Tensor, sums: Tensor
    ) -> None:
        """Write a modulo payload (codes and checks), and the weighted sum of each block's integers into int32[blocks]."""
        self._encode(message.contiguous(), message.numel(), bits, signs, dither, steps, weights.short(), payload, sums)

    def decode(
        self,
        payloads: tuple[Tensor, Tensor],
        bits: int,
        signs: Tensor,
        steps: Tensor,
        weights: Tensor,
        own_sums: Tensor,
        out: tuple[Tensor, Tensor, Tensor],
    ) -> None:
        """Write the partner's payload minus the own one into `out`: f32[blocks, 1024], shifts of the checks (int32) and ties (bool)."""
        partner, own = payloads
        self._decode(partner.contiguous(), own, own_sums.numel(), bits, signs, steps, weights.short(), own_sums, *out)

    def pair_step(
        self,
        weights: tuple[Tensor, Tensor],
        momentum: Tensor | None,
        gap: Tensor,
        failed: Tensor | None,
        factors: tuple[float, float, float, float],
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """Return the next slow weights, the next momentum (None: it is zero and stays so), and what to add to the fast weights.

        `weights` are slow and fast; `factors`: the part that is taken, and the factors of progress, solo step and momentum.
        """
        slow, fast = weights
        next_slow, shift = torch.empty_like(slow), torch.empty_like(slow)
        next_momentum = None if momentum is None else torch.empty_like(momentum)
        self._pair_step(slow, momentum, fast, gap, failed, slow.numel(), *factors, next_slow, next_momentum, shift)
        return next_slow, next_momentum, shift


def load(folder: Path) -> tuple[CompiledLibrary | None, str]:
    """Return the compiled part that lies in a folder, or None and the reason."""
    file = next(folder.glob(FILES), None)
    if file is None:
        return None, f"no compiled part here; {HINT}"
    try:
        return CompiledLibrary(file), ""
    except (OSError, AttributeError) as error:
        return None, f"the compiled part cannot be used: {error}; {HINT}"


def lack_for_triton(device: torch.device) -> str:
    """Return what Triton needs for this device and the machine lacks, empty for nothing. It compiles the start of each kernel in C."""
    if find_spec("triton") is None:
        return "triton is not installed"
    if device.type == "cuda" and torch.cuda.is_available() and torch.cuda.get_device_capability(device) < OLDEST_GPU:
        return "triton needs a GPU of compute capability 7.0 or newer"
    if not (os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")):
        return "no C compiler for triton here"
    scheme = sysconfig.get_default_scheme().replace("posix_local", "posix_prefix")  # as Triton looks for it
    has_header = Path(sysconfig.get_path("include", scheme), "Python.h").exists()
    return "" if has_header else "no headers of Python for triton here"


_forms: dict[torch.device, tuple[Compiled | None, str]] = {}


def _form(device: torch.device) -> tuple[Compiled | None, str]:
    if device not in _forms:
        _forms[device] = _found(device)
    return _forms[device]


def _found(device: torch.device) -> tuple[Compiled | None, str]:
    """Return what this installation has for tensors on a device, or None and the reason. A Triton that is installed but broken raises."""
    if device.type == "cpu":
        return load(Path(__file__).parent)
    if device.type != "cuda":
        return None, f"on {device.type}"
    if lack := "never tried on ROCm" if torch.version.hip is not None else lack_for_triton(device):
        return None, f"on cuda: {lack}"
    from gossamer.optim.kernels import TritonKernels  # not before a GPU needs it: it loads triton

    return TritonKernels(), ""


_instead: tuple[Compiled | None] | None = None


def compiled_for(device: torch.device) -> Compiled | None:
    """Return the compiled part for tensors on this device, or None if torch codes there."""
    return _form(device)[0] if _instead is None else _instead[0]


def compiled_step_for(device: torch.device) -> CompiledLibrary | None:
    """Return what takes the pair step on this device, or None for torch, as on GPUs: there the copies of slow weights cost the time."""
    form = compiled_for(device)
    return form if isinstance(form, CompiledLibrary) else None


def reject(device: torch.device, why: str) -> None:
    """Let torch code on this device from now on; `why` is for people."""
    _forms[device] = None, why


@contextlib.contextmanager
def coded_with(form: Compiled | None) -> Iterator[None]:
    """Let this form do everything meanwhile, None: torch, on all threads: to compare the forms."""
    global _instead
    before, _instead = _instead, (form,)
    try:
        yield
    finally:
        _instead = before


def coding_words(device: torch.device) -> str:
    """Return what codes messages on this device, and why, for people."""
    form = compiled_for(device)
    return f"torch ({_form(device)[1]})" if form is None else form.name
