"""The times at which inner steps end, with the gradients of a staged run."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction

from gossamer.peer.simulator.hostile_stages import HostileStages
from gossamer.peer.simulator.population import Population, coding
from gossamer.peer.simulator.stages import Stages


def steps(population: Population) -> Iterator[tuple[Fraction, list[int]]]:
    """Yield each time at which inner steps end, with the peers whose steps these are. In a staged run, these have their gradients.

    Raises Diverged.
    """
    stages = stages_of(population)
    for now, arrived in population.scenario.steps_at_own_rates():
        if stages is not None:
            with coding("a staged run"):
                stages.add_gradients(arrived)
        yield now, arrived


def stages_of(population: Population) -> Stages | None:
    """Return the stages of a staged run; None where there is one stage."""
    if population.scenario.manifest.num_stages == 1:
        return None
    if not population.scenario.attack:
        return Stages(population)
    return HostileStages(population)
