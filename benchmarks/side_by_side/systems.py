"""The compared systems: name on the command line, name in the tables, and properties for the harness."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from benchmarks.side_by_side.training import Rival, Training
from gossamer.protocol.errors import BadSettings

ROOT = Path(__file__).parents[2]
ENVIRONMENT = Path(".venv/side_by_side")  # below ROOT
MAKE_IT = f"python3 -m venv {ENVIRONMENT} && {ENVIRONMENT}/bin/pip install -c constraints.txt -r benchmarks/side_by_side/requirements.txt"
FLOOR, GOSSAMER = "floor", "gossamer"


@dataclass(frozen=True, slots=True)
class System:
    """One row of the tables."""

    name: str
    title: str
    mb_per_step: float  # what a peer sends, about: for estimates of how long a run will take
    rival: str = ""  # its class, module:name below rivals/
    own_environment: bool = False  # its package is not among the project's
    is_exact: bool = False  # the network changes its time only, so that a run on one line tells the loss on all

    def python(self) -> str:
        """Return the interpreter with the system's packages. Raises BadSettings with the way to install it."""
        if not self.own_environment:
            return sys.executable
        python = ROOT / ENVIRONMENT / "bin/python"
        if not python.exists():
            raise BadSettings(f"{self.title} needs an environment of its own, {ENVIRONMENT}", hint=MAKE_IT)
        return str(python)

    def take_part(self, training: Training) -> Rival:
        """Create the rival of this peer, in its process."""
        module, _, name = self.rival.partition(":")
        rival: Rival = getattr(importlib.import_module(f"benchmarks.side_by_side.rivals.{module}"), name)(training)
        return rival


SYSTEMS: Mapping[str, System] = {
    system.name: system
    for system in (
        System(FLOOR, "nobody exchanges", 0.0, "alone:Alone", is_exact=True),
        System(GOSSAMER, "Gossamer", 0.06),
        System("torchft", "torchft, streaming DiLoCo", 0.52, "torchft:StreamingDiLoCo", own_environment=True),
        System("local_sgd", "local SGD, gloo", 0.52, "gloo:LocalSGD", is_exact=True),
        System("averager", "hivemind averager, fp16", 0.30, "hivemind:Averager"),
        System("optimizer", "hivemind.Optimizer, local updates, fp16", 0.32, "hivemind:LocalUpdates"),
        System("ddp", "DDP, gloo", 5.0, "gloo:DDP", is_exact=True),
    )
}
RIVALS = {name: system for name, system in SYSTEMS.items() if system.rival}
