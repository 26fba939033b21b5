"""A few fast trials of each fault. `make faults` runs all trials; docs/concepts/faults.md describes the faults."""

from __future__ import annotations

import pytest

from tests.faults.faults import FAULTS

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
