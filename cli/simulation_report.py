"""The results of simulations as text, as JSON and as a picture."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gossamer.cli.curves import save_figure
from gossamer.cli.figures import bytes_text, duration_text, loss_text, share_text, table_text
from gossamer.peer.simulator.results import Result, Row, value_text
from gossamer.protocol.errors import BadSettings

if TYPE_CHECKING:
    from gossamer.peer.simulator.swarm import Spread, SwarmResult

COLUMNS = ("mean loss", "average", "spread", "bits", "sent", "meetings", "seconds")


def rows_text(rows: Sequence[Row], *, as_json: bool) -> str:
    """Return the text or JSON of one simulation, or of a sweep."""
    single = rows[0].result if not rows[0].point else None
    if single:
        return json.dumps(single.to_json()) if as_json else result_text(single)
    return json.dumps({"sweep": [row_json(row) for row in rows]}) if as_json else sweep_text(rows)


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
        f"Training took {result.train_seconds:.1f} s ({rate:.0f} tokens/s), everything {result.wall_seconds:.1f} s."
    )


def sweep_text(rows: Sequence[Row]) -> str:
    """Return a table of all simulations, the best average first."""
    names = list(rows[0].point)
    ordered = sorted(rows, key=lambda row: row.result.eval_loss_averaged if row.result else float("inf"))
    return table_text([(*names, *COLUMNS), *map(_cells, ordered)], str.rjust)


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
    settings = {name: value if isinstance(value, int | float) else value_text(value) for name, value in row.point.items()}
    return {"settings": settings, **(row.result.to_json() if row.result else {"diverged": row.failure})}


def plot_rows(rows: Iterable[Row], path: Path) -> None:
    """Draw the curve of each row: loss against tokens and bytes sent, and the spread of the weights.

    Raises BadSettings when no row has a curve, or the file cannot be written.
    """
    results = {row.name: row.result for row in rows if row.result and row.result.curve}
    if not results:
        raise BadSettings(f"there is nothing to draw, so {path} was not written: no simulation came to its end", hint="lower learning_rate")
    from matplotlib.figure import Figure  # no pyplot: no windows, no global state

    figure = Figure(figsize=(13, 4.8), layout="constrained")
    by_tokens, by_bytes, spread = figure.subplots(1, 3)
    for name, result in results.items():
        losses = [point.loss for point in result.curve]
        by_tokens.plot([point.tokens for point in result.curve], losses, label=name)
        by_bytes.plot([point.sent_bytes / 1e6 for point in result.curve], losses, label=name)
        spread.plot([point.steps for point in result.curve], [point.weight_std for point in result.curve], label=name)
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


def network_text(found: Mapping[str, Any]) -> str:
    """Return the results of `--network` as text."""
    sync, shares, slower = found["sync_seconds"], found["compute_utilization_by_method"], found["barrier_slowdown"]
    lines = [f"one exchange of {found['params']:.3g} parameters between {found['peers']} peers, {found['bits_per_param']:.2f} bits each"]
    lines += [f"  {name:<14}{sync[key]:10.2f} s" for key, name in (("gossip", "meeting"), ("ring", "ring"), ("tree", "tree"))]
    lines += [f"time left for computing, exchanging every {found['inner_steps']} steps (ddp: every step)"]
    lines += [f"  {name:<14}{share_text(share, 1.0):>10}" for name, share in shares.items()]
    lines += ["time that uneven steps take, waiting for others, over what they take by themselves"]
    lines += [f"  {name:<14}{slower[name]:10.2f}" for name in ("group", "pairs")]
    return "\n".join([*lines, *(run_lines(found) if "estimate" in found else ())])


def run_lines(found: Mapping[str, Any]) -> list[str]:
    """Return estimates for a peer of a run: times and traffic on its line, and the memory and disk that it needs."""
    expects, needs = found["estimate"], found["bytes_needed"]
    rows = {
        "to join": duration_text(expects["join_s"]),
        "a meeting": duration_text(expects["meeting_s"]),
        "apart": f"{duration_text(expects['interval_s'])}, {expects['interval_steps']} steps",
        "in a day": f"{bytes_text(expects['day_bytes'])} each way, {expects['line_share']:.0%} of the line",
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
            return f"  {name:<46}{'-':>10}"
        return f"  {name:<46}{spread.median / scale:>10.1f}{spread.p95 / scale:>10.1f}{spread.worst / scale:>10.1f} {unit}"

    met = ", ".join(f"{count} {word}" for word, count in sorted(found.meetings.items())) or "none"
    lines = [
        f"{found.peers} peers, {found.reachable} of which can be called; {found.virtual_s:.0f} s, {found.kills} kills",
        f"  {'':<46}{'median':>10}{'p95':>10}{'worst':>10}",
        figures("a newcomer knows 20 members, or all, after", found.know_enough_s, "s"),
        figures("a peer knows 20 of the other half again after", found.healed_s, "s"),
        figures("sent and received beside meetings", found.background_bytes_per_s, "kB/s", 1e3),
        f"sides of meetings: {met}; {found.counted_by_one} meetings count for one side alone",
        *(["violations: none"] if not found.violations else ["violations:", *(f"  {violation}" for violation in found.violations)]),
    ]
    return "\n".join(lines)
