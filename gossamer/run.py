"""What all members of a program run agree on, as a script states it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from gossamer.protocol import limits
from gossamer.protocol.errors import BadManifest
from gossamer.protocol.run.layout import Shapes, by_name, layout_digest, num_chars
from gossamer.protocol.run.manifest import ProgramManifest
from gossamer.protocol.run.sections import Access

CLOCK_GAP_STEPS: Final = 1000  # steps of a small program take milliseconds, and a join seconds


@dataclass(frozen=True)
class Run:
    """A run that this program starts: its name, its length, and what its members share beside the model.

    `steps`: global steps, after which the members average and stop. `unit`: what `Swarm.step(tokens=...)` counts, such as images.
    `inner_steps`: steps between two meetings of a fragment; with "auto", each member adapts. `access`: who may join, "invite", "allowlist"
    or "open".

    `source` and `revision` are words that members see, such as the address and the commit of a repository: nothing is fetched or run by
    them. `settings` are further keys of the manifest by section, such as `{"outer": {"alpha": 0.3}, "codec": {"name": "int8"}}`. All values
    are checked by `manifest`. The same script makes the same run; a changed value is a new run.
    """

    name: str
    steps: int
    unit: str = "examples"
    inner_steps: int | str = field(default="auto", kw_only=True)
    source: str = field(default="", kw_only=True)
    revision: str = field(default="", kw_only=True)
    access: Access = field(default="invite", kw_only=True)
    settings: Mapping[str, Mapping[str, object]] = field(default_factory=dict, kw_only=True)

    def manifest(self, shapes: Shapes, base: str = "", weights: str = "") -> ProgramManifest:
        """Return the manifest of this run for a model of these trainable tensors. Raises BadManifest, with the key and the legal values.

        `base`: SHA-256 of the frozen parameters, empty without any. `weights`: that of the initial weights, if all members have them.
        """
        ordered = by_name(shapes)
        stated: dict[str, dict[str, Any]] = {
            "run": {"name": self.name, "total_steps": self.steps, "access": self.access},
            "program": {"name": self.name, "unit": self.unit, "source": self.source, "revision": self.revision, "base": base or None},
            "model": {
                "layout": layout_digest(ordered),
                "weights": weights or None,
                "shapes": dict(ordered) if num_chars(ordered) <= limits.LAYOUT_CHARS else None,
            },
            "outer": {"inner_steps": self.inner_steps},
        }
        tables: dict[str, dict[str, Any]] = {"outer": {"max_clock_gap_steps": CLOCK_GAP_STEPS}}
        for section, given in self.settings.items():
            if not isinstance(given, Mapping):
                raise BadManifest(f"settings.{section} is {given!r}, not a section", hint='give keys by section: {"outer": {"alpha": 0.3}}')
            tables[section] = tables.get(section, {}) | dict(given)
        for section, keys in stated.items():
            if again := sorted(keys.keys() & tables.get(section, {}).keys()):
                raise BadManifest(
                    f"settings state {section}.{again[0]}, which Run and the model determine", hint="leave it out of settings"
                )
            tables[section] = keys | tables.get(section, {})
        return ProgramManifest.checked(tables)
