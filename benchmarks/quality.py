"""The loss that meeting in pairs costs at a real size: eight replicas on one device, compared with averaged gradients.

The engine is that of `peer simulate`: `ddp` averages gradients at every step; `noloco` is the outer loop of real peers with the default
codec, exchanges that take one step, as often as 100 Mbit/s afford at one second per step. Both use the same text, rate and number of
steps, untuned. The number of steps is as large as the time allows, estimated from the first few steps.
"""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any, Final

from gossamer.peer.simulator.choices import scenario
from gossamer.peer.simulator.results import Result
from gossamer.peer.simulator.training import Venue, simulate
from gossamer.protocol.run.manifest import Manifest

NUM_PEERS: Final = 8
METHODS: Final[Mapping[str, Mapping[str, Any]]] = {
    "gradients averaged": {"method": "ddp"},
    "pairs": {"method": "noloco", "codec": "modulo4", "delay": Fraction(1)},
}
TRIAL_STEPS: Final = 4  # by whose time the others are counted
RATE: Final = 2e-3  # the guide's, for 125 million parameters
WARM_UP_SHARE: Final = 10  # of the steps, a tenth
EVAL_BATCHES: Final = 16
MOST_STEPS: Final = 2000
UNCUT_MB: Final = 1024.0  # simulated replicas have no tensor in two fragments
SPARE: Final = 0.9  # of the time is planned for: the first steps are no exact measure


def quality(base: Manifest, device: str, until_s: float, most_steps: int = MOST_STEPS) -> dict[str, Any] | None:
    """Train with each method for the same number of steps, until `until_s` (time.monotonic); None without enough time."""
    with tempfile.TemporaryDirectory(prefix="quality-") as folder:
        venue = Venue(Path(folder), device=device, num_eval_batches=EVAL_BATCHES)
        began_s = time.monotonic()
        step_s = sum(_trained(base, way, TRIAL_STEPS, venue).train_seconds for way in METHODS) / TRIAL_STEPS
        beside_s = time.monotonic() - began_s - TRIAL_STEPS * step_s  # models built, text read, losses measured
        steps = min(most_steps, math.floor((SPARE * (until_s - time.monotonic()) - beside_s) / step_s))
        if steps < TRIAL_STEPS:
            return None
        results = {way: _trained(base, way, steps, venue) for way in METHODS}
    ways = {way: _figures(result) for way, result in results.items()}
    return {"peers": NUM_PEERS, "steps": steps, "tokens": results["pairs"].tokens, "ways": ways, "gap": _gap(ways)}


def _trained(base: Manifest, way: str, steps: int, venue: Venue) -> Result:
    tables = base.model_dump(exclude_unset=True)
    tables["run"] = {**tables.get("run", {}), "total_steps": steps}
    tables["inner"] = {**tables.get("inner", {}), "learning_rate": RATE, "warmup_steps": steps // WARM_UP_SHARE}
    tables["fragments"] = {"max_fragment_mb": UNCUT_MB}
    made = scenario(Manifest.checked(tables), {"peers": NUM_PEERS, **METHODS[way]})
    return simulate(made, venue, lambda *_: None)


def _figures(result: Result) -> dict[str, float]:
    return {
        "loss": result.eval_loss_averaged,
        "loss_of_a_peer": result.eval_loss_mean,
        "mb_sent_per_peer": 1e-6 * result.sent_bytes,
        "bits_per_parameter_and_step": result.bits_per_step,
        "seconds": result.wall_seconds,
    }


def _gap(ways: Mapping[str, Mapping[str, float]]) -> float:
    """Return the relative difference of the pairs' loss to that of averaged gradients."""
    first, pairs = (ways[way]["loss"] for way in METHODS)
    return pairs / first - 1.0


def lines(found: Mapping[str, Any]) -> list[str]:
    """Return the figures as text."""
    rows = [f"{found['peers']} peers, {found['steps']} steps each: {'loss':>20}{'of a peer':>12}{'MB sent':>12}{'bit/param/step':>16}"]
    for way, row in found["ways"].items():
        figures = f"{row['loss']:>12.4f}{row['loss_of_a_peer']:>12.4f}{row['mb_sent_per_peer']:>12.1f}"
        rows.append(f"  {way:<34}{figures}{row['bits_per_parameter_and_step']:>16.3f}")
    return [*rows, f"  gap: {found['gap']:+.2%}"]
