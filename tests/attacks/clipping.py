"""A yardstick: the same swarm with centred clipping over all deltas, as groups do that see everybody's (Karimireddy et al., 2021).

Every 5 steps all members send their deltas, hostile ones what their attack crafts, to an aggregator that everybody believes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction

import torch
from torch import Tensor

from gossamer.optim.noloco import NoLoCo
from gossamer.peer.simulator.attacks import ATTACKS, AWAY, Terms
from gossamer.peer.simulator.hostile import HostilePeer
from gossamer.peer.simulator.pairs import PairPeer
from gossamer.peer.simulator.population import Population
from gossamer.peer.trainer.fragment_state import OuterStep

CLIP_TURNS = 3


def centred_clip(deltas: Tensor, centre: Tensor) -> Tensor:
    """Aggregate f32[members, numel] around a centre, clipped to the median distance from it."""
    for _ in range(CLIP_TURNS):
        away = deltas - centre
        lengths = away.norm(dim=1, keepdim=True)
        centre = centre + (away * (lengths.median() / lengths.clamp_min(1e-30)).clamp_max(1.0)).mean(0)
    return centre


def train_clipped(population: Population, rule: NoLoCo, members: Callable[[Population], list[PairPeer]]) -> Iterator[Fraction]:
    """Train peers that all aggregate together; yield each time at which inner steps end."""
    scenario, peers = population.scenario, members(population)
    centres = [torch.zeros(codec.fragment.numel) for codec in population.layout.codecs]
    for now, _ in scenario.steps_at_own_rates():
        for peer in peers:
            peer.inner_step(scenario.step_tokens)
        for fragment in range(len(centres)) if now % scenario.period == 0 else ():
            slow = peers[0].fragments[fragment].slow
            messages = [message for peer in peers if (message := _message(peer, peers, fragment, rule)) is not None]
            deltas = torch.stack([message - slow for message in messages if bool(torch.isfinite(message).all())])
            centres[fragment] = centred_clip(deltas, centres[fragment])
            for peer in peers:
                state = peer.fragments[fragment]
                state.merge(OuterStep(slow + centres[fragment], state.momentum, slow + centres[fragment] - state.fast()), state.since)
                state.move_fast_weights()
        yield now


def _message(peer: PairPeer, peers: Sequence[PairPeer], fragment: int, rule: NoLoCo) -> Tensor | None:
    """Return what a member sends; None where it is away."""
    if not isinstance(peer, HostilePeer) or not peer.is_hostile or not peer.attacker.strikes(peer.attack):
        return peer.fragments[fragment].fast()
    if peer.attack is ATTACKS[AWAY]:
        return None
    sight = peer.attacker.sight(fragment, peers[0].fragments[fragment], Terms(rule, 0.5, seed=0))
    peer.attacker.traffic.hostile += 1
    peer.attacker.traffic.hostile_merged += 1
    crafted = peer.attack.craft(sight)
    if peer.attack.garbles:
        return torch.full_like(peer.fragments[fragment].slow, torch.nan)
    return peer.fragments[fragment].fast() if crafted is None else crafted
