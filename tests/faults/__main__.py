"""The fault suite: trials of every kind of fault, with the number of violations.

    python -m tests.faults [R1 R5 ...] [--share 0.1] [--trial 1234 | --trial 100-299]

Every trial follows from its number alone; one that is violated prints the line that plays it again. R1k and R4 are of real processes:
when their kills fall differs from time to time. All take five hours of one core: R17 two, R1k and R16 one each. Ctrl-C ends the suite and
prints the row of the trials so far.
"""

from __future__ import annotations

import argparse
import sys

import torch

from tests.faults.faults import FAULTS
from tests.faults.suite import HEAD, run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("faults", nargs="*", metavar="FAULT", default=[fault.name for fault in FAULTS])
    parser.add_argument("--share", type=float, default=1.0, help="of the trials of each")
    parser.add_argument("--trial", type=numbers_of, metavar="N or N-M", help="this one alone, or these")
    given = parser.parse_args()
    torch.set_num_threads(1)
    print(HEAD, flush=True)
    num_violations = 0
    for fault in (fault for fault in FAULTS if fault.name in given.faults):
        numbers = range(max(1, round(given.share * fault.trials))) if given.trial is None else given.trial
        outcome = run(fault, numbers)
        num_violations += len(outcome.violations)
        print(outcome.row, flush=True)
        if outcome.is_interrupted:
            sys.exit(130)
    sys.exit(num_violations > 0)


def numbers_of(text: str) -> range:
    """Return the numbers of trials that a text like "7" or "100-299" names."""
    first, _, last = text.partition("-")
    return range(int(first), int(last or first) + 1)


if __name__ == "__main__":
    main()
