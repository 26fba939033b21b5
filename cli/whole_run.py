"""`peer run`: the whole run as this member sees it, from what the members sign and publish about themselves.

`run_shown` is all that a page for everybody may show: no address, no invite, and of each peer id the last six characters.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from gossamer.cli.figures import age_text, ago_text, fitted, holders_text, loss_text, number_text, share_text, table_text
from gossamer.cli.options import DEFAULT_HOME, HomeFolder, Json
from gossamer.peer.machine.control_socket import NobodyRuns, ask
from gossamer.peer.machine.held_manifest import need_manifest
from gossamer.peer.machine.home import Home
from gossamer.peer.machine.run_view import kept_view
from gossamer.peer.machine.units import bytes_text
from gossamer.protocol.identity import short_id
from gossamer.protocol.run.manifest import AnyManifest, Manifest

ANSWER_S = 3.0
MEMBER_COLUMNS: Final = ("member", "state", "share", "step", "own", "loss", "carried", "joined", "heard")
STAGE_COLUMN: Final = 2  # place of the column that staged runs have beside these
CHANGES = 8  # shown in the terminal
CURVE_ROWS = 8
CLAIMS: Final = (
    "Members sign and publish these figures themselves. A share counts a claim only as far as the run's steps allow, and a claim "
    "that is far from all others is not shown. own: steps that the member has made itself; *: the member that shows this."
)
INSTALL: Final = "python3 -m venv .venv && .venv/bin/pip install '.[all]'"  # many systems let pip install nowhere else
JOIN: Final = ".venv/bin/peer join INVITE"
_FIGURES: Final = (
    "step",
    "told",
    "live",
    "ever",
    "tokens",
    "tokens_per_second",
    "one_more_tokens_per_second",
    "carried_mb",
    "stage_holders",
    "stage_unheard",
)
_MEMBER: Final = ("is_own", "state", "stage", "step", "counted", "share", "own_steps", "loss", "joined", "heard", "carried_mb")


def whole_run(home: HomeFolder = DEFAULT_HOME, as_json: Json = False) -> None:
    """Show the whole run: its members, their shares, the loss, who came and who left.

    No peer coordinates a run, so each member shows what it has seen itself.
    """
    shown = run_shown(home)
    print(json.dumps(shown) if as_json else fitted(description(shown), 9))


def run_shown(home: Path) -> dict[str, Any]:
    """Return the public picture of the run of a home, JSON-able; of a stopped peer, as far as it has seen. Raises BadSettings."""
    folder, now_s = Home(home), time.time()
    manifest = need_manifest(folder).manifest()
    try:
        seen, runs = ask(folder.path, {"verb": "run"}, wait_s=ANSWER_S), True
    except NobodyRuns:
        seen, runs = kept_view(folder).to_json(now_s), False
    return picture(seen, manifest, runs=runs)


def picture(seen: Mapping[str, Any], manifest: AnyManifest, *, runs: bool) -> dict[str, Any]:
    """Return what is shown of a member's view of its run. Every key is named here: what is not, is not shown."""
    pace, total = seen["steps_per_second"], manifest.run.total_steps
    left_s = (total - seen["step"]) / pace if runs and pace > 0 and seen["step"] < total else None
    return {
        "name": manifest.run.name,
        "purpose": purpose(manifest),
        "run_id": manifest.run_id.hex(),
        "unit": manifest.unit,
        "loss_unit": "nats per token" if isinstance(manifest, Manifest) else "",
        "access": manifest.run.access,
        "total_steps": total,
        **{name: seen[name] for name in _FIGURES},
        "ends": seen["now"] + left_s if left_s is not None else None,
        "is_watched": runs,
        "since": seen["since"],
        "now": seen["now"],
        "members": [{"peer": short_id(row["peer_id"])} | {name: row[name] for name in _MEMBER} for row in seen["members"]],
        "changes": [{"ts": one["ts"], "peer": short_id(one["peer"]), "kind": one["kind"]} for one in seen["changes"]],
        "points": seen["points"],
    }


def purpose(manifest: AnyManifest) -> str:
    """Return what a run trains, in words, from its manifest alone; without paths of anybody's machine."""
    if not isinstance(manifest, Manifest):
        return f"trains the program {manifest.program_words}"
    model, data = manifest.model, manifest.data
    start = f"the model {model.hub}" if model.hub else f"a {model.architecture} model from random weights"
    named = data.name if data.name and not data.name.startswith(("/", "~")) else ""
    texts = {"builtin": "the built-in text", "text": "each member's own text", "mixture": f"a mixture of {len(data.mixture)} texts"}
    return f"trains {start} on {named or texts.get(data.source, 'a data set')}"


def description(shown: Mapping[str, Any]) -> str:
    """Return the picture as text."""
    parts = [f"{shown['name']}: {shown['purpose']}", "", *(f"{name:<9}{value}" for name, value in rows(shown).items()), ""]
    live = [row for row in shown["members"] if row["state"] != "left"]
    cells = [member_cells(row, shown["now"], shown["stage_holders"]) for row in live]
    parts += [table_text([member_columns(shown["stage_holders"]), *cells], str.ljust) if live else "no member in sight"]
    if shown["changes"]:
        parts += ["", *(change_text(one) for one in shown["changes"][:CHANGES])]
    if curve := list(curve_rows(shown["points"])):
        parts += ["", table_text([("time", "step", "loss", "range", "members"), *curve], str.ljust)]
    return "\n".join([*parts, "", CLAIMS])


def rows(shown: Mapping[str, Any]) -> dict[str, str]:
    """Return the figures of the run in words, by name."""
    unit, more = shown["unit"], shown["one_more_tokens_per_second"]
    rate = f"; {number_text(shown['tokens_per_second'])} {unit}/s" if shown["tokens_per_second"] else ""
    return {
        "run": progress_text(shown),
        "loss": last_loss_text(shown),
        "members": f"{shown['live']} live, {shown['ever']} ever seen",
        **({"stages": holders_text(shown)} if shown["stage_holders"] else {}),
        "trained": f"{number_text(shown['tokens'])} {unit}{rate}",
        **({"one more": f"would add about {number_text(more)} {unit}/s, as a typical member does"} if more else {}),
        "traffic": f"{bytes_text(1e6 * shown['carried_mb'])} {carried_in(shown)}",
        "seen": seen_text(shown),
        "join": join_text(shown),
        "run id": shown["run_id"],
    }


def progress_text(shown: Mapping[str, Any]) -> str:
    """Return how far the run is, and when it ends at its pace."""
    ends = f", ends in about {age_text(shown['ends'] - shown['now'])}" if shown["ends"] else ""
    return f"step {shown['step']} of {shown['total_steps']} ({share_text(shown['step'], shown['total_steps'])}){ends}"


def last_loss_text(shown: Mapping[str, Any]) -> str:
    """Return the last median of the loss, with its range."""
    points = shown["points"]
    last = next((index for index in reversed(range(len(points["ts"]))) if points["loss"][index] is not None), None)
    if last is None:
        return "no member publishes one yet"
    unit = f" {shown['loss_unit']}" if shown["loss_unit"] else ""
    low, high = points["low"][last], points["high"][last]
    spread = f", the median; {loss_text(low)} to {loss_text(high)}" if low != high else ""
    return f"{loss_text(points['loss'][last])}{unit}{spread}"


def seen_text(shown: Mapping[str, Any]) -> str:
    """Return since when, and until when, the member that shows this has watched the run."""
    if shown["since"] is None:
        return "nothing yet"
    before = "; the first part of the curve is what other members report" if shown["told"] else ""
    since = f"by this member, for {age_text(shown['now'] - shown['since'])}{before}"
    last = shown["points"]["ts"][-1:] or [shown["since"]]
    return since if shown["is_watched"] else f"{since}; it does not run now: as of {age_text(shown['now'] - last[0])} ago"


def join_text(shown: Mapping[str, Any]) -> str:
    """Return how to join the run."""
    if shown["step"] >= shown["total_steps"]:
        return "the run is over; a member can give you its model: `peer export`"
    if shown["access"] == "allowlist":
        return "only the peers on the run's list may join; `peer id` prints the id to send to its host"
    return f"ask a member for an invite; in the folder of Gossamer: {INSTALL}; {JOIN}"


def carried_in(shown: Mapping[str, Any]) -> str:
    """Return by what the bytes of a run were carried."""
    return "in meetings and with micro-batches" if shown["stage_holders"] else "in meetings"


def member_columns(stage_holders: Sequence[int]) -> tuple[str, ...]:
    """Return the headings of the members' rows; `stage_holders` is empty in a run without stages."""
    if not stage_holders:
        return MEMBER_COLUMNS
    return (*MEMBER_COLUMNS[:STAGE_COLUMN], "stage", *MEMBER_COLUMNS[STAGE_COLUMN:])


def member_cells(row: Mapping[str, Any], now_s: float, stage_holders: Sequence[int]) -> tuple[str, ...]:
    """Return a member's row: one text for each of `member_columns`."""
    carried = row["carried_mb"]
    stage = (str(row["stage"] or "-"),) if stage_holders else ()
    cells = (
        f"{row['peer']}*" if row["is_own"] else row["peer"],
        row["state"],
        f"{100 * row['share']:.1f} %",
        "-" if row["step"] is None else number_text(row["step"]),
        "-" if row["own_steps"] is None else number_text(row["own_steps"]),
        loss_text(row["loss"]),
        "-" if carried is None else bytes_text(1e6 * carried) if carried else "< 1 MB",
        "-" if row["joined"] is None else ago_text(now_s - row["joined"]),
        ago_text(now_s - row["heard"]),
    )
    return (*cells[:STAGE_COLUMN], *stage, *cells[STAGE_COLUMN:])


def change_text(one: Mapping[str, Any]) -> str:
    """Return a join or a leave on one line, in local time."""
    return f"{time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(one['ts']))}  {one['peer']}  {one['kind']}"


def curve_rows(points: Mapping[str, Sequence[Any]]) -> Iterator[tuple[str, ...]]:
    """Yield a few rows of the curve, evenly over its points, the last one among them."""
    known = [index for index, loss in enumerate(points["loss"]) if loss is not None]
    wanted = {known[round(place * (len(known) - 1) / (CURVE_ROWS - 1))] for place in range(CURVE_ROWS)} if known else set()
    last: tuple[str, ...] = ()
    for index in sorted(wanted):
        spread = f"{loss_text(points['low'][index])} to {loss_text(points['high'][index])}"
        when = time.strftime("%m-%d %H:%M", time.localtime(points["ts"][index]))
        row = when, str(points["step"][index]), loss_text(points["loss"][index]), spread, str(points["members"][index])
        if row != last:  # the first points of a run come within seconds
            yield row
        last = row
