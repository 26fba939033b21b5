"""How long a run will take, about: to say it beforehand, and to stop the ones that would take hours."""

from __future__ import annotations

from benchmarks.side_by_side.results import Setting
from benchmarks.side_by_side.systems import GOSSAMER, SYSTEMS

STEP_S = 0.28  # of four peers on two cores, without exchange
AROUND_S = 45.0  # start of the processes, and the losses at the end
SLOW_FACTOR = 3.0  # what one slow peer does to those who wait for it


def full_s(setting: Setting) -> float:
    """Return the time of all inner steps and exchanges."""
    system = SYSTEMS[setting.system]
    line_s = 8 * system.mb_per_step / setting.mbit_per_s if setting.mbit_per_s and setting.system != GOSSAMER else 0.0
    waits = SLOW_FACTOR if setting.fault == "slow" and setting.system != GOSSAMER else 1.0
    return setting.total_steps * (STEP_S * waits + line_s)


def is_sampled(setting: Setting, longest_s: float) -> bool:
    """Return whether a run would take longer than the longest, so that only its rate is measured."""
    return full_s(setting) > longest_s


def limit_s(setting: Setting, longest_s: float, sample_s: float) -> float:
    """Return when to stop a run."""
    return sample_s if is_sampled(setting, longest_s) else longest_s


def estimate_s(setting: Setting, longest_s: float, sample_s: float) -> float:
    """Return the time that a run will take, start and measuring included."""
    return AROUND_S + (sample_s if is_sampled(setting, longest_s) else full_s(setting))
