"""A few fast trials of each fault. `make faults` runs all trials; docs/concepts/faults.md describes the faults."""

from __future__ import annotations

import pytest

from tests.faults.__main__ import numbers_of
from tests.faults.faults import FAULTS
from tests.faults.suite import Fault, Played, run

PLAY = {fault.name: fault.play for fault in FAULTS}
SOME = {
    # of R7 and R13 one takes long; R1k, R4 and R18k are of real processes; R9k, R14 kill copies of this process, which a test's is not
    # made for
    "R1": range(3),
    "R2": range(5),
    "R3": range(24, 34),  # includes a corrupted sketch
    "R5": (101, 102),
    "R6": (2,),
    "R8": (3, 92),  # every clock wrong by a different amount
    "R9": range(12),
    "R15": (0,),
    "R16": (22, 121),  # a peer has all pieces of the result, and refuses it
    "R17": (21, 22),  # two of three were away for ten gaps
    "R18": range(8),  # 0: real nodes
    "R19": range(8),
    "R20": range(6),
}


@pytest.mark.parametrize(("name", "number"), [(name, number) for name, numbers in SOME.items() for number in numbers])
def test_a_trial_has_no_violation(name: str, number: int) -> None:
    PLAY[name](number)


def test_a_row_counts_the_faults_of_its_trials() -> None:
    fault = Fault("R", "a peer is away", 3, lambda number: Played(float(number), 500), "seconds", "pauses")
    assert run(fault, range(3)).row.endswith("1,500 pauses; seconds: median 1, p95 2, worst 2")


@pytest.mark.parametrize(("text", "numbers"), [("7", range(7, 8)), ("100-299", range(100, 300))])
def test_trials_are_chosen_by_their_numbers(text: str, numbers: range) -> None:
    assert numbers_of(text) == numbers


def test_an_interrupted_fault_has_the_row_of_its_trials_so_far() -> None:
    def play(number: int) -> float:
        if number == 2:
            raise KeyboardInterrupt
        return float(number)

    outcome = run(Fault("R0", "pauses", 5, play, "seconds"), range(5))
    assert outcome.is_interrupted
    assert outcome.num_trials == 2
    assert outcome.row.endswith("seconds: median 1, p95 1, worst 1")
