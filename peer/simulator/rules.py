"""The outer steps of pair methods behind one interface; the formulas are optim's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from optim import gasloc, noloco, slowmo
from optim.noloco import OuterSettings
from peer.simulator.scenario import Scenario
from protocol.errors import BadSettings


class PairRule(Protocol):
    """What a peer of a pair sends, and the outer steps that it takes. `weight` is its share of the pair's tokens."""

    def message(self, slow: Tensor, momentum: Tensor, fast: Tensor, weight: float) -> Tensor:
        """Return the one tensor that is sent."""

    def pair_step(
        self, slow: Tensor, momentum: Tensor, fast: Tensor, weight: float, gap: Tensor, failed: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return new slow weights and momentum; `gap` is the partner's message minus one's own, as decoded."""

    def solo_step(self, slow: Tensor, momentum: Tensor, fast: Tensor) -> tuple[Tensor, Tensor]:
        """Return new slow weights and momentum of a step without a partner."""


@dataclass(frozen=True, slots=True)
class NoLoCo:
    """NoLoCo, with the momentum averaged too where the settings say so; see optim.noloco."""

    settings: OuterSettings

    def message(self, slow: Tensor, momentum: Tensor, fast: Tensor, weight: float) -> Tensor:
        """Return u; see PairRule."""
        return noloco.message(slow, fast, weight, self.settings, momentum)

    def pair_step(
        self, slow: Tensor, momentum: Tensor, fast: Tensor, weight: float, gap: Tensor, failed: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Take NoLoCo's step; see PairRule."""
        return noloco.pair_step(slow, momentum, fast, weight, gap, self.settings, failed)

    def solo_step(self, slow: Tensor, momentum: Tensor, fast: Tensor) -> tuple[Tensor, Tensor]:
        """Take NoLoCo's step with n = 1; see PairRule."""
        return noloco.solo_step(slow, momentum, fast, self.settings)


@dataclass(frozen=True, slots=True)
class SlowMo:
    """SlowMo without its average, plus gossip; see optim.slowmo. Token weights play no part."""

    settings: OuterSettings

    def message(self, slow: Tensor, momentum: Tensor, fast: Tensor, weight: float) -> Tensor:
        """Return where one's own step leads; see PairRule."""
        return slowmo.message(slow, momentum, fast, self.settings)

    def pair_step(
        self, slow: Tensor, momentum: Tensor, fast: Tensor, weight: float, gap: Tensor, failed: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Take one's own step and half the way to the partner; see PairRule."""
        return slowmo.pair_step(slow, momentum, fast, gap, self.settings, failed)

    def solo_step(self, slow: Tensor, momentum: Tensor, fast: Tensor) -> tuple[Tensor, Tensor]:
        """Take one's own step; see PairRule."""
        return noloco.solo_step(slow, momentum, fast, self.settings)


@dataclass(frozen=True, slots=True)
class GASLoC:
    """GASLoC for pairs; see optim.gasloc. Token weights play no part."""

    settings: OuterSettings

    def message(self, slow: Tensor, momentum: Tensor, fast: Tensor, weight: float) -> Tensor:
        """Return where a plain outer step leads; see PairRule."""
        return gasloc.message(slow, fast, self.settings)

    def pair_step(
        self, slow: Tensor, momentum: Tensor, fast: Tensor, weight: float, gap: Tensor, failed: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Take GASLoC's step; see PairRule."""
        return gasloc.pair_step(slow, momentum, fast, gap, self.settings, failed)

    def solo_step(self, slow: Tensor, momentum: Tensor, fast: Tensor) -> tuple[Tensor, Tensor]:
        """Take Nesterov's step; see PairRule."""
        return gasloc.solo_step(slow, momentum, fast, self.settings)


def noloco_rule(scenario: Scenario) -> PairRule:
    """Return NoLoCo's rule with the scenario's constants. Raises BadSettings outside the stable range."""
    return _checked(lambda: NoLoCo(_settings(scenario)))


def averaged_rule(scenario: Scenario) -> PairRule:
    """Return the rule of NoLoCo with averaged momentum. Raises BadSettings outside the stable range."""
    return _checked(lambda: NoLoCo(_settings(scenario, average_momentum=True)))


def slowmo_rule(scenario: Scenario) -> PairRule:
    """Return SlowMo's rule with the scenario's constants: alpha and beta, as the manifest has checked them, whatever gamma is."""
    outer = scenario.manifest.outer
    return SlowMo(slowmo.outer_settings(outer.alpha, outer.beta))


def gasloc_rule(scenario: Scenario) -> PairRule:
    """Return GASLoC's rule with the scenario's constants. Raises BadSettings for values that cannot train."""
    return _checked(lambda: GASLoC(_settings(scenario)))


def _settings(scenario: Scenario, *, average_momentum: bool = False) -> OuterSettings:
    outer = scenario.manifest.outer
    return OuterSettings(outer.alpha, outer.beta, outer.gamma, average_momentum)


def _checked(make: Callable[[], PairRule]) -> PairRule:
    try:
        return make()
    except ValueError as error:
        raise BadSettings(str(error), hint="change alpha or gamma") from None
