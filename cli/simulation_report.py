"""The results of simulations as text, as JSON and as a picture."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from gossamer.cli.curves import save_figure
from gossamer.cli.figures import duration_text, loss_text, number_text, share_text, table_text
from gossamer.peer.machine.units import bytes_text, percent_text
from gossamer.peer.simulator.results import Average, Point, Result, Row, over_seeds, value_text
from gossamer.protocol.errors import BadSettings

if TYPE_CHECKING:
    from gossamer.peer.simulator.swarm import Spread, SwarmResult

COLUMNS = ("mean loss", "average", "spread", "bits", "sent", "meetings", "seconds")


def rows_text(rows: Sequence[Row], *, as_json: bool, origin: Mapping[str, Any] = MappingProxyType({})) -> str:
    """Return the text or JSON of one simulation, or of a sweep. `origin`: further keys of the JSON, which say what made it."""
    single = rows[0].result if not rows[0].point else None
    if single:
        return json.dumps(single.to_json() | dict(origin)) if as_json else result_text(single)
    averages = over_seeds(rows)
    if as_json:
        swept = {"sweep": [row_json(row) for row in rows]}
        return json.dumps(swept | ({"averages": [average_json(one) for one in averages]} if averages else {}) | dict(origin))
    return "\n\n".join([sweep_text(rows), *([averages_text(averages)] if averages else [])])


def result_text(result: Result) -> str:
    """Return the summary of one simulation."""
    low, high = min(result.eval_loss), max(result.eval_loss)
    others = "".join(
        f", {count} {word}" for count, word in ((result.solo, "alone"), (result.dropped, "dropped"), (result.refused, "refused")) if count
    )
    attacked = (
        f"Attackers: {result.attackers} of {result.peers} peers; {result.hostile_merged} of {result.hostile} hostile messages merged.\n"
        if result.attackers
        else ""
    )
    rate = result.tokens / result.train_seconds
    return (
        "held-out loss, nats per token\n"
        f"  mean of {len(result.eval_loss)} peers         {loss_text(result.eval_loss_mean)} ({loss_text(low)} to {loss_text(high)})\n"
        f"  average of their weights {loss_text(result.eval_loss_averaged)}\n\n"
        f"{result.method} with {result.codec}: {result.meetings} exchanges{others}; {result.bits_per_param:.2f} bits per value, "
        f"{bytes_text(result.sent_bytes)} sent per peer. Spread of the weights: {result.weight_std:.2e}.\n"
        f"{attacked}"
        f"{result.tokens} tokens, {result.virtual_steps:g} steps of virtual time. "
        f"Training took {result.train_seconds:.1f} s ({rate:.0f} tokens/s), everything {result.wall_seconds:.1f} s; "
        f"measured on {result.eval_tokens} held-out tokens."
    )


def sweep_text(rows: Sequence[Row]) -> str:
    """Return a table of all simulations, the best average first."""
    names = list(rows[0].point)
    ordered = sorted(rows, key=lambda row: row.result.eval_loss_averaged if row.result else float("inf"))
    return table_text([(*names, *COLUMNS), *map(_cells, ordered)], str.rjust)


FIGURES: Mapping[str, Callable[[Result], float]] = MappingProxyType(
    {"eval_loss_mean": lambda result: result.eval_loss_mean, "eval_loss_averaged": lambda result: result.eval_loss_averaged}
)


def averages_text(averages: Sequence[Average]) -> str:
    """Return a table of means over the seeds with standard deviations, the best average first."""
    ordered = sorted(averages, key=lambda one: one.over_seeds(FIGURES["eval_loss_averaged"])[0] if one.results else math.inf)
    names = list(averages[0].point)
    rows = [(*names, "seeds", "mean loss", "average")]
    for one in ordered:
        both = [one.over_seeds(figure) for figure in FIGURES.values()]
        texts = [f"{mean:.4f} +- {spread:.4f}" if one.results else "diverged" for mean, spread in both]
        seeds = f"{len(one.results)}" + (f" ({one.num_diverged} diverged)" if one.num_diverged else "")
        rows.append((*map(value_text, one.point.values()), seeds, *texts))
    return "over the seeds: mean +- standard deviation\n" + table_text(rows, str.rjust)


def average_json(one: Average) -> dict[str, Any]:
    """Return the means over the seeds as an object; null without a result."""
    found: dict[str, Any] = {"settings": _settings_json(one.point), "seeds": len(one.results), "diverged": one.num_diverged}
    for name, figure in FIGURES.items():
        mean, spread = one.over_seeds(figure)
        found |= {name: mean, f"{name}_std": spread} if one.results else {name: None, f"{name}_std": None}
    return found


def _settings_json(point: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value if isinstance(value, int | float) else value_text(value) for name, value in point.items()}


def _cells(row: Row) -> tuple[str, ...]:
    point = tuple(value_text(value) for value in row.point.values())
    if row.result is None:
        return (*point, "diverged")
    result = row.result
    return (
        *point,
        f"{result.eval_loss_mean:.4f}",
        f"{result.eval_loss_averaged:.4f}",
        f"{result.weight_std:.2e}",
        f"{result.bits_per_param:.2f}",
        bytes_text(result.sent_bytes),
        str(result.meetings),
        f"{result.wall_seconds:.1f}",
    )


def row_json(row: Row) -> dict[str, Any]:
    """Return one simulation of a sweep as an object: its settings, and its result or its failure."""
    return {"settings": _settings_json(row.point), **(row.result.to_json() if row.result else {"diverged": row.failure})}


def plot_rows(rows: Sequence[Row], path: Path) -> None:
    """Draw the curve of each row: loss against tokens and bytes sent, and the spread of the weights.

    Raises BadSettings when no row has a curve, or the file cannot be written.
    """
    results = {row.name: row.result for row in rows if row.result and row.result.curve}
    if not results:
        raise BadSettings(f"there is nothing to draw, so {path} was not written: no simulation came to its end", hint="lower learning_rate")
    from matplotlib.figure import Figure  # no pyplot: no windows, no global state

    figure = Figure(figsize=(13, 4.8), layout="constrained")
    by_tokens, by_bytes, spread = figure.subplots(1, 3)
    averages = {one.name: [result for result in one.results if result.curve] for one in over_seeds(rows)}
    for name, some in (averages or {name: [result] for name, result in results.items()}).items():
        for plane, along, figure_of in (
            (by_tokens, lambda point: point.tokens, lambda point: point.loss),
            (by_bytes, lambda point: point.sent_bytes / 1e6, lambda point: point.loss),
            (spread, lambda point: point.steps, lambda point: point.weight_std),
        ):
            _draw(plane, name, some, along, figure_of)
    for axes, across, upwards in (
        (by_tokens, "tokens, all peers", "held-out loss, nats per token"),
        (by_bytes, "MB sent per peer", "held-out loss, nats per token"),
        (spread, "steps at mean speed", "spread of the weights (rms)"),
    ):
        axes.set_xlabel(across)
        axes.set_ylabel(upwards)
        axes.grid(alpha=0.3)
    firsts = [result.curve[0].loss for result in results.values() if math.isfinite(result.curve[0].loss)]
    for axes in (by_tokens, by_bytes) if firsts else ():
        axes.set_ylim(top=1.05 * max(firsts))  # what diverged must not hide the rest
    figure.legend(*by_tokens.get_legend_handles_labels(), loc="outside lower center", ncols=3)
    save_figure(figure, path)


def _draw(axes: Any, name: str, results: Sequence[Result], across: Callable[[Point], float], upwards: Callable[[Point], float]) -> None:
    """Draw the mean curve of some runs, and a band of their standard deviation where there are several."""
    points = list(zip(*(result.curve for result in results), strict=False))
    if not points:
        return
    places = [statistics.fmean(map(across, some)) for some in points]
    means = [statistics.fmean(map(upwards, some)) for some in points]
    (line,) = axes.plot(places, means, label=name)
    if len(results) > 1:
        spreads = [statistics.stdev(map(upwards, some)) for some in points]
        low, high = ([mean + sign * spread for mean, spread in zip(means, spreads, strict=True)] for sign in (-1, 1))
        axes.fill_between(places, low, high, color=line.get_color(), alpha=0.2, linewidth=0)


def network_text(found: Mapping[str, Any]) -> str:
    """Return the results of `--network` as text."""
    sync, shares, slower = found["sync_seconds"], found["compute_utilization_by_method"], found["barrier_slowdown"]
    lines = [f"one exchange of {found['params']:.3g} parameters between {found['peers']} peers, {found['bits_per_param']:.2f} bits each"]
    lines += [f"  {name:<14}{sync[key]:10.2f} s" for key, name in (("gossip", "meeting"), ("ring", "ring"), ("tree", "tree"))]
    lines += [f"time left for computing, exchanging every {found['inner_steps']} steps (ddp: every step)"]
    lines += [f"  {name:<14}{share_text(share, 1.0):>10}" for name, share in shares.items()]
    lines += ["time of uneven steps with the wait for others, divided by the time without it"]
    lines += [f"  {name:<14}{slower[name]:10.2f}" for name in ("group", "pairs")]
    return "\n".join([*lines, *(run_lines(found) if "estimate" in found else ())])


def staged_network_text(found: Mapping[str, Any]) -> str:
    """Return the results of `--network --stages` as text: what each stage sends, and a row for each device and line."""
    chosen, per_token = found["activations"], found["bytes_per_token"]
    lines = [
        f"{found['params']:.3g} parameters in {found['stages']} stages of {found['stage_params']:.3g}, hidden size {found['hidden_size']}",
        f"bytes a token on hops, in {chosen}:",
        *(f"  {kind:<8}{both['sent']:8.0f} up{both['received']:9.0f} down" for kind, both in per_token[chosen].items()),
        _compared_with_whole(found),
        "",
    ]
    names = list(per_token)
    in_formats = "/".join(names)
    heads = ("device", "Mbit/s", "tokens/s", f"full use, Mbit/s: {in_formats}", f"use, %: {in_formats}")
    table: list[tuple[str, ...]] = [(*heads, f"a day up, {chosen}", "whole, up", "in stages")]
    for row in found["rows"]:
        formats = row["formats"]
        table.append(
            (
                row["device"],
                f"{row['line_mbit']:g}",
                number_text(row["tokens_per_second"]),
                "/".join(_mbit(formats[name]["full_use_mbit"]) for name in names),
                "/".join(f"{100 * formats[name]['use']:.0f}" for name in names),
                bytes_text(formats[chosen]["day_sent"]),
                bytes_text(row["whole"]["day_bytes"]),
                row["verdict"],
            )
        )
    return "\n".join([*lines, table_text(table, str.ljust)])


def _mbit(mbit: float) -> str:
    return f"{mbit:.0f}" if mbit >= 100 else f"{mbit:.3g}"


def _compared_with_whole(found: Mapping[str, Any]) -> str:
    hops, whole = max(both["sent"] for both in found["bytes_per_token"][found["activations"]].values()), found["whole_bytes_per_token"]
    return f"a peer with the whole model sends {whole:.0f} bytes a token in meetings, {hops / whole:.1f} times less than the busiest stage"


def run_lines(found: Mapping[str, Any]) -> list[str]:
    """Return estimates for a peer of a run: times and traffic on its line, and the memory and disk that it needs."""
    expects, needs = found["estimate"], found["bytes_needed"]
    rows = {
        "to join": duration_text(expects["join_s"]),
        "a meeting": duration_text(expects["meeting_s"]),
        "apart": f"{duration_text(expects['interval_s'])}, {expects['interval_steps']} steps",
        "in a day": f"{bytes_text(expects['day_bytes'])} each way, {percent_text(expects['line_share'])} of the line",
    }
    lines = ["a peer on such a line, among others like it", *(f"  {name:<14}{text}" for name, text in rows.items()), "it needs"]
    for device, name in (("cuda", "with a GPU"), ("cpu", "on a CPU")):
        sizes = ", ".join(f"{bytes_text(size)} {place.replace('_', ' ')}" for place, size in needs[device].items() if size)
        lines.append(f"  {name:<14}{sizes}")
    return lines


def swarm_text(found: SwarmResult) -> str:
    """Return the results of `--swarm` as text."""

    def figures(name: str, spread: Spread | None, unit: str, scale: float = 1.0) -> str:
        if spread is None:
            return f"  {name:<46}{'-':>9}"
        return f"  {name:<46}{spread.median / scale:>9.1f}{spread.p95 / scale:>9.1f}{spread.worst / scale:>9.1f} {unit}"

    met = ", ".join(f"{count} {word}" for word, count in sorted(found.meetings.items())) or "none"
    lines = [
        f"{found.peers} peers, {found.reachable} of which can be called; {found.virtual_s:.0f} s, {found.kills} kills",
        f"  {'':<46}{'median':>9}{'p95':>9}{'worst':>9}",
        figures("a newcomer knows 20 members, or all, after", found.know_enough_s, "s"),
        figures("a peer knows 20 of the other half again after", found.healed_s, "s"),
        figures("sent and received beside meetings", found.background_bytes_per_s, "kB/s", 1e3),
        f"sides of meetings: {met}; {found.counted_by_one} meetings count for one side alone",
        *(["violations: none"] if not found.violations else ["violations:", *(f"  {violation}" for violation in found.violations)]),
    ]
    return "\n".join(lines)
