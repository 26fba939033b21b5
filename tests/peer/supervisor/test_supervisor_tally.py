from __future__ import annotations

from peer.supervisor.supervisor import Tally


def test_lives_add_up() -> None:
    tally = Tally()
    assert [tally.total("solo", count) for count in (1, 3)] == [1, 3]
    tally.begin_life()
    assert tally.total("solo", 0) == 3
    assert tally.total("solo", 2) == 5
    assert tally.total("completed", 1) == 1
    tally.begin_life()
    tally.begin_life()
    assert tally.total("solo", 1) == 6
    assert tally.total("completed", 0) == 1
