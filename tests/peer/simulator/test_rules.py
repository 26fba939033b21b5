from __future__ import annotations

import pytest
import torch

from optim import gasloc, noloco, slowmo
from optim.noloco import OuterSettings
from peer.simulator.rules import averaged_rule, gasloc_rule, noloco_rule, slowmo_rule
from peer.simulator.scenario import Scenario
from protocol.errors import BadSettings
from tests import reference
from tests.peer.small import small_manifest

DRAWS = torch.Generator().manual_seed(2)
SLOW, MOMENTUM, FAST, GAP = (torch.randn(50, generator=DRAWS) for _ in range(4))


def made(**outer: float) -> Scenario:
    return Scenario(small_manifest(outer={"method": "slowmo", **outer}))


def test_constants_come_from_the_manifest() -> None:
    settings = OuterSettings(0.3, 0.6, 0.9)
    sent = noloco_rule(made(alpha=0.3, beta=0.6, gamma=0.9)).message(SLOW, MOMENTUM, FAST, 0.25)
    assert torch.equal(sent, noloco.message(SLOW, FAST, 0.25, settings))


def test_averaged_momentum_is_the_oracles() -> None:
    rule = averaged_rule(made(alpha=0.5, beta=0.7, gamma=0.7))
    i, j = reference.Replica(1.0, 0.2, 0.5), reference.Replica(-0.3, 0.1, 0.4)
    sent = [rule.message(*(torch.tensor([value]) for value in (r.phi, r.delta, r.theta)), 0.5) for r in (i, j)]
    slow, momentum = rule.pair_step(*(torch.tensor([v]) for v in (i.phi, i.delta, i.theta)), 0.5, sent[1] - sent[0], None)
    want = reference.noloco_momentum_averaged(i, j, 0.5, 0.7, 0.7)[0]
    assert float(slow) == pytest.approx(want.phi, abs=1e-6)
    assert float(momentum) == pytest.approx(want.delta, abs=1e-6)


def test_slowmo_takes_its_own_step_and_half_the_way() -> None:
    rule, settings = slowmo_rule(made()), OuterSettings()
    assert torch.equal(rule.message(SLOW, MOMENTUM, FAST, 0.9), slowmo.message(SLOW, MOMENTUM, FAST, settings))
    stepped = rule.pair_step(SLOW, MOMENTUM, FAST, 0.9, GAP, None)
    assert all(torch.equal(*both) for both in zip(stepped, slowmo.pair_step(SLOW, MOMENTUM, FAST, GAP, settings), strict=True))


def test_gamma_plays_no_part_in_slowmo() -> None:
    """Where NoLoCo would drift apart, and whatever the gamma."""
    one, other = (slowmo_rule(made(alpha=0.95, gamma=gamma)) for gamma in (0.7, 5.0))
    stepped = [rule.pair_step(SLOW, MOMENTUM, FAST, 0.9, GAP, None) for rule in (one, other)]
    assert all(torch.equal(*both) for both in zip(*stepped, strict=True))


def test_gasloc_is_optims() -> None:
    rule, settings = gasloc_rule(made()), OuterSettings()
    assert torch.equal(rule.message(SLOW, MOMENTUM, FAST, 0.9), gasloc.message(SLOW, FAST, settings))
    paired, alone = rule.pair_step(SLOW, MOMENTUM, FAST, 0.9, GAP, None), rule.solo_step(SLOW, MOMENTUM, FAST)
    assert all(torch.equal(*both) for both in zip(paired, gasloc.pair_step(SLOW, MOMENTUM, FAST, GAP, settings), strict=True))
    assert all(torch.equal(*both) for both in zip(alone, gasloc.solo_step(SLOW, MOMENTUM, FAST, settings), strict=True))


@pytest.mark.parametrize("rule", [noloco_rule, averaged_rule, slowmo_rule])
def test_alone_all_take_the_same_step(rule: object) -> None:
    assert callable(rule)
    alone = rule(made()).solo_step(SLOW, MOMENTUM, FAST)
    assert all(torch.equal(*both) for both in zip(alone, noloco.solo_step(SLOW, MOMENTUM, FAST, OuterSettings()), strict=True))


def test_outside_the_stable_range_is_refused() -> None:
    with pytest.raises(BadSettings, match="gamma must satisfy"):
        noloco_rule(made(gamma=1.6))
