"""Where a staged run pays, from formulas: what a line feeds of a device, and what a whole model would send on the same line.

Reference devices with their memory and useful operations stand for the holders; all stages have as many parameters.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from gossamer.optim.codecs.activations import ACTIVATIONS
from gossamer.optim.fragments import MEETING_INTERVAL
from gossamer.peer.machine.stage_line import (
    DAY_S,
    LEAST_USE,
    StageLine,
    least_stages,
    tokens_computed_per_s,
)
from gossamer.peer.machine.units import percent_text
from gossamer.peer.trainer.interval import LINE_SHARE
from gossamer.protocol.errors import BadSettings
from gossamer.protocol.messages.terms import TOKEN_BYTES, StageTerms

FORMATS: Final = ("bf16", "int8", "int4")
LINES_MBIT: Final = (20.0, 100.0, 1000.0)
BATCH_TOKENS: Final = 131_072  # of an inner step, where no manifest says it
BATCHES_APART: Final = 10  # between two meetings of a fragment, likewise
TOKENS: Final = 4096  # over which the bytes of a token are counted: blocks of a codec may span tokens
VOCABULARY: Final = 128_256  # of the model whose width follows from its parameters and layers
MEMORY_SHARE: Final = 0.85  # of a device's, that weights may take
MBIT: Final = 125_000.0  # bytes a second


@dataclass(frozen=True, slots=True)
class ReferenceDevice:
    """A kind of machine: memory of the device, useful operations a second, and bytes that a parameter takes there."""

    name: str
    memory_bytes: float
    flops: float
    bytes_per_param: float  # docs/reference/memory.md: Muon; on a GPU with the optimizer on the host

    @property
    def most_params(self) -> float:
        """Return how many parameters fit."""
        return MEMORY_SHARE * self.memory_bytes / self.bytes_per_param


DEVICES: Final = (
    ReferenceDevice("laptop, 16 GB", 16e9, 0.1e12, 25.6),
    ReferenceDevice("GPU, 8 GB", 8e9, 16e12, 9.3),
    ReferenceDevice("RTX 3090, 24 GB", 24e9, 28e12, 9.3),
    ReferenceDevice("RTX 4090, 24 GB", 24e9, 66e12, 9.3),
    ReferenceDevice("H100, 80 GB", 80e9, 396e12, 9.3),
)


@dataclass(frozen=True, slots=True)
class StagedModel:
    """A model and its cut. Raises BadSettings for one that cannot be."""

    num_params: float
    num_layers: int
    hidden_size: int
    num_stages: int
    bits_per_param: float  # that a meeting sends
    batch_tokens: int = BATCH_TOKENS
    interval_steps: int = BATCHES_APART

    def __post_init__(self) -> None:
        if not 2 <= self.num_stages <= self.num_layers:
            raise BadSettings(
                f"{self.num_layers} layers cannot be cut into {self.num_stages} stages",
                hint=f"--stages takes 2 to {self.num_layers} here: a stage has one layer at least",
            )

    @property
    def stage_params(self) -> float:
        """Return the parameters of one stage."""
        return self.num_params / self.num_stages

    def token_bytes(self, activations: str, stage: int) -> tuple[float, float]:
        """Return what a holder of a stage, from 0, sends and receives for a token."""
        value_bytes = ACTIVATIONS[activations].payload_bytes(TOKENS * self.hidden_size)
        sent, received = StageTerms(stage, self.num_stages, TOKENS * TOKEN_BYTES, value_bytes, 1).hop_bytes
        return sent / TOKENS, received / TOKENS

    @property
    def busiest_stage(self) -> int:
        """Return the stage that a line feeds worst: a middle one, if there is one."""
        return 1 if self.num_stages > 2 else 0

    @property
    def whole_bytes_per_token(self) -> float:
        """Return what a peer with the whole model sends in meetings for a token."""
        return self.bits_per_param / 8 * self.num_params / (MEETING_INTERVAL * self.interval_steps * self.batch_tokens)


def hidden_size_of(num_params: float, num_layers: int) -> int:
    """Return about the width of a model of today: 12 values a layer and square of the width, an embedding and a head; a multiple of 64."""
    ends = 2 * VOCABULARY
    width = (math.sqrt(ends**2 + 48 * num_layers * num_params) - ends) / (24 * num_layers)
    return max(64, 64 * round(width / 64))


def report(model: StagedModel, lines_mbit: Sequence[float], activations: str) -> dict[str, Any]:
    """Return the object that `peer simulate --network --stages --json` prints; `activations` decide the verdict. Raises BadSettings."""
    if activations not in ACTIVATIONS:
        raise BadSettings(f"there are no activations {activations!r}", hint=f"--activations takes {', '.join(ACTIVATIONS)}")
    kinds = {"first": 0, **({"middle": 1} if model.num_stages > 2 else {}), "last": model.num_stages - 1}
    return {
        "params": model.num_params,
        "layers": model.num_layers,
        "hidden_size": model.hidden_size,
        "stages": model.num_stages,
        "stage_params": model.stage_params,
        "activations": activations,
        "bytes_per_token": {
            name: {kind: dict(zip(("sent", "received"), model.token_bytes(name, stage), strict=True)) for kind, stage in kinds.items()}
            for name in _formats(activations)
        },
        "whole_bytes_per_token": model.whole_bytes_per_token,
        "rows": [_row(model, device, mbit, activations) for device in DEVICES for mbit in lines_mbit],
    }


def _formats(activations: str) -> tuple[str, ...]:
    return FORMATS if activations in FORMATS else (*FORMATS, activations)


def _row(model: StagedModel, device: ReferenceDevice, mbit: float, activations: str) -> dict[str, Any]:
    """Return a holder of the busiest stage on one device and line, and a peer with the whole model there."""
    computed = tokens_computed_per_s(device.flops, model.stage_params)
    lines = {name: StageLine(*model.token_bytes(name, model.busiest_stage), computed, mbit * MBIT) for name in _formats(activations)}
    formats = {name: _shown(line) for name, line in lines.items()}
    whole_per_s = tokens_computed_per_s(device.flops, model.num_params, is_last=True)
    fits_whole, fits = model.num_params <= device.most_params, model.stage_params <= device.most_params
    whole_day = DAY_S * min(whole_per_s * model.whole_bytes_per_token, LINE_SHARE * mbit * MBIT)
    return {
        "device": device.name,
        "line_mbit": mbit,
        "tokens_per_second": computed,
        "formats": formats,
        "whole": {"fits": fits_whole, "tokens_per_second": whole_per_s, "day_bytes": whole_day},
        "fits": fits,
        "verdict": _verdict(model, device, formats[activations]["use"]),
    }


def _shown(line: StageLine) -> dict[str, float]:
    return {
        "full_use_mbit": line.full_use_bytes_per_s / MBIT,
        "use": line.use,
        "tokens_per_second": line.carried_tokens_per_s,
        "day_sent": line.day_sent,
        "day_received": line.day_received,
    }


def _verdict(model: StagedModel, device: ReferenceDevice, use: float) -> str:
    if model.num_params <= device.most_params:
        return "do not: it fits whole"
    if model.stage_params > device.most_params:
        return f"does not fit: {least_stages(model.num_params, device.most_params)} stages at least"
    fed = f"{percent_text(use)} of the device"
    return f"do not: {fed}" if use < LEAST_USE else fed
