"""The partner records in the home: kept over restarts, private, and corrected by the operator."""

from __future__ import annotations

from pathlib import Path

import pytest

from gossamer.peer.machine.events import Event, Warned
from gossamer.peer.machine.home import Home
from gossamer.peer.node.partner_file import FILE_TOPIC, NAMED, SHUNNED_TOPIC, PartnerFile, shunned_warning
from gossamer.peer.swarm.partner_records import GOOD_PROBES, PartnerRecords
from tests.peer.neighbours import ids, somebody

GOOD, HARMFUL, *OTHERS = ids(*(somebody(number) for number in range(1, 10)))
NOW_S = 1_800_000_000.0


class Kept:
    """One start of a peer, as far as its records go."""

    def __init__(self, folder: Path) -> None:
        self.home, self.records = Home(folder), PartnerRecords()
        self.events: list[Event] = []
        self.file = PartnerFile(self.home, self.records, self.events.append)
        self.file.load()


def harmed(folder: Path) -> Kept:
    kept = Kept(folder)
    for _ in range(GOOD_PROBES):
        kept.records.merged(GOOD, NOW_S, 0.02, 0.01)
    for _ in range(5):
        kept.records.harmful(HARMFUL, NOW_S)
    kept.file.save()
    return kept


def test_records_survive_a_restart_and_are_private(tmp_path: Path) -> None:
    before = harmed(tmp_path)
    assert before.home.partners.stat().st_mode & 0o777 == 0o600
    after = Kept(tmp_path)
    assert after.records.to_bytes() == before.records.to_bytes() and not after.events
    assert not after.records.trust(GOOD).must_probe and after.records.shunned_for_good() == [HARMFUL]


def test_a_file_is_written_only_when_something_has_changed(tmp_path: Path) -> None:
    kept = harmed(tmp_path)
    kept.home.partners.unlink()
    kept.file.save()
    assert not kept.home.partners.exists()
    again = Kept(tmp_path)
    again.file.save()
    assert not again.home.partners.exists()
    kept.records.rejected(GOOD, NOW_S)
    kept.file.save()
    assert kept.home.partners.exists()


@pytest.mark.parametrize("content", [b"", b"\xff\xfe", b'{"x": 1}'])
def test_an_unreadable_file_counts_as_none_with_a_warning(tmp_path: Path, content: bytes) -> None:
    Home(tmp_path).partners.write_bytes(content)
    kept = Kept(tmp_path)
    (warned,) = kept.events
    assert isinstance(warned, Warned) and warned.topic == FILE_TOPIC and "unreadable" in warned.words
    kept.records.merged(GOOD, NOW_S, None, 0.0)
    kept.file.save()
    assert not Kept(tmp_path).events


def test_who_rests_for_good_is_warned_of_at_each_start_until_the_operator_forgives(tmp_path: Path) -> None:
    harmed(tmp_path)
    kept = Kept(tmp_path)
    kept.file.save()
    kept.file.save()
    (warned,) = kept.events
    assert isinstance(warned, Warned) and warned.topic == SHUNNED_TOPIC and HARMFUL.short() in warned.words
    kept.home.forgiven.write_text(f"{HARMFUL}\n{OTHERS[0]}\n")
    kept.file.save()
    assert kept.events[1:] == [Warned(SHUNNED_TOPIC, "")]
    assert not kept.home.forgiven.exists() and not kept.records.shunned_for_good() and kept.records.peers() == [GOOD]
    assert Kept(tmp_path).records.peers() == [GOOD]


def test_a_forgiveness_that_cannot_be_read_forgives_nobody(tmp_path: Path) -> None:
    kept = harmed(tmp_path)
    kept.home.forgiven.write_bytes(b"\xff nobody\n")
    kept.file.save()
    assert kept.records.shunned_for_good() == [HARMFUL] and not kept.home.forgiven.exists()


def test_the_warning_is_bounded() -> None:
    assert shunned_warning([]) == ""
    words = shunned_warning([GOOD, HARMFUL, *OTHERS])
    assert "and others" in words and words.count(", ") <= NAMED + 2
