"""The forms of coding that this installation has: torch, and the compiled part where a C compiler built it."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

from gossamer.optim.compiled import compiled_for, without_compiled

CODINGS = ["torch"] if compiled_for(torch.device("cpu")) is None else ["torch", "compiled"]


def coded_by(name: str) -> AbstractContextManager[None]:
    """Let this form do what runs inside."""
    return without_compiled() if name == "torch" else nullcontext()
