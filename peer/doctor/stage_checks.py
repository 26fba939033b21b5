"""Checks of a staged run: what share of this device the line can feed, and whether a stage is worth holding here."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from gossamer.peer.doctor.case import Case
from gossamer.peer.doctor.finding import Finding, ok, skipped, warn
from gossamer.peer.doctor.machine_checks import device_rate
from gossamer.peer.machine.stage_line import USEFUL_SHARE, StageLine
from gossamer.peer.machine.units import bytes_text, percent_text, rate_text

if TYPE_CHECKING:
    from gossamer.peer.trainer.stage_need import StageEstimate

WHOLE = "train it whole: a run without [stages] sends less, and computes nothing twice"
NARROW = 'a faster line, `activations = "int4"`, or a smaller model that each peer holds whole; `--least-use 0` joins nevertheless'


def device_use(case: Case) -> Finding:
    """Report what share of this device the line can feed with micro-batches, and advise against a stage where something else is better."""
    if not case.stages():
        return skipped("the run has no stages: each peer holds the whole model")
    lines = on_lines(case)
    if not lines:
        return skipped("the device has not computed anything, so its rate is not known")
    sentence = "; ".join(_sentence(stage, line) for stage, line in lines)
    if math.isinf(case.line_bytes_per_s()):
        sentence += "; the line is not measured"
    if not case.whole_refusal():
        return warn(f"do not: the whole model fits this machine. {sentence}", WHOLE)
    least = min(line.use for _, line in lines)
    return warn(f"do not: {sentence}", NARROW) if least < case.settings.least_use else ok(sentence)


def on_lines(case: Case) -> list[tuple[StageEstimate, StageLine]]:
    """Return each stage of the case with what this line feeds of this device; empty where the device's rate is not known."""
    _, output = case.computed()
    flops, line_bytes_per_s = USEFUL_SHARE * device_rate(output), case.line_bytes_per_s()
    return [(stage, stage.on(flops, line_bytes_per_s)) for stage in case.stages()] if flops else []


def busiest(case: Case) -> tuple[StageEstimate, StageLine] | None:
    """Return the stage that sends most in a day; None in a run without stages, or on a device whose rate is not known."""
    return max(on_lines(case) if case.stages() else [], key=lambda one: one[1].day_sent, default=None)


def _sentence(stage: StageEstimate, line: StageLine) -> str:
    """Return a stage in figures: computed, needed, fed, and what it carries in a day."""
    fed = "" if math.isinf(line.line_bytes_per_s) else f"; this line feeds {percent_text(line.use)} of the device"
    taken = rate_text(line.full_use_bytes_per_s)
    return (
        f"{stage.name} computes {_count(line.tokens_per_s)} tokens/s here, which takes {taken} each way{fed}: "
        f"{_count(line.carried_tokens_per_s)} tokens/s, {bytes_text(line.day_sent)} up and {bytes_text(line.day_received)} down a day"
    )


def _count(number: float) -> str:
    return f"{number:,.0f}" if number >= 10 else f"{number:.2g}"
