"""The forms of coding that this installation has: torch, compiled.c where a C compiler built it, Triton's kernels.

Triton's are there on a GPU, or with TRITON_INTERPRET=1 through Triton's interpreter on the CPU, slowly: so with few examples.
"""

from __future__ import annotations

import os
from contextlib import AbstractContextManager
from typing import Final

import pytest
import torch

from gossamer.optim.compiled import Compiled, coded_with, compiled_for

CPU: Final = torch.device("cpu")
HAS_GPU: Final = torch.cuda.is_available()
IS_INTERPRETED: Final = os.environ.get("TRITON_INTERPRET") == "1"


def _forms() -> dict[str, tuple[Compiled | None, torch.device]]:
    forms: dict[str, tuple[Compiled | None, torch.device]] = {"torch": (None, CPU)}
    if (compiled := compiled_for(CPU)) is not None:
        forms["compiled"] = compiled, CPU
    if (HAS_GPU or IS_INTERPRETED) and (compiled := compiled_for(torch.device("cuda"))) is not None:
        forms["triton"] = compiled, torch.device("cuda") if HAS_GPU else CPU
    return forms


FORMS: Final = _forms()
CODINGS: Final = [pytest.param(name, marks=[pytest.mark.cuda] if device.type == "cuda" else []) for name, (_, device) in FORMS.items()]
NATIVE: Final = [one for one in CODINGS if one.values != ("torch",)]  # forms to compare with torch
CODINGS_OF_CPU: Final = [name for name, (_, device) in FORMS.items() if device == CPU]


def coded_by(name: str) -> AbstractContextManager[None]:
    """Let this form do what runs inside."""
    return coded_with(FORMS[name][0])


def device_of(name: str) -> torch.device:
    """Return where the form's tensors lie."""
    return FORMS[name][1]


def examples(count: int) -> int:
    """Return how many examples to draw."""
    return max(1, count // 10) if IS_INTERPRETED else count
