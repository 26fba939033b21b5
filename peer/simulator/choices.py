"""Settings by name, as the command line gives them, and the scenarios that they make of a manifest.

A name is a key of the manifest's sections `inner`, `outer` or `fragments`, a property of the scenario, or `codec`, `method`, `steps`,
`seed`. A setting that nobody chose has the value of the method's paper.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import product
from typing import Any, Final

from gossamer.optim.codecs import CODECS
from gossamer.optim.inner import OPTIMIZERS
from gossamer.peer.model.model import parameter_shapes
from gossamer.peer.model.plan import fragment_codecs, model_plan
from gossamer.peer.model.stages import manifest_cuts
from gossamer.peer.simulator.methods import METHODS, OF_SOME_METHODS, method
from gossamer.peer.simulator.scenario import NUM_PEERS, Scenario, known
from gossamer.peer.trainer.interval import afforded_steps
from gossamer.protocol.errors import BadSettings
from gossamer.protocol.run.manifest import Manifest, StagedManifest
from gossamer.protocol.run.sections import FragmentsSection, InnerSection, OuterSection, Section


def _speeds(text: str) -> tuple[Fraction, ...]:
    return tuple(Fraction(part.strip()) for part in text.replace(":", ",").split(","))


# Name on the command line: section and key of the manifest.
SECTIONS: Final[dict[str, type[Section]]] = {"inner": InnerSection, "outer": OuterSection, "fragments": FragmentsSection}
MANIFEST_NAMES: Final[dict[str, tuple[str, str]]] = {
    **{key: (name, key) for name, section in SECTIONS.items() for key in section.model_fields},
    "stages": ("stages", "count"),
    "micro_batch": ("stages", "micro_batch"),
    "activations": ("stages", "activations"),
    "codec": ("codec", "name"),
    "method": ("outer", "method"),
    "steps": ("run", "total_steps"),
    "seed": ("run", "seed"),
}
# Name on the command line: field of the scenario, how it is read, and what it should be.
NUMBERS: Final = ("line_mbit", "step_s", "drop_out", "skew", "keep_local", "feedback", "clip", "staleness_penalty")
SCENARIO_NAMES: Final[dict[str, tuple[str, Callable[[str], Any], str]]] = {
    "peers": ("num_peers", int, "a whole number"),
    "delay": ("delay_steps", Fraction, "a number"),
    "speeds": ("speeds", _speeds, "numbers with : or , between them, like 4:1"),
    "matching": ("matching", str, "text"),
    "attack": ("attack", str, "text"),
    "attackers": ("attackers", int, "a whole number"),
    "routing": ("routing", str, "text"),
    "hop_delay": ("hop_delay", int, "a whole number"),
    "attack_stage": ("attack_stage", int, "a whole number"),
    "hop_checks": ("hop_checks", str, "text"),
    "attack_from": ("attack_from", Fraction, "a number"),
    "token_weights": ("token_weights", {"true": True, "false": False}.__getitem__, "true or false"),
    **{name: (name, float, "a number") for name in NUMBERS},
}


OF_STAGES: Final = ("micro_batch", "activations", "routing", "hop_delay", "attack_stage", "hop_checks")  # settings of staged runs alone
OF_ATTACKS: Final = ("attack_from", "attack_stage", "hop_checks")
OF_LINES: Final = {"line_mbit": "--bandwidth", "step_s": "--step-seconds"}  # settings that only an interval which finds itself uses


@dataclass(frozen=True, slots=True)
class SimulationRequest:
    """A request: a manifest, changed settings by name, and values to sweep over."""

    base: Manifest
    given: Mapping[str, Any]  # settings by name
    settings: Sequence[str] = ()  # NAME=VALUE
    axes: Sequence[str] = ()  # NAME=VALUE,VALUE

    def scenarios(self) -> list[tuple[dict[str, Any], Scenario]]:
        """Return every combination of the axes' values with its scenario; without axes, one.

        Raises as `scenario`, and BadSettings for a setting that is given twice.
        """
        settings, swept = [setting(text) for text in self.settings], [axis(text) for text in self.axes]
        names = [*self.given, *(name for name, _ in settings), *(name for name, _ in swept)]
        if twice := [name for name in names if names.count(name) > 1]:
            raise BadSettings(f"{twice[0]} is given twice", hint="give it once: as an option, with --set or with --sweep")
        choices, axes = {**self.given, **dict(settings)}, dict(swept)
        points = [dict(zip(axes, values, strict=True)) for values in product(*axes.values())]
        return [(point, scenario(self.base, {**choices, **point})) for point in points]

    def need_effects(self, points: Sequence[tuple[Mapping[str, Any], Scenario]]) -> None:
        """Raise BadSettings for a given setting that none of the scenarios of `scenarios` uses in training."""
        for name in (*self.given, *(setting(text)[0] for text in self.settings), *points[0][0]):
            reasons = [reason for _, made in points if (reason := _unused(name, made))]
            if len(reasons) == len(points):
                why, way_out = reasons[0]
                raise BadSettings(f"{OF_LINES.get(name, name)} has no effect {why}", hint=f"{way_out}, or leave it out")


def _unused(name: str, made: Scenario) -> tuple[str, str] | None:
    """Return why a scenario does not use a setting, and the way out; None if it does."""
    outer = made.manifest.outer
    chosen = method(outer.method)
    if name in OF_STAGES and made.manifest.num_stages == 1:
        return "without stages", "add --stages 2"
    if name in OF_ATTACKS and not made.attack:
        return "without an attack", "add --attack NAME --attackers N"
    if name in OF_LINES and not (outer.inner_steps == "auto" and chosen.at_own_rate):
        return "on a fixed interval", "add --inner-steps auto, and method noloco"
    if name in OF_SOME_METHODS and name not in chosen.uses:
        return f"with method {outer.method}", f"choose method {' or '.join(other for other, row in METHODS.items() if name in row.uses)}"
    return None


def scenario(base: Manifest, choices: Mapping[str, Any]) -> Scenario:
    """Return the scenario of a manifest with changed settings. Raises BadSettings or BadManifest for impossible settings.

    A method other than the manifest's uses its own defaults: the manifest's settings are for another method.
    """
    name = str(choices.get("method", base.outer.method))
    chosen = method(name)
    defaults = chosen.defaults(int(choices.get("peers", NUM_PEERS)))
    tables = base.model_dump(exclude_unset=True)
    for known_name, (section, key) in MANIFEST_NAMES.items():
        if section == "stages" and known_name not in choices:
            continue  # a run without stages has no such table
        table = tables.setdefault(section, {})
        if known_name in choices:
            table[key] = choices[known_name]
        elif known_name in defaults and (key not in table or (section != "fragments" and name != base.outer.method)):
            table[key] = defaults[known_name]
    if tables.get("stages", {}).get("count", 1) == 1:
        tables.pop("stages", None)
    manifest = Manifest.checked(tables)
    known(manifest.codec.name, CODECS, "codec")
    known(manifest.inner.optimizer, OPTIMIZERS, "inner optimizer")
    mine = {**defaults, **choices}
    made = Scenario(manifest, **{field: mine[key] for key, (field, _, _) in SCENARIO_NAMES.items() if key in mine})
    if manifest.outer.inner_steps == "auto" and chosen.at_own_rate:
        codecs = fragment_codecs(manifest, parameter_shapes(manifest.model))
        round_bytes = model_plan(codecs, manifest.outer.alpha).round_bytes
        made = replace(made, auto_steps=afforded_steps(round_bytes, made.line_mbit * 1e6 / 8, made.step_s))
    if isinstance(manifest, StagedManifest):
        if not chosen.at_own_rate:
            raise BadSettings(f"method {name} cannot train a staged run", hint="choose noloco or local, or leave --stages out")
        manifest_cuts(manifest)  # refuse a model that cannot be cut now
    if made.attack and "attack" not in chosen.uses:
        raise BadSettings(f"--attack has no effect with method {name}", hint="peers of method noloco meet in pairs and can be attacked")
    chosen.train(made, 1)  # refuse a method's bad settings now, not after the model is built
    return made


def setting(text: str) -> tuple[str, Any]:
    """Read NAME=VALUE. Raises BadSettings."""
    name, values = axis(text)
    if len(values) != 1:
        raise BadSettings(f"{text!r} gives {name} {len(values)} values", hint="use --sweep to try several")
    return name, values[0]


def axis(text: str) -> tuple[str, list[Any]]:
    """Read NAME=VALUE,VALUE,... Raises BadSettings."""
    name, found, values = text.partition("=")
    if not found or not all(value.strip() for value in values.split(",")):
        raise BadSettings(f"{text!r} is not of the form NAME=VALUE", hint="for example learning_rate=4e-3")
    known(name, [*MANIFEST_NAMES, *SCENARIO_NAMES], "setting")
    return name, [value(name, part.strip()) for part in values.split(",")]


def value(name: str, text: str) -> Any:
    """Read one setting's value. Raises BadSettings for a bad value of a scenario's setting; the manifest checks its own settings."""
    if name in MANIFEST_NAMES:
        return _plain(text)
    _, read, kind = SCENARIO_NAMES[name]
    try:
        return read(text)
    except (KeyError, ValueError, ZeroDivisionError):
        raise BadSettings(f"{name} is {text!r}; it should be {kind}", hint="`peer simulate --help` says what each option takes") from None


def _plain(text: str) -> Any:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
