from __future__ import annotations

import json
from dataclasses import asdict

from gossamer.cli.peers import COLUMNS, table
from gossamer.peer.machine.partners import Partner
from tests.cli.running import Running
from tests.cli.shell import Shell

ROW = Partner("12D3KooWabcdef", "direct", 0.0234, completed=3, refused=1, failed=0, sent=2_500_000, received=999, seen=1000.0)


def test_each_partner_has_one_row(shell: Shell) -> None:
    peer = Running(shell)
    peer.partners = [ROW]
    result = peer.during(lambda: shell("peers", "--json"))
    assert json.loads(result.out) == {"peers": [asdict(ROW)]}
    assert "abcdef" in peer.during(lambda: shell("peers")).out


def test_the_most_recently_seen_partner_comes_first() -> None:
    rows = [asdict(ROW), asdict(Partner("12D3KooWghijkl", seen=1060.0))]
    heading, first, second = table(rows, 1120.0).splitlines()
    assert heading.split("  ")[0].strip() == COLUMNS[0]
    assert first.split() == ["ghijkl", "-", "-", "0", "0", "0", "0", "B", "0", "B", "1", "min", "ago"]
    assert second.split() == ["abcdef", "direct", "23", "ms", "3", "1", "0", "2.5", "MB", "999", "B", "2", "min", "ago"]


def test_no_partner_yet() -> None:
    assert table([], 0.0) == "no partner yet"
