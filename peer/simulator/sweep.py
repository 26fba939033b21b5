"""One simulation, or one for each combination of some settings' values."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from peer.simulator.choices import axis, grid, scenario, setting
from peer.simulator.history import Result, Row
from peer.simulator.replicas import Diverged
from peer.simulator.scenario import Scenario
from peer.simulator.training import Place, Progress, simulate
from protocol.run.manifest import Manifest

Follow = Callable[[str, Progress], None]  # called with the simulation's name


@dataclass(frozen=True, slots=True)
class Request:
    """What people ask for: a manifest, changes by name, and values to sweep over."""

    base: Manifest
    given: Mapping[str, Any]  # settings by name
    settings: Sequence[str] = ()  # NAME=VALUE
    axes: Sequence[str] = ()  # NAME=VALUE,VALUE

    @property
    def choices(self) -> dict[str, Any]:
        """Return all settings by name. Raises BadSettings for a name or value that cannot be."""
        return {**self.given, **dict(setting(text) for text in self.settings)}

    def scenario(self) -> Scenario:
        """Return the scenario without the sweep. Raises BadSettings or BadManifest."""
        return scenario(self.base, self.choices)

    def scenarios(self) -> list[tuple[dict[str, Any], Scenario]]:
        """Return each point of the sweep and its scenario. Raises as `scenario`, before anything has run."""
        return grid(self.base, self.choices, [axis(text) for text in self.axes])


def run(request: Request, place: Place, follow: Follow) -> list[Row]:
    """Run what was asked for. Raises as `simulate`; in a sweep, what diverges becomes a row."""
    points = request.scenarios()
    rows = []
    for number, (point, made) in enumerate(points, 1):
        name = f"{number}/{len(points)} {Row(point, None).name}" if point else made.manifest.outer.method
        try:
            rows.append(Row(point, _simulate(made, place, follow, name)))
        except Diverged as error:
            if not point:
                raise
            rows.append(Row(point, None, str(error)))
    return rows


def _simulate(made: Scenario, place: Place, follow: Follow, name: str) -> Result:
    return simulate(made, place, lambda progress: follow(name, progress))
