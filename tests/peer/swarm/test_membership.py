"""What the home keeps of a membership."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from gossamer.peer.machine.home import Home
from gossamer.peer.swarm.membership import keep_revocations
from gossamer.protocol.identity import Identity
from gossamer.protocol.messages.revocations import Revocation, read_revocations

ISSUER = Identity(b"i" * 32)


def revocation(number: int) -> Revocation:
    return Revocation(b"r" * 32, ISSUER.peer_id, Identity(number.to_bytes(32, "big")).peer_id, number).signed(ISSUER)


def test_revocations_that_two_processes_write_at_once_are_all_kept(tmp_path: Path) -> None:
    home = Home(tmp_path)
    batches = [[revocation(10 * writer + number) for number in range(10)] for writer in range(1, 5)]

    def write(batch: list[Revocation]) -> None:
        for one in batch:
            assert keep_revocations(home, [one]) == [True]

    with ThreadPoolExecutor(len(batches)) as writers:
        list(writers.map(write, batches))
    assert set(read_revocations(home.revocations.read_bytes())) == {one for batch in batches for one in batch}
    assert keep_revocations(home, batches[0]) == [False] * 10


def test_a_damaged_file_of_revocations_costs_no_new_one(tmp_path: Path) -> None:
    home = Home(tmp_path)
    home.revocations.write_bytes(b"\xffdamaged")
    assert keep_revocations(home, [revocation(1)]) == [True]
    assert read_revocations(home.revocations.read_bytes()) == [revocation(1)]
