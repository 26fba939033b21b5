"""`peer peers`: the partners of the running peer, the results of their meetings, and their records."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from typing import Annotated, Any

import typer

from gossamer.cli.figures import StatusObject, ago_text, fitted, holders_text, lanes_text, table_text
from gossamer.cli.options import DEFAULT_HOME, HomeFolder, Json
from gossamer.peer.machine.control_socket import ask
from gossamer.peer.machine.home import Home, write_whole
from gossamer.peer.machine.partners import Partner
from gossamer.peer.machine.units import bytes_text
from gossamer.peer.swarm.partner_records import PartnerRecords
from gossamer.protocol.errors import BadSettings
from gossamer.protocol.identity import PeerId, short_id

COLUMNS = ("peer", "route", "RTT", "meetings", "refused", "failed", "up", "down", "last met")

Forgive = Annotated[
    str,
    typer.Option(
        "--forgive",
        metavar="PEERID",
        help="Forget this partner's record, so that it is met again. Its whole id, or the last six characters.",
    ),
]


def peers(home: HomeFolder = DEFAULT_HOME, forgive: Forgive = "", as_json: Json = False) -> None:
    """Show the partners of the running peer: route, traffic, results of their meetings, and what their messages did to the loss."""
    folder = Home(home)
    records = records_in(folder)
    if forgive:
        partner = named(forgive, records.peers(), "partners with a record", "`peer peers --json` shows whole ids")
        kept = folder.forgiven.read_text() if folder.forgiven.exists() else ""
        write_whole(folder.forgiven, f"{kept}{partner}\n".encode())
        words = f"the record of {partner.short()} is forgotten within seconds while this peer runs, else at its next start"
        print(json.dumps({"forgiven": str(partner)}) if as_json else words)
        return
    now_s = time.time()
    rows, status = with_records(ask(folder.path, {"verb": "peers"})["peers"], records, now_s), ask(folder.path, {"verb": "status"})
    if as_json:
        keys = ("lanes", "stage_holders", "stage_unheard")
        print(json.dumps({"peers": rows} | {key: status[key] for key in keys}))
    else:
        print(fitted("\n".join([described(rows, now_s), *lanes_described(status)]), 8))


def records_in(home: Home) -> PartnerRecords:
    """Return the records of partners in a home; empty if it has none."""
    records = PartnerRecords()
    if home.partners.exists():
        records.load(home.partners.read_bytes())
    return records


def named(text: str, known: Collection[PeerId], kind: str, hint: str) -> PeerId:
    """Return the one of those `known` with this id, or whose id ends so. Raises BadSettings that names their kind."""
    found = [one for one in known if text and str(one).endswith(text)]
    if len(found) != 1:
        raise BadSettings(f"{len(found)} {kind} have an id that ends in {text!r}", hint=hint)
    return found[0]


def with_records(rows: Sequence[Mapping[str, Any]], records: PartnerRecords, now_s: float) -> list[dict[str, Any]]:
    """Return the rows, each with its partner's `record` (None: there is none), and rows for other partners that rest."""
    shown = {str(peer): record_of(records, peer, now_s) for peer in records.peers()}
    met = {row["peer_id"] for row in rows}
    resting = [
        asdict(Partner(str(peer), seen=records.get(peer).met_s))
        for peer in records.peers()
        if str(peer) not in met and records.get(peer).rests(now_s)
    ]
    return [{**row, "record": shown.get(row["peer_id"])} for row in (*rows, *resting)]


def record_of(records: PartnerRecords, peer: PeerId, now_s: float) -> dict[str, Any]:
    """Return a partner's record as a JSON-able object."""
    record = records.get(peer)
    until_s = record.rests_until_s
    return {
        "merged": record.merged,
        "probed": record.probed,
        "helped": record.helped,
        "harmed": record.harmed,
        "refused": record.refused,
        "gain": record.gain if record.probed else None,
        "is_doubtful": records.is_doubtful(peer),
        "rests": record.rests(now_s),
        "rests_until": until_s if record.rests(now_s) and until_s < math.inf else None,
        "words": record.words(),
    }


def described(rows: Sequence[Mapping[str, Any]], now_s: float) -> str:
    """Return the table, and below it the records in words."""
    records = [f"{short_id(row['peer_id'])}  {record_text(row['record'])}" for row in rows if row["record"]]
    return "\n".join([table(rows, now_s), *(["", *records] if records else [])])


def lanes_described(status: StatusObject) -> list[str]:
    """Return lines on the lanes of a peer that holds a stage, and on who holds the stages; none in a run without stages."""
    if not status["stage"]:
        return []
    holders = [f"holders: {holders_text(status)}"] if status["stage_holders"] else []
    return ["", f"this peer holds stage {status['stage']}; its lanes:", *(lanes_text(status) or ["none"]), *holders]


def record_text(record: Mapping[str, Any]) -> str:
    """Return a record as one sentence, with the end of its rest in local time."""
    until_s, words = record["rests_until"], str(record["words"])
    if record["rests"]:
        return words + (f"; rests until {time.strftime('%Y-%m-%d %H:%M', time.localtime(until_s))}" if until_s else "; rests for good")
    return words + ("; its mean gain is clearly below the others'" if record["is_doubtful"] else "")


def table(rows: Sequence[Mapping[str, Any]], now_s: float) -> str:
    """Return a heading and one line per partner, the most recently seen first."""
    if not rows:
        return "no partner yet"
    lines = (partner_cells(row, now_s) for row in sorted(rows, key=lambda row: -row["seen"]))
    return table_text([COLUMNS, *lines], str.ljust)


def partner_cells(row: Mapping[str, Any], now_s: float) -> tuple[str, ...]:
    """Return a partner's row: one text for each of COLUMNS."""
    round_trip_s = row["round_trip_s"]
    has_met = row["completed"] + row["refused"] + row["failed"] or row.get("record")  # else it was connected, and no more
    return (
        short_id(row["peer_id"]),
        row["route"] or "-",
        "-" if round_trip_s is None else f"{1000 * round_trip_s:.0f} ms",
        str(row["completed"]),
        str(row["refused"]),
        str(row["failed"]),
        bytes_text(row["sent"]),
        bytes_text(row["received"]),
        f"{ago_text(now_s - row['seen'])} ago" if has_met else "-",
    )
