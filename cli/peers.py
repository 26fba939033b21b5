"""`peer peers`: the partners of the running peer and the results of their meetings."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

from gossamer.cli.figures import age_text, bytes_text, table_text
from gossamer.cli.options import DEFAULT_HOME, HomeFolder, Json
from gossamer.peer.machine.control_socket import ask
from gossamer.peer.machine.home import Home

COLUMNS = ("peer", "route", "round trip", "meetings", "refused", "failed", "up", "down", "last seen")


def peers(home: HomeFolder = DEFAULT_HOME, as_json: Json = False) -> None:
    """Show the partners of the running peer: route, traffic, and results of their meetings."""
    answer = ask(Home(home).path, {"verb": "peers"})
    print(json.dumps(answer) if as_json else table(answer["peers"], time.time()))


def table(rows: Sequence[Mapping[str, Any]], now_s: float) -> str:
    """Return a heading and one line per partner, the most recently seen first."""
    if not rows:
        return "no partner yet"
    lines = (partner_cells(row, now_s) for row in sorted(rows, key=lambda row: -row["seen"]))
    return table_text([COLUMNS, *lines], str.ljust)


def partner_cells(row: Mapping[str, Any], now_s: float) -> tuple[str, ...]:
    """Return a partner's row: one text for each of COLUMNS."""
    round_trip_s = row["round_trip_s"]
    return (
        row["peer_id"][-6:],
        row["route"] or "-",
        "-" if round_trip_s is None else f"{1000 * round_trip_s:.0f} ms",
        str(row["completed"]),
        str(row["refused"]),
        str(row["failed"]),
        bytes_text(row["sent"]),
        bytes_text(row["received"]),
        f"{age_text(now_s - row['seen'])} ago",
    )
