"""Estimated duration of a run, to announce it and to stop runs that would take hours."""

from __future__ import annotations

from benchmarks.side_by_side.results import Setting
from benchmarks.side_by_side.systems import GOSSAMER, SYSTEMS

STEP_S = 0.28  # of four peers on two cores, without exchange
AROUND_S = 45.0  # start of the processes, and the losses at the end
WORTH_IT = 1.5  # times the sample must a run last to be stopped after it
SLOW_FACTOR = 3.0  # what one slow peer does to those who wait for it


def full_s(setting: Setting) -> float:
    """Return the time of all inner steps and exchanges."""
    system = SYSTEMS[setting.system]
    line_s = 8 * system.mb_per_step / setting.mbit_per_s if setting.mbit_per_s and setting.system != GOSSAMER else 0.0
    waits = SLOW_FACTOR if setting.fault == "slow" and setting.system != GOSSAMER else 1.0
    return setting.total_steps * (STEP_S * waits + line_s)


def stop_after_s(setting: Setting, limit_s: float, sample_s: float) -> float:
    """Return when to stop a run: an exact system runs only for a sample, since its rate is constant and its loss known.

    A half-way fault needs half of the run; an inexact system needs its whole run for its loss.
    """
    is_known = SYSTEMS[setting.system].is_exact and setting.mbit_per_s > 0 and setting.fault in ("none", "slow")
    return sample_s if is_known and full_s(setting) > WORTH_IT * sample_s else limit_s


def estimate_s(setting: Setting, limit_s: float, sample_s: float) -> float:
    """Return the estimated duration of a run, start and measuring included."""
    return AROUND_S + min(full_s(setting), stop_after_s(setting, limit_s, sample_s))
