"""What the driver of the GPUs tells through its tool: temperature, power draw, and the limit of that draw.

Only root may change the limit, so the peer never tries: it says what would (`pauses.py`).
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Sequence
from dataclasses import dataclass

from gossamer.peer.supervisor.polled_command import PolledCommand

ASK_S = 10.0  # between two questions
GPU_TOOL = ("nvidia-smi", "--query-gpu=temperature.gpu,power.draw,power.limit", "--format=csv,noheader,nounits")


@dataclass(frozen=True, slots=True)
class GpuReading:
    """One GPU; None: the driver does not tell."""

    degrees: float | None  # Celsius
    draw_watts: float | None
    limit_watts: float | None


class GpuDriver:
    """The driver's tool, which is never waited for."""

    def __init__(self, tool: Sequence[str] = GPU_TOOL) -> None:
        self._tool = tool
        self._command = PolledCommand(ASK_S)
        self.is_there = shutil.which(tool[0]) is not None  # on this machine

    @property
    def has_answered(self) -> bool:
        """Whether the tool has ended once, or cannot be run."""
        return self._command.code is not None or bool(self._command.failure)

    def look(self, now_s: float) -> tuple[GpuReading, ...]:
        """Return the newest readings, one for each GPU, and ask again if it is time. `now_s` is a monotonic clock."""
        self._command.poll(self._tool, now_s)
        return gpus_in(self._command.output) if self._command.code == 0 else ()

    def close(self) -> None:
        """End the tool."""
        self._command.close()


def gpus_in(text: str) -> tuple[GpuReading, ...]:
    """Read what the tool prints: a line for each GPU, its numbers separated by commas."""
    rows = ([_number(cell) for cell in line.split(",")] for line in text.splitlines() if line.strip())
    return tuple(GpuReading(*[*row, None, None, None][:3]) for row in rows)


def _number(cell: str) -> float | None:
    """Return a number; None for words like "[N/A]"."""
    try:
        number = float(cell)
    except ValueError:
        return None
    return number if math.isfinite(number) else None
