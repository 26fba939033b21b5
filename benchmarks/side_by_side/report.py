"""The tables, as Markdown: one per fault, a row per system and line, each figure the mean over the seeds."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from benchmarks.side_by_side.results import Run, Setting
from benchmarks.side_by_side.systems import FLOOR, SYSTEMS

TITLES = {
    "none": "No fault",
    "kill": "The last peer killed half-way (kill -9, all its processes)",
    "slow": "The last peer slow: an eighth of a processor",
    "cut": "The last peer's line cut half-way, without a word",
}
MAX_WORDS = 80
NOTEWORTHY = ("gated", "refused", "misbehaved", "failed", "abandoned", "solo")  # of the outcomes of meetings
NOTES = """\
Wall: from all peers ready (of Gossamer: from the first inner step of the first peer) to the end of the last; `~`: the rate of a part of the
run, multiplied up. Loss: nats per byte on the held-out batches of `peer eval`; `*`: of the run without a limit, since the network does not
touch this system's arithmetic. MB: the interface's own count, a peer's mean. CPU: of all processes of a peer, over its own inner steps."""


@dataclass(frozen=True, slots=True)
class Row:
    """The runs of one row, which differ only in their seed."""

    runs: tuple[Run, ...]
    plain: tuple[Run, ...]  # of the same system, length and line, without a fault
    unlimited: tuple[Run, ...]  # and without a limit
    floor: tuple[Run, ...]  # nobody exchanges, on any line

    @property
    def setting(self) -> Setting:
        """Return what they have in common, with the seed of the first."""
        return self.runs[0].setting


Column = tuple[str, Callable[[Row], str]]


def table(fault: str, wanted: Sequence[Run], known: Mapping[Setting, Run]) -> str:
    """Return one table. `known` are all runs: a figure may be compared with a run outside the table."""
    rows = [row(runs, known.values()) for runs in grouped(wanted)]
    columns = FAULTLESS if fault == "none" else FAULTY
    lines = [f"## {TITLES[fault]}", "", "| " + " | ".join(title for title, _ in columns) + " |", "|---" * len(columns) + "|"]
    lines += ["| " + " | ".join(show(one) for _, show in columns) + " |" for one in rows]
    return "\n".join([*lines, "", NOTES, ""]) if rows else f"## {TITLES[fault]}\n\nno runs yet\n"


def grouped(runs: Iterable[Run]) -> list[list[Run]]:
    """Group runs that differ only in their seed, by line and length, then in the order of the systems."""
    groups: dict[Setting, list[Run]] = {}
    for run in runs:
        groups.setdefault(replace(run.setting, seed=0), []).append(run)
    order = list(SYSTEMS)
    return [
        groups[one] for one in sorted(groups, key=lambda one: (-(one.mbit_per_s or math.inf), one.total_steps, order.index(one.system)))
    ]


def row(runs: Sequence[Run], known: Iterable[Run]) -> Row:
    """Find what a row is compared with."""
    others = [(replace(run.setting, seed=0), run) for run in known]
    plain = replace(runs[0].setting, seed=0, fault="none")

    def like(wanted: Setting) -> tuple[Run, ...]:
        return tuple(run for setting, run in others if setting == wanted)

    floor = Setting(FLOOR, 0.0, "none", plain.total_steps, 0, plain.num_peers, plain.every_steps)
    on_any_line = tuple(run for setting, run in others if replace(setting, mbit_per_s=0.0) == floor)
    return Row(tuple(runs), like(plain), like(replace(plain, mbit_per_s=0.0)), on_any_line)


def mean(values: Iterable[float], digits: int) -> str:
    """Return the mean, with its standard error if there are several values."""
    several = list(values)
    if not several or any(math.isnan(value) for value in several):
        return "-"
    text = f"{statistics.fmean(several):.{digits}f}"
    return f"{text} +- {statistics.stdev(several) / math.sqrt(len(several)):.{digits}f}" if len(several) > 1 else text


def line_text(row: Row) -> str:
    """Return the name of a line."""
    rate = row.setting.mbit_per_s
    return f"{rate:g} Mbit/s" if rate else "unshaped"


def name_text(row: Row) -> str:
    """Return the name of a system with its unusual settings."""
    setting, more = row.setting, ""
    if setting.total_steps != 300:
        more += f", {setting.total_steps} steps"
    if setting.num_peers != 4:
        more += f", {setting.num_peers} peers"
    if setting.gossamer_every:
        more += f", every {setting.gossamer_every}"
    elif setting.every_steps != 10 and setting.system not in (FLOOR, "gossamer", "ddp"):
        more += f", every {setting.every_steps}"
    return SYSTEMS[setting.system].title + more


def wall_text(row: Row) -> str:
    """Return the wall time."""
    guessed = "~" if any(run.outcome == "stopped" for run in row.runs) else ""
    return guessed + mean((run.full_wall_s for run in row.runs), 0)


def over_floor_text(row: Row) -> str:
    """Return the wall time as a multiple of that without exchange."""
    floor_s = statistics.fmean(run.full_wall_s for run in row.floor) if row.floor else math.nan
    return mean([statistics.fmean(run.full_wall_s for run in row.runs) / floor_s], 2)


def cpu_text(row: Row) -> str:
    """Return processor seconds per own inner step, and as a multiple of those without exchange."""
    own = [run.cpu_per_step for run in row.runs]
    more = f" ({statistics.fmean(own) / statistics.fmean(run.cpu_per_step for run in row.floor):.2f})" if row.floor else ""
    return mean(own, 3) + more


def loss_text(row: Row) -> str:
    """Return the loss of the average of the weights; of an exact system that was stopped, that of its run without a limit."""
    own = [run.loss_average for run in row.runs if run.loss_average is not None]
    if own or not SYSTEMS[row.setting.system].is_exact:
        return mean(own, 3)
    whole = [run.loss_average for run in row.unlimited if run.loss_average is not None]
    return mean(whole, 3) + "*" if whole else "-"


def peers_text(row: Row) -> str:
    """Return the lowest and the highest loss of a peer."""
    losses = [loss for run in row.runs for loss in run.losses if loss is not None]
    if not losses:
        return "-"
    lowest, highest = f"{min(losses):.3f}", f"{max(losses):.3f}"
    return "all the same" if highest == lowest and len(row.runs) == 1 else f"{lowest} to {highest}"


def steps_text(row: Row) -> str:
    """Return the share of all steps that was made, or the steps of each peer if some made far fewer."""
    if len(row.runs) == 1 and row.setting.fault != "none":
        return ", ".join(map(str, row.runs[0].own_steps))
    made = [sum(run.own_steps) / (run.setting.total_steps * run.setting.num_peers) for run in row.runs]
    return f"{100 * statistics.fmean(made):.0f} %"


def outcome_text(row: Row) -> str:
    """Return how the runs ended."""
    outcomes = list(dict.fromkeys(run.outcome for run in row.runs))
    return "; ".join(short(outcome) for outcome in outcomes)


def short(outcome: str) -> str:
    """Shorten an error for a table: without its source location, cut to length."""
    words = re.sub(r"\[/[^]]*\] ?", "", outcome).replace("|", "/")
    return words if len(words) <= MAX_WORDS else words[: MAX_WORDS - 3] + "..."


def remarks_text(row: Row) -> str:
    """Return remarks on the runs: an early end, and failures of meetings and joins."""
    ended = [] if outcome_text(row) in ("finished", "stopped") else [outcome_text(row)]
    return ", ".join([*ended, meetings_text(row)]).rstrip(", ")


def meetings_text(row: Row) -> str:
    """Return the failures of Gossamer's meetings and joins."""
    words = []
    for kind in NOTEWORTHY:
        if number := sum(run.meetings.get(kind, 0) for run in row.runs):
            words.append(f"{number} {kind}")
    if number := sum(run.transfers for run in row.runs):
        words.append(f"{number} state transfers")
    if (late_s := max(run.all_training_s for run in row.runs)) > 1.0:
        words.append(f"all train after {late_s:.0f} s")
    return ", ".join(words)


def fast_blocked_text(row: Row) -> str:
    """Return the share of blocked time of the peers without a fault."""
    shares = [sum(run.blocked_s[:-1]) / max(1e-9, sum(run.train_s[:-1])) for run in row.runs]
    return mean((100 * share for share in shares), 0)


def pause_text(row: Row) -> str:
    """Return the longest pause of the peers without a fault, before and after it."""
    return f"{mean((run.pause_s[0] for run in row.runs), 1)} / {mean((run.pause_s[1] for run in row.runs), 1)}"


def plain_wall_text(row: Row) -> str:
    """Return the wall time without the fault."""
    return wall_text(replace(row, runs=row.plain)) if row.plain else "-"


def trained_text(row: Row) -> str:
    """Return the time of the last inner step of the peers without a fault."""
    return mean((max(run.trained_s[:-1]) for run in row.runs), 0)


def held_text(row: Row) -> str:
    """Return the longest time from a peer's last inner step to its end: the last exchange, the last evaluation, and waiting for others."""
    healthy = slice(None) if row.setting.fault == "none" else slice(None, -1)
    held = [[done - trained for done, trained in zip(run.done_s[healthy], run.trained_s[healthy], strict=True) if done] for run in row.runs]
    return mean((max(several) for several in held if several), 1)


def plain_loss_text(row: Row) -> str:
    """Return the loss without the fault."""
    return loss_text(replace(row, runs=row.plain)) if row.plain else "-"


FAULTLESS: tuple[Column, ...] = (
    ("line", line_text),
    ("system", name_text),
    ("wall s", wall_text),
    ("of the floor", over_floor_text),
    ("blocked %", lambda row: mean((100 * run.blocked for run in row.runs), 1)),
    ("MB sent per peer", lambda row: mean((run.sent for run in row.runs), 1)),
    ("CPU s per own step (of the floor)", cpu_text),
    ("loss of the average", loss_text),
    ("of each peer", peers_text),
    ("steps made", steps_text),
    ("last step to end, s", held_text),
    ("remarks", remarks_text),
)
FAULTY: tuple[Column, ...] = (
    ("line", line_text),
    ("system", name_text),
    ("outcome", outcome_text),
    ("wall s (without the fault)", lambda row: f"{wall_text(row)} ({plain_wall_text(row)})"),
    ("the others' last step at s", trained_text),
    ("from there to their end, s", held_text),
    ("longest pause of the others, s, before / after", pause_text),
    ("the others blocked %", fast_blocked_text),
    ("loss of the average (without)", lambda row: f"{loss_text(row)} ({plain_loss_text(row)})"),
    ("own steps", steps_text),
    ("remarks", meetings_text),
)
