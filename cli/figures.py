"""Texts for the figures of a status, shared by the table, the plain lines and `peer status`."""

from __future__ import annotations

import itertools
import shutil
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gossamer.peer.machine.units import bytes_text
from gossamer.protocol.identity import short_id
from gossamer.protocol.limits import RECORD_NEWS_S

StatusObject = Mapping[str, Any]  # the object of `peer status --json`

MEETING_KINDS = ("completed", "solo", "refused", "failed")
RATE = "tok/s"
COLUMNS = ("peer", "state", "step", "loss", RATE, "meetings", "up", "down", "blocked")
LEGEND = "meetings: completed/solo/refused/failed; blocked: share of training time"

ENDED = ("left", "done", "failed")  # states in which a peer ends in order
MOST_STAGES = 8  # that are listed each by itself
BAR_CELLS = 48  # beside a name and a loss, on a terminal of 80 columns
FULL, EIGHTHS = "\u2588", ("", "\u258f", "\u258e", "\u258d", "\u258c", "\u258b", "\u258a", "\u2589")


def columns(unit: str) -> tuple[str, ...]:
    """Return the headings for peers whose training is counted in this unit."""
    return COLUMNS if unit == "tokens" else tuple(f"{unit}/s" if column == RATE else column for column in COLUMNS)


def cells(name: str, status: StatusObject) -> tuple[str, ...]:
    """Return one cell of text for each of `columns`."""
    traffic, hops = status["bytes"], status["hops"]
    return (
        name,
        str(status["state"]),
        f"{status['step']}/{status['total_steps']}",
        loss_text(status["loss"]),
        f"{status['tokens_per_second']:.0f}",
        "/".join(str(status["meetings"][kind]) for kind in MEETING_KINDS),
        bytes_text(traffic["sent"] + hops.get("sent", 0)),
        bytes_text(traffic["received"] + hops.get("received", 0)),
        share_text(status["blocked_seconds"], status["train_seconds"]),
    )


def line(name: str, status: StatusObject) -> str:
    """Return the status on one line, with the reason for the state at its end."""
    texts = dict(zip(COLUMNS, cells(name, status), strict=True))
    return (
        f"{name}: {texts['state']}, step {texts['step']}, loss {texts['loss']}, {texts[RATE]} {status['unit']}/s, "
        f"meetings {meetings_text(status['meetings'])}, up {texts['up']}, down {texts['down']}, blocked {texts['blocked']}"
        + (f" ({status['reason']})" if status["reason"] else "")
    )


def sentence(status: StatusObject, now_s: float) -> str:
    """Return the one sentence about a peer: its state, since when, why, and what would end it. `now_s`: Unix seconds."""
    return f"{status['state']} for {age_text(now_s - status['since'])}: {status['reason']}; {status['way_out']}"


def last_sentence(status: StatusObject, now_s: float) -> str:
    """Return what is known of a peer that does not run; of one that did not leave, the state in which it was killed, which has no end."""
    if status["state"] in ENDED:
        return sentence(status, now_s)
    return f"{status['state']}, {status['reason']}; it ended without leaving"


def stage_text(status: StatusObject) -> str:
    """Return which stage of the model a peer holds, and what has passed through it."""
    if not (hops := status["hops"]):
        return str(status["stage"])
    counts = {**dict(sorted(hops["outcomes"].items())), "repeated": hops["repeated"], "late": hops["late"]}
    carried = ", ".join(f"{number} {name.replace('_', ' ')}" for name, number in counts.items() if number) or "none yet"
    lanes = f"lanes: {hops['lanes_below']} below, {hops['lanes_above']} above"
    return f"{status['stage']}; micro-batches: {carried}; {lanes}; {bytes_text(hops['sent'])} up, {bytes_text(hops['received'])} down"


def holders_text(status: StatusObject) -> str:
    """Return how many peers in sight hold each stage, which stages nobody holds, and of how many nothing was heard lately."""
    holders, unheard = status["stage_holders"], status["stage_unheard"]
    for_s = f"not heard from for {RECORD_NEWS_S / 60:.0f} min"
    missing = [f"nobody of stage {number}" for number, count in enumerate(holders, 1) if not count]
    if len(holders) > MOST_STAGES:
        missing += [f"{sum(unheard)} more {for_s}"] if any(unheard) else []
        return ", ".join([f"{min(filter(None, holders), default=0)} to {max(holders)} of each of {len(holders)} stages", *missing])
    more = [f" ({count} more {for_s})" if count else "" for count in unheard]
    there = [f"{count or 'nobody'} of stage {number}" for number, count in enumerate(holders, 1)]
    return ", ".join(map("".join, itertools.zip_longest(there, more, fillvalue="")))


def lane_text(lane: Mapping[str, Any], own_stage: int) -> str:
    """Return a lane's partner, its stage, and for the stage above how fast it answers."""
    usual = "no answer yet" if lane["usual_s"] is None else f"an answer in {lane['usual_s']:.2g} s"
    counts = f"{lane['hops']} micro-batch{'es' * (lane['hops'] != 1)}, {lane['unanswered']} unanswered, window {lane['window']}"
    return f"{short_id(lane['partner'])}, stage {lane['stage']}: {counts}" + (f", {usual}" if lane["stage"] > own_stage else "")


def lanes_text(status: StatusObject) -> list[str]:
    """Return each lane in words, those to the stage below first."""
    own = int(status["stage"].split()[0])
    return [lane_text(lane, own) for lane in sorted(status["lanes"], key=lambda lane: (lane["stage"], lane["partner"]))]


def starved_text(status: StatusObject) -> str:
    """Return for which share of its time a holder of a stage had no work."""
    worked_s, starved_s = status["train_seconds"], status["starved_seconds"]
    return f"{share_text(starved_s, worked_s + starved_s)} of the time, for want of micro-batches"


def text_read(text: Mapping[str, Any]) -> str:
    """Return what was read of the operator's text, and what was not; `text` as in the status, not empty."""
    words = (
        f"{text['num_files']} {'file' if text['num_files'] == 1 else 'files'} of {text['path']}, {bytes_text(text['num_bytes'])} of text"
    )
    if not text["num_skipped"]:
        return words
    more = text["num_skipped"] - len(text["skipped"])
    return f"{words}; not read: {'; '.join(text['skipped'])}" + (f"; and {more} more" if more else "")


def meetings_text(meetings: Mapping[str, int]) -> str:
    """Return the number of completed meetings, then the other outcomes that occurred."""
    others = ", ".join(f"{meetings[kind]} {kind}" for kind in MEETING_KINDS[1:] if meetings[kind])
    return f"{meetings['completed']} ({others})" if others else str(meetings["completed"])


def loss_text(loss: float | None) -> str:
    """Return the loss in nats, or a dash where no step has been made."""
    return "-" if loss is None else f"{loss:.3f}"


def number_text(number: float) -> str:
    """Return a count with at most four digits and its unit of thousands."""
    for unit in ("", " k", " M", " G"):
        if number < 10_000:
            return f"{number:.0f}{unit}" if not unit or number >= 100 else f"{number:.1f}{unit}"
        number /= 1000
    return f"{number:.1f} T"


def age_text(seconds: float) -> str:
    """Return a duration in its one or two largest units."""
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min"
    hours, days = whole // 3600, whole // 86400
    return f"{hours} h {whole % 3600 // 60} min" if hours < 48 else f"{days} d {hours % 24} h"


def ago_text(seconds: float) -> str:
    """Return a duration in its largest unit, for a narrow column."""
    return " ".join(age_text(seconds).split()[:2])


def duration_text(seconds: float) -> str:
    """Return a duration in one unit, with one decimal place."""
    for unit, size in (("d", 86_400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.1f} s"


def share_text(part: float, whole: float) -> str:
    """Return `part` as a percentage of `whole`, or a dash where there is no whole yet."""
    return f"{100 * part / whole:.1f} %" if whole > 0 else "-"


def table_text(rows: Sequence[Sequence[str]], align: Callable[[str, int], str]) -> str:
    """Return rows as lines with aligned columns; a row may be shorter than the first. `align`: str.ljust or str.rjust.

    The columns stand close on a terminal that is too narrow for them.
    """
    widths = [max(map(len, column)) for column in itertools.zip_longest(*rows, fillvalue="")]
    is_wide = not sys.stdout.isatty() or sum(widths) + 2 * (len(widths) - 1) <= shutil.get_terminal_size().columns
    return "\n".join(("  " if is_wide else " ").join(map(align, row, widths)).rstrip() for row in rows)


def fitted(text: str, indent: int) -> str:
    """Break lines between words where stdout is a terminal that is too narrow for them; the rest of a line is indented."""
    if not sys.stdout.isatty():
        return text
    wrapper = textwrap.TextWrapper(
        shutil.get_terminal_size().columns, subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False
    )
    return "\n".join("\n".join(wrapper.wrap(line)) for line in text.split("\n"))


def bar_text(share: float, encoding: str) -> str:
    """Return a bar, of BAR_CELLS where `share` is 1, in characters that the encoding has."""
    cells, eighth = divmod(round(share * BAR_CELLS * 8), 8)
    bar = FULL * cells + EIGHTHS[eighth]
    try:
        bar.encode(encoding)
    except UnicodeEncodeError:
        return "#" * round(share * BAR_CELLS)
    return bar
