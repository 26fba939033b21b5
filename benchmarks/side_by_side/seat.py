"""`python -m benchmarks.side_by_side.seat SEAT`: the process of one peer of a rival system.

It prepares, reports that it is ready, waits for a line on stdin, trains, reports its end, and keeps its connections until stdin closes.
"""

from __future__ import annotations

import os
import sys
import traceback

import torch

from benchmarks.side_by_side.job import Seat
from benchmarks.side_by_side.systems import RIVALS
from benchmarks.side_by_side.training import Training


def main() -> None:
    """Run the process of one peer."""
    torch.set_num_threads(1)
    seat = Seat.from_text(sys.argv[1])
    training = Training(seat)
    try:
        rival = RIVALS[seat.system].take_part(training)
        training.report_state("ready")
        sys.stdin.readline()
        training.report_state("training")
        training.run(rival)
    except Exception as error:
        traceback.print_exc()
        training.report_state("failed", " ".join(f"{type(error).__name__}: {error}".split())[:200])
        sys.stderr.flush()
        os._exit(1)  # with threads of the system's own still waiting for somebody
    training.report_state("done")
    sys.stdin.read()
    rival.close()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
