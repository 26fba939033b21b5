"""The page of a whole run as HTML: one rendering for all viewers. Everything that comes from other people is escaped."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from html import escape
from importlib.resources import files
from typing import Any, Final

from gossamer.cli.figures import age_text, holders_text, number_text, share_text
from gossamer.cli.page.charts import ChartLine, chart
from gossamer.cli.whole_run import CLAIMS, INSTALL, JOIN, curve_rows, join_text, last_loss_text, member_cells, member_columns, seen_text
from gossamer.peer.machine.units import bytes_text

# Beside colours.
SIGNS: Final = {
    "training": "\u25cf", "paused": "II", "joining": "\u2026", "starting": "\u2026", "finished": "\u2713", "silent": "?", "left": "\u25cb",
}  # fmt: skip
CHANGE_SIGNS: Final = {"joined": "+", "first seen": "+", "came back": "+", "left": "\u2212", "silent": "?"}
CHANGES: Final = 12
Section = tuple[str, str]  # its id, and its HTML


def page(shown: Mapping[str, Any], query: str, invite: str = "", code: str = "") -> str:
    """Return the whole page. `query`: what follows the names of its files. `invite`: its link, with its QR code as SVG."""
    template = (files("gossamer.cli.page") / "run.html").read_text()
    parts = {"NAME": escape(shown["name"]), "QUERY": escape(query), "LIVE": live(shown), "JOIN": join(shown, invite, code)}
    return re.sub(r"\{([A-Z]+)\}", lambda match: parts[match[1]], template)  # in one pass: a name may look like another's place


def live(shown: Mapping[str, Any]) -> str:
    """Return the part of the page that changes: a few sections, each with an id."""
    sections = ((name, part(shown)) for name, part in SECTIONS)
    return "".join(f'<section id="{name}" class="card">{html}</section>' for name, html in sections)


def _summary(shown: Mapping[str, Any]) -> str:
    share = min(1.0, shown["step"] / max(1, shown["total_steps"]))
    ends = f", ends in about {age_text(shown['ends'] - shown['now'])}" if shown["ends"] else ""
    words = f"step {shown['step']:,} of {shown['total_steps']:,} ({share_text(share, 1)}){ends}"
    unit, more = escape(shown["unit"]), shown["one_more_tokens_per_second"]
    losses = [loss for loss in shown["points"]["loss"] if loss is not None]
    tiles = {
        "loss, median": f"{losses[-1]:.3f}" if losses else "-",
        "members live": f"{shown['live']}",
        f"{unit} trained": number_text(shown["tokens"]),
        f"{unit} a second": number_text(shown["tokens_per_second"]) if shown["tokens_per_second"] else "-",
        **({} if shown["stage_holders"] else {"one more would add": f"{number_text(more)} /s" if more else "-"}),
        "carried" if shown["stage_holders"] else "carried in meetings": bytes_text(1e6 * shown["carried_mb"]),
    }
    return (
        f'<h1>{escape(shown["name"])}</h1><p class="purpose">{escape(shown["purpose"])}</p>'
        f'<progress max="1" value="{share:.4f}" aria-label="{escape(words)}"></progress><p class="run">{escape(words)}</p>'
        f'<p class="sentence">Loss: {escape(last_loss_text(shown))}.{_stages(shown)}</p>'
        '<dl class="tiles">' + "".join(f"<div><dt>{name}</dt><dd>{escape(value)}</dd></div>" for name, value in tiles.items()) + "</dl>"
    )


def _stages(shown: Mapping[str, Any]) -> str:
    """Return a sentence on who holds the stages; empty in a run without stages."""
    return f" Holders: {escape(holders_text(shown))}." if shown["stage_holders"] else ""


def _charts(shown: Mapping[str, Any]) -> str:
    points, now_s, unit = shown["points"], shown["now"], shown["unit"]
    loss = f"loss, {shown['loss_unit']}" if shown["loss_unit"] else "loss"
    by_step = _growing(points["step"])
    ts: Sequence[float] = points["ts"]

    def at(name: str, places: Sequence[int]) -> list[float | None]:
        return [points[name][index] for index in places]

    def ago(place: float) -> str:
        return f"{_about(now_s - place)} ago" if now_s - place >= 1 else "now"

    steps = [float(points["step"][index]) for index in by_step]
    drawn = (
        chart(
            f"{loss}, by step", steps, ChartLine("the median", at("loss", by_step), at("low", by_step), at("high", by_step)),
            number_text, "{:.2f}".format, breaks=False,
        ),
        chart(f"{loss}, by time", ts, ChartLine("the median", points["loss"], points["low"], points["high"]), ago, "{:.2f}".format),
        chart(f"{unit} trained", ts, ChartLine(unit, points["tokens"], is_count=True), ago, number_text),
        chart("members live", ts, ChartLine("members", points["members"], is_count=True), ago, "{:g}".format),
    )  # fmt: skip
    rows = list(curve_rows(points))
    table = _table("the curve of the loss", ("time", "step", "median", "range", "members"), rows) if rows else ""
    values = f"<details><summary>The curve as a table</summary>{table}</details>" if table else ""
    note = '<p class="note">The line is the median of the losses that training members publish, the band their range.</p>'
    return f'<h2>Curves</h2><div class="curves">{"".join(drawn)}</div>{note}{values}'


def _members(shown: Mapping[str, Any]) -> str:
    members = [row for row in shown["members"] if row["state"] != "left"]
    gone = len(shown["members"]) - len(members)
    largest = max([row["share"] for row in members], default=0.0) or 1.0
    strip = "".join(
        f'<li data-state="{row["state"]}"><span class="sign" aria-hidden="true">{SIGNS[row["state"]]}</span><b>{escape(row["peer"])}</b>'
        f"<span>{row['state']}</span>{_bar(row['share'] / largest)}<span>{100 * row['share']:.1f} %</span>"
        f'<span class="more">{escape(_part(row, shown["now"]))}</span></li>'
        for row in members
    )
    holders = shown["stage_holders"]
    cells = [member_cells(row, shown["now"], holders) for row in members]
    table = _table("live members", member_columns(holders), cells) if cells else ""
    left = f'<p class="note">{gone} more {"has" if gone == 1 else "have"} taken part and left.</p>' if gone else ""
    details = f"<details><summary>All figures of the live members</summary>{table}</details>" if table else ""
    return (
        f'<h2>Members <span class="count">{len(members)} live</span></h2>'
        + (f'<ul class="strip">{strip}</ul>' if strip else '<p class="empty">no member in sight</p>')
        + f'{left}<p class="note">{escape(CLAIMS)}</p>{details}'
    )


def _part(row: Mapping[str, Any], now_s: float) -> str:
    """Return which stage a member holds, if any, how many steps it says that it has made, and in what time."""
    stage = f"stage {row['stage']}" if row["stage"] else ""
    steps = "" if row["own_steps"] is None else f"{number_text(row['own_steps'])} steps"
    since = "" if row["joined"] is None else _about(now_s - row["joined"])
    part = " in ".join(filter(None, (steps, since)))
    return ", ".join(filter(None, (stage, part))) or ("no figures yet" if row["state"] == "joining" else "no credible figures")


def _about(seconds: float) -> str:
    """Return a duration in one unit, as short as a chart's axis needs it."""
    minutes = seconds / 60
    if minutes < 2:
        return f"{max(0.0, seconds):.0f} s"
    for unit, size, least in (("d", 1440, 2880), ("h", 60, 90)):
        if minutes >= least:
            return f"{minutes / size:.{int(minutes < 10 * size)}f} {unit}".replace(".0 ", " ")
    return f"{minutes:.0f} min"


def _changes(shown: Mapping[str, Any]) -> str:
    rows = "".join(
        f'<li><span class="sign" aria-hidden="true">{CHANGE_SIGNS[one["kind"]]}</span><b>{escape(one["peer"])}</b> {escape(one["kind"])} '
        f"<span>{age_text(shown['now'] - one['ts'])} ago</span></li>"
        for one in shown["changes"][:CHANGES]
    )
    seen = f'<p class="note">Seen {escape(seen_text(shown))}. Every member can show this page; another may have seen more.</p>'
    return "<h2>Joins and leaves</h2>" + (f'<ul class="changes">{rows}</ul>' if rows else '<p class="empty">none yet</p>') + seen


SECTIONS: Final = (("summary", _summary), ("curves", _charts), ("members", _members), ("changes", _changes))


def join(shown: Mapping[str, Any], invite: str, code: str) -> str:
    """Return the section on how to join, with an invite if the host shows one."""
    if not invite:
        how = join_text(shown)
        words = escape(how[:1].upper() + how[1:])
        for command in map(escape, (INSTALL, JOIN)):
            words = words.replace(command, f"<code>{command}</code>")
        return f'<section id="join" class="card"><h2>Join</h2><p>{words}.</p></section>'
    link = escape(invite)
    return (
        '<section id="join" class="card"><h2>Join</h2><ol>'
        f"<li>Get Gossamer; in its folder: <code>{escape(INSTALL)}</code></li>"
        f"<li>Copy the invite, and start: <code>{JOIN}</code></li></ol>"
        '<p class="note">Anybody who has this invite can join, until it is used up or expires.</p>'
        f'<div class="invite"><div><label for="invite">Invite</label><textarea id="invite" readonly rows="6">{link}</textarea>'
        f'<div class="buttons"><button type="button" data-copy="invite">Copy the invite</button> <a href="{link}">Open as a link</a> '
        f'<output></output></div></div><div class="code">{code}</div></div></section>'
    )


def _growing(steps: Sequence[int]) -> list[int]:
    """Return the places of steps that all later ones exceed: the places of a chart increase, and what was overstated once is left out."""
    kept: list[int] = []
    for index in reversed(range(len(steps))):
        if steps[index] > 0 and (not kept or steps[index] < steps[kept[-1]]):
            kept.append(index)
    return kept[::-1]


def _bar(share: float) -> str:
    return (
        '<svg class="share" viewBox="0 0 100 8" preserveAspectRatio="none" aria-hidden="true"><rect class="whole" width="100" height="8"/>'
        f'<rect class="part" width="{100 * min(1.0, share):.1f}" height="8"/></svg>'
    )


def _table(caption: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in columns)
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(caption)}"><table><caption>{escape(caption)}</caption>'
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )
