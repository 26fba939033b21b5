from __future__ import annotations

import json
import time
from dataclasses import asdict, replace

from gossamer.cli.peers import COLUMNS, table
from gossamer.peer.machine.home import Home
from gossamer.peer.machine.partners import Partner
from gossamer.peer.node.partner_file import forgiven
from gossamer.peer.swarm.partner_records import PartnerRecords
from tests.cli.running import Running
from tests.cli.shell import Shell
from tests.peer.neighbours import ids, somebody

ROW = Partner("12D3KooWabcdef", "direct", 0.0234, completed=3, refused=1, failed=0, sent=2_500_000, received=999, seen=1000.0)


def test_each_partner_has_one_row(shell: Shell) -> None:
    peer = Running(shell)
    peer.partners = [ROW]
    result = peer.during(lambda: shell("peers", "--json"))
    assert json.loads(result.out) == {"peers": [asdict(ROW) | {"record": None}], "lanes": [], "stage_holders": [], "stage_unheard": []}
    assert "abcdef" in peer.during(lambda: shell("peers")).out


def test_the_lanes_of_a_staged_run_stand_below_the_partners(shell: Shell) -> None:
    peer = Running(shell)
    lane = {"partner": "12D3KooWabcdef", "stage": 3, "hops": 9, "unanswered": 2, "window": 4, "usual_s": 1.5}
    peer.status = replace(peer.status, stage="2 of 3", lanes=[lane], stage_holders=[0, 1, 1])
    text = peer.during(lambda: shell("peers")).out
    assert "this peer holds stage 2 of 3; its lanes:" in text
    assert "abcdef, stage 3: 9 micro-batches, 2 unanswered, window 4, an answer in 1.5 s" in text
    assert "holders: nobody of stage 1, 1 of stage 2, 1 of stage 3" in text
    shown = json.loads(peer.during(lambda: shell("peers", "--json")).out)
    assert shown["lanes"] == [lane] and shown["stage_holders"] == [0, 1, 1]


def test_the_most_recently_seen_partner_comes_first() -> None:
    rows = [asdict(ROW), asdict(Partner("12D3KooWghijkl", refused=1, seen=1060.0)), asdict(Partner("12D3KooWmnopqr", "direct", seen=900.0))]
    heading, first, second, connected = table(rows, 1120.0).splitlines()
    assert heading.split("  ")[0].strip() == COLUMNS[0]
    assert first.split() == ["ghijkl", "-", "-", "0", "1", "0", "0", "B", "0", "B", "1", "min", "ago"]
    assert second.split() == ["abcdef", "direct", "23", "ms", "3", "1", "0", "2.5", "MB", "999", "B", "2", "min", "ago"]
    assert connected.split()[-1] == "-", "it has not met"


def test_the_table_fits_into_80_columns() -> None:
    row = Partner("12D3KooWabcdef", "relayed", 0.999, 12345, 999, 99, 99_900_000, 99_900_000, seen=1000.0)
    assert max(map(len, table([asdict(row)], 1000.0 + 47.9 * 3600).splitlines())) <= 80


def test_no_partner_yet() -> None:
    assert table([], 0.0) == "no partner yet"


GOOD, HARMFUL, AWAY = ids(*(somebody(number) for number in (1, 2, 3)))


def with_records(shell: Shell) -> Running:
    """A peer with a good partner, one that rests for good, and one that rests and was not seen in this start."""
    records, now_s = PartnerRecords(), time.time()
    for _ in range(9):
        records.merged(GOOD, now_s, 0.02, 0.01)
    for _ in range(5):
        records.harmful(HARMFUL, now_s)
    for _ in range(3):
        records.harmful(AWAY, now_s - 60.0)
    shell("id")  # makes the home
    Home(shell.home).partners.write_bytes(records.to_bytes())
    peer = Running(shell)
    peer.partners = [Partner(str(GOOD), completed=9), Partner(str(HARMFUL), failed=5)]
    return peer


def test_records_are_shown_in_words(shell: Shell) -> None:
    peer = with_records(shell)
    result = peer.during(lambda: shell("peers")).out.splitlines()
    good, harmful, away = result[-3:]
    assert good == f"{GOOD.short()}  9 merged, probed 9 times: 9 helped, 0 harmed"
    assert harmful == f"{HARMFUL.short()}  0 merged, not probed yet; 5 refused as harmful; rests for good"
    assert away.startswith(f"{AWAY.short()}  0 merged, not probed yet; 3 refused as harmful; rests until 2")
    rows = json.loads(peer.during(lambda: shell("peers", "--json")).out)["peers"]
    assert [row["record"]["refused"] for row in rows] == [0, 5, 3]
    assert [row["record"]["rests"] for row in rows] == [False, True, True]
    assert rows[1]["record"]["rests_until"] is None and rows[2]["record"]["rests_until"] > time.time()


def test_a_partner_is_forgiven_by_its_id_or_the_end_of_it(shell: Shell) -> None:
    with_records(shell)
    assert HARMFUL.short() in shell("peers", "--forgive", HARMFUL.short()).out
    assert json.loads(shell("peers", "--forgive", str(AWAY), "--json").out) == {"forgiven": str(AWAY)}
    assert forgiven(Home(shell.home)) == [HARMFUL, AWAY]
    result = shell("peers", "--forgive", "nobody")
    assert result.code == 2 and "0 partners" in result.err
