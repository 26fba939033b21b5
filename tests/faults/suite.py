"""Run the trials of a fault and collect the results. An exception in a trial is a violation; its number reproduces the trial."""

from __future__ import annotations

import sys
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple


class Played(NamedTuple):
    """The result of a trial that plays several faults."""

    figure: float
    num_faults: int


@dataclass(frozen=True)
class Fault:
    """One kind of fault. `play` runs the trial with a number, which determines it, and may return a figure named `figure`.

    A trial that plays several faults returns `Played`; `plural` names these faults.
    """

    name: str
    what: str
    trials: int
    play: Callable[[int], float | Played | None]
    figure: str = ""
    plural: str = ""


@dataclass
class Outcome:
    """The results of the trials of one fault."""

    fault: Fault
    num_trials: int = 0
    violations: list[int] = field(default_factory=list)  # numbers of the violating trials
    figures: list[float] = field(default_factory=list)
    num_faults: int = 0  # of the trials without a violation, where a trial plays several
    cpu_s: float = 0.0
    is_interrupted: bool = False

    @property
    def row(self) -> str:
        """Return the result as a row of the table."""
        fault = self.fault
        return f"{fault.name:<5}{fault.what:<58}{self.num_trials:>7}{len(self.violations):>12}{self.cpu_s:>9.0f} s  {self._figures()}"

    def _figures(self) -> str:
        if not self.figures:
            return ""
        ordered = sorted(self.figures)
        p95 = ordered[max(0, -(-95 * len(ordered) // 100) - 1)]
        count = f"{self.num_faults:,} {self.fault.plural}; " if self.fault.plural else ""
        return f"{count}{self.fault.figure}: median {ordered[len(ordered) // 2]:.4g}, p95 {p95:.4g}, worst {ordered[-1]:.4g}"


HEAD = f"{'':<5}{'fault':<58}{'trials':>7}{'violations':>12}{'processor':>11}"


def run(fault: Fault, numbers: Iterable[int]) -> Outcome:
    """Run these trials of a fault, and continue after violations. Ctrl-C leaves the trials before it in the outcome."""
    outcome, began_s = Outcome(fault), time.process_time()
    for number in numbers:
        try:
            played = fault.play(number)
        except KeyboardInterrupt:
            outcome.is_interrupted = True
            break
        except Exception:
            outcome.violations.append(number)
            traceback.print_exc(limit=-6, file=sys.stderr)
            sys.stderr.write(f"\nviolated; again: python -m tests.faults {fault.name} --trial {number}\n\n")
        else:
            figure, num_faults = played if isinstance(played, Played) else (played, 0)
            outcome.figures += [] if figure is None else [figure]
            outcome.num_faults += num_faults
        outcome.num_trials += 1
    outcome.cpu_s = time.process_time() - began_s
    return outcome
