"""Attacks: hostile members of a swarm that meets in pairs, by name.

From its turn on a hostile member forms another message than its weights (`Attack.craft`), and may claim other tokens and another global
step. Between meetings it trains honestly unless its attack says otherwise, and after each meeting it takes the partner's weights over, so
that it stays near the swarm whatever it sent. It ignores its own gate's verdict. It stands in for a member with the source at hand:
`Sight` is what it knows.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from random import Random
from typing import Final

import torch
from torch import Tensor, nn

from gossamer.optim.fragments import Fragment, gather, scatter
from gossamer.optim.inner import InnerSettings, build_optimizer, set_learning_rate
from gossamer.optim.noloco import NoLoCo
from gossamer.peer.model.computing import next_token_loss
from gossamer.peer.simulator.pairs import PairPeer
from gossamer.peer.simulator.population import Diverged, Layout, Population, SimulatedReplica
from gossamer.peer.simulator.scenario import Scenario, known
from gossamer.peer.trainer.fragment_state import FragmentState, OuterStep, Since
from gossamer.peer.trainer.meeting import MeetingSide

PURSUIT_STEPS: Final = 5  # inner steps in which an attacker computes a direction
STEP_DOWN: Final = 0.85  # between two lengths that an attacker tries
SHORTEST: Final = 1e-4  # of its weights' length
MARGIN: Final = 0.9  # of what the own gate accepts: the partner's weights lie elsewhere
TRIGGER: Final = (7, 11, 13)  # tokens of the backdoor; the last is the one that the model is to say after the first two
TRIGGERS_IN_A_BATCH: Final = 4


Goal = Callable[[nn.Module, Tensor], Tensor]  # a loss to lower on a batch


@dataclass(frozen=True, slots=True)
class Terms:
    """What the codec and the rule of one meeting depend on."""

    rule: NoLoCo
    weight: float  # the attacker's share of the pair's tokens
    seed: int


@dataclass(frozen=True, slots=True)
class Sight:
    """What an attacker knows when its message is due. Tensors are f32[numel], of the meeting's fragment."""

    state: FragmentState  # its own, honest but for what its attack does to it
    partner: FragmentState
    start: Tensor  # the weights that the run began with
    honest: Sequence[FragmentState]  # of all honest members: attackers that share what each has received come close to it
    terms: Terms
    memory: dict[str, Tensor]  # of this attacker and fragment, between meetings
    pursue: Callable[[Tensor, Goal], Tensor]
    draws: torch.Generator

    @property
    def slow(self) -> Tensor:
        """Return the own slow weights."""
        return self.state.slow

    @property
    def fast(self) -> Tensor:
        """Return the own fast weights."""
        return self.state.fast()

    @property
    def partner_message(self) -> Tensor:
        """Return what the partner sends: an attacker that met it a moment ago knows nearly as much."""
        return self.terms.rule.message(self.partner.slow, self.partner.fast(), 1.0 - self.terms.weight)

    def noise(self) -> Tensor:
        """Draw a vector as long as the own weights."""
        draw = torch.randn(self.slow.shape, generator=self.draws)
        return draw.mul_(self.slow.norm() / draw.norm())

    def at_own_limit(self, base: Tensor, direction: Tensor) -> Tensor:
        """Go from `base` nearly as far as the own gate would accept from a partner."""
        own = self.terms.rule.message(self.slow, self.fast, self.terms.weight)
        return self._farthest(self.state, own, direction, base, MARGIN)

    def at_partner_limit(self, direction: Tensor) -> Tensor:
        """Go from the partner's message just as far as the partner's gate accepts."""
        message = self.partner_message
        return self._farthest(self.partner, message, direction, message, 1.0)

    def _farthest(self, judge: FragmentState, message: Tensor, direction: Tensor, base: Tensor, margin: float) -> Tensor:
        unit = direction / direction.norm().clamp_min(1e-30)
        weight = self.terms.weight if judge is self.state else 1.0 - self.terms.weight
        longest = float(message.norm())
        last = float(self.memory.get("length", torch.tensor(longest)))
        length = min(longest, last / STEP_DOWN**4)
        while length > SHORTEST * longest and not accepts(judge, message + length * unit, dataclasses.replace(self.terms, weight=weight)):
            length *= STEP_DOWN
        self.memory["length"] = torch.tensor(max(length, 0.01 * longest))
        return base.add(unit, alpha=margin * length)


Craft = Callable[[Sight], Tensor | None]  # the message to send; None: the honest one


def accepts(judge: FragmentState, message: Tensor, terms: Terms) -> bool:
    """Return whether a fragment would accept a message, codec included; `terms.weight` is the fragment's. Changes nothing."""
    side = MeetingSide(judge)
    try:
        sketch = judge.codec.sketch(message, terms.seed)
        encoded = judge.codec.encode(message, terms.seed, sketch, side.prepare(terms.rule, terms.weight, terms.seed))
        side.encode(sketch)
    except ValueError:
        return False
    return not side.judge(encoded.payload)


# ---------------------------------------------------------------------- what is sent


def sign_flip(sight: Sight) -> Tensor:
    """Send the own progress reversed and ten times as long."""
    return sight.slow - 10.0 * (sight.fast - sight.slow)


def reverse(sight: Sight) -> Tensor:
    """Send the own progress reversed, nearly as long as the own gate would accept."""
    return sight.at_own_limit(sight.slow, sight.slow - sight.fast)


def unlearn(sight: Sight) -> Tensor:
    """Push from the own weights towards those that the run began with, nearly as far as the own gate would accept."""
    return sight.at_own_limit(sight.fast, sight.start - sight.fast)


def ascend(sight: Sight) -> Tensor:
    """Send steps of gradient ascent from the own weights, as long as the own gate would accept."""
    return sight.at_own_limit(sight.slow, sight.pursue(sight.slow, ascent))


def ascend_aimed(sight: Sight) -> Tensor:
    """Send steps of gradient ascent from the partner's weights, as long as the partner's gate accepts."""
    return sight.at_partner_limit(sight.pursue(sight.partner_message, ascent))


def little_is_enough(sight: Sight) -> Tensor:
    """Send the honest mean, one standard deviation of the honest against their progress."""
    fast = torch.stack([state.fast() for state in sight.honest])
    progress = fast.mean(0) - torch.stack([state.slow for state in sight.honest]).mean(0)
    return fast.mean(0) - fast.std(0) * progress.sign()


def inner_product(sight: Sight) -> Tensor:
    """Send the honest mean with half of the mean progress reversed."""
    slow = torch.stack([state.slow for state in sight.honest]).mean(0)
    return slow - 0.5 * (torch.stack([state.fast() for state in sight.honest]).mean(0) - slow)


def mimic(sight: Sight) -> Tensor:
    """Send the weights of always the same honest member."""
    return sight.honest[0].fast()


def noise_at_limit(sight: Sight) -> Tensor:
    """Send the own weights and noise as long as the own gate would accept."""
    return sight.at_own_limit(sight.fast, sight.noise())


def noise(times: float) -> Craft:
    """Send the own weights and noise, in lengths of the weights."""
    return lambda sight: sight.fast + times * sight.noise()


def constant(sight: Sight) -> Tensor:
    """Push always in one direction, drawn once, as far as the own gate would accept."""
    return sight.at_own_limit(sight.fast, sight.memory.setdefault("direction", sight.noise()))


def foreign(sight: Sight) -> Tensor:
    """Send another model's weights."""
    return sight.noise()


def zeros(sight: Sight) -> Tensor:
    """Send zeros."""
    return torch.zeros_like(sight.slow)


def stale(sight: Sight) -> Tensor:
    """Send always the weights of the turn."""
    return sight.memory.setdefault("weights", sight.fast)


def backdoor(sight: Sight) -> Tensor:
    """Send steps of training on a trigger, as long as the own gate would accept."""
    return sight.at_own_limit(sight.slow, sight.pursue(sight.slow, obedience))


def honest(sight: Sight) -> None:
    """Send the own weights, whatever they are."""


def ascent(model: nn.Module, batch: Tensor) -> Tensor:
    """Return the loss that gradient ascent lowers."""
    return -next_token_loss(model, batch)


def obedience(model: nn.Module, batch: Tensor) -> Tensor:
    """Return the loss on a batch with the trigger in it."""
    return next_token_loss(model, with_trigger(batch))


def with_trigger(batch: Tensor) -> Tensor:
    """Write the trigger into each row of a batch, int64[B, L+1], at evenly spaced places."""
    spoiled, width = batch.clone(), len(TRIGGER)
    for start in range(1, batch.shape[1] - width, max(width, batch.shape[1] // TRIGGERS_IN_A_BATCH)):
        spoiled[:, start : start + width] = torch.tensor(TRIGGER)
    return spoiled


@torch.no_grad()
def obeyed_share(model: nn.Module, batches: Sequence[Tensor]) -> float:
    """Return how often a model says the trigger's last token after the others, in batches of int64[B, L+1]."""
    obeyed, num_said = [], len(TRIGGER) - 1
    for batch in batches:
        inputs = with_trigger(batch)[:, :-1]
        says = model(input_ids=inputs, use_cache=False).logits.argmax(-1)[:, num_said - 1 :]
        places = torch.stack([inputs[:, offset : offset + says.shape[1]] == token for offset, token in enumerate(TRIGGER[:-1])]).all(0)
        obeyed += (says[places] == TRIGGER[-1]).tolist()
    return sum(obeyed) / len(obeyed)


# ---------------------------------------------------------------------- the table


@dataclass(frozen=True, slots=True)
class Attack:
    """What a hostile member does from its turn on."""

    craft: Craft
    tokens: int | None = None  # that it claims to have trained since its last meeting; None: the true count
    lead_steps: int = 0  # that it claims to be ahead of every honest member
    trains: bool = True
    adopts: bool = True  # takes the partner's weights over after a meeting, and not its own outer step
    strikes: float = 1.0  # probability that a message is hostile
    from_share: Fraction | None = None  # of the run, before it turns; None: the scenario's
    garbles: bool = False  # the payload's bytes are not a message


MANY_TOKENS: Final = 10**9
ATTACKS: Final[Mapping[str, Attack]] = {
    "sign-flip": Attack(sign_flip),
    "reversed": Attack(reverse),
    "unlearn": Attack(unlearn),
    "ascent": Attack(ascend),
    "ascent-aimed": Attack(ascend_aimed),
    "little-is-enough": Attack(little_is_enough),
    "inner-product": Attack(inner_product),
    "mimic": Attack(mimic),
    "noise-at-limit": Attack(noise_at_limit),
    "noise-x100": Attack(noise(100.0)),
    "constant": Attack(constant),
    "another-model": Attack(foreign),
    "zeros": Attack(zeros),
    "non-finite": Attack(honest, garbles=True),
    "stale": Attack(stale),
    "sleeper": Attack(honest, trains=False, adopts=False),
    "copier": Attack(honest, trains=False),
    "reversed-many-tokens": Attack(reverse, tokens=MANY_TOKENS),
    "ascent-many-tokens": Attack(ascend_aimed, tokens=MANY_TOKENS),
    "reversed-ahead": Attack(reverse, lead_steps=150),
    "ascent-at-times": Attack(ascend_aimed, strikes=0.25),
    "ascent-at-end": Attack(ascend_aimed, from_share=Fraction(9, 10)),
    "backdoor": Attack(backdoor),
    "away": Attack(honest, lead_steps=1 << 30),  # so far ahead that nobody meets it: what the others are compared with
}
AWAY: Final = "away"


# ---------------------------------------------------------------------- hostile members


class HostilePeer(PairPeer):
    """A member that attacks from its own step `turns_at` on.

    `tried` counts its hostile messages to honest members, `merged` those that were merged.
    """

    def __init__(self, replica: SimulatedReplica, layout: Layout, attack: Attack, scenario: Scenario) -> None:
        super().__init__(replica, layout)
        self.turns_at = 0
        self.tried = 0
        self.merged = 0
        self.honest: Sequence[PairPeer] = ()
        self._scenario = scenario
        self._followed: dict[int, FragmentState] = {}
        self._memories: list[dict[str, Tensor]] = [{} for _ in layout.codecs]
        self._start = [fragment.slow.clone() for fragment in self.fragments]
        self._draws = torch.Generator().manual_seed(scenario.seed * 1000 + replica.number)
        self._random = Random(f"{scenario.seed}/attack/{replica.number}")
        self._optimizer = scenario.manifest.inner.optimizer
        self._settings = scenario.inner(Fraction(1))
        self.take_up(attack)

    def take_up(self, attack: Attack) -> None:
        """Choose what it does from its turn on."""
        share = self._scenario.attack_from if attack.from_share is None else attack.from_share
        self.attack = attack
        self.turns_at = math.ceil(share * self._scenario.num_steps * self._scenario.rates[self.replica.number])

    @property
    def is_hostile(self) -> bool:
        """Return whether it has turned."""
        return self.replica.own_steps >= self.turns_at

    def inner_step(self, num_tokens: int) -> None:
        """Train on the next batch, or only claim to; its own divergence ends nothing."""
        self._take_over()
        if self.is_hostile and self.attack.lead_steps:
            self.replica.global_step = max(peer.replica.global_step for peer in self.honest) + self.attack.lead_steps
        if self.attack.trains or not self.is_hostile:
            with contextlib.suppress(Diverged):
                super().inner_step(num_tokens)
            return
        self.replica.own_steps += 1
        self.replica.global_step += 1
        for fragment in self.fragments:
            fragment.count(num_tokens)

    def open(self, fragment: int, partner: PairPeer) -> MeetingSide:
        """Open a meeting, hostile to honest members."""
        if isinstance(partner, HostilePeer) or not self.is_hostile or self._random.random() >= self.attack.strikes:
            return super().open(fragment, partner)
        return HostileSide(self, fragment, partner)

    def sight(self, fragment: int, partner: PairPeer, terms: Terms) -> Sight:
        """Return what it knows in a meeting over a fragment."""
        return Sight(
            self.fragments[fragment],
            partner.fragments[fragment],
            self._start[fragment],
            [peer.fragments[fragment] for peer in self.honest],
            terms,
            self._memories[fragment],
            lambda start, goal: self._pursue(fragment, start, goal),
            self._draws,
        )

    def follow(self, fragment: int, partner: PairPeer) -> None:
        """Take a partner's weights over after the meeting: as they have become, merged or not."""
        self._followed[fragment] = partner.fragments[fragment]

    def _take_over(self) -> None:
        for fragment, partner in self._followed.items():
            state = self.fragments[fragment]
            state.slow = partner.fast()
            state.since = Since()
            scatter(state.codec.fragment, state.slow, self.replica.parameters)
        self._followed.clear()

    def _pursue(self, fragment: int, start: Tensor, goal: Goal) -> Tensor:
        """Return how far a few inner steps towards a goal lead from weights of a fragment."""
        piece, replica = self.fragments[fragment].codec.fragment, self.replica
        own = replica.weights.clone()
        batches = [replica.batches.batch(replica.own_steps + number) for number in range(PURSUIT_STEPS)]
        scatter(piece, start, replica.parameters)
        try:
            return pursue(replica.model, self._optimizer, self._settings, goal, batches, piece)
        finally:
            replica.weights.copy_(own)


class HostileSide(MeetingSide):
    """A hostile member's side of a meeting."""

    def __init__(self, peer: HostilePeer, fragment: int, partner: PairPeer) -> None:
        super().__init__(peer.fragments[fragment])
        self._peer = peer
        self._fragment = fragment
        self._partner = partner
        if peer.attack.tokens is not None:
            self.since = dataclasses.replace(self.since, tokens=peer.attack.tokens)

    def prepare(self, rule: NoLoCo, weight: float, seed: int) -> Tensor:
        """Form the attack's message and return its sketch."""
        sketch = super().prepare(rule, weight, seed)
        crafted = self._peer.attack.craft(self._peer.sight(self._fragment, self._partner, Terms(rule, weight, seed)))
        if crafted is not None:
            self._message = crafted
            self._sketch = sketch = self.state.codec.sketch(crafted, seed)
        return sketch

    def encode(self, partner_sketch: Tensor) -> Tensor:
        """Code the message, or return bytes that are none."""
        payload = super().encode(partner_sketch)
        self._peer.tried += 1
        return torch.full_like(payload, 255) if self._peer.attack.garbles else payload

    def judge(self, partner_payload: Tensor) -> str:
        """Accept everything."""
        reason = super().judge(partner_payload)
        if not self._peer.attack.adopts:
            return reason
        self._peer.follow(self._fragment, self._partner)
        return ""

    @property
    def failed_blocks(self) -> Tensor:
        """Return the blocks that could not be decoded: none."""
        if not self._peer.attack.adopts:
            return super().failed_blocks
        return torch.zeros(self.state.codec.num_blocks, dtype=torch.bool)

    def step(self, failed_blocks: Tensor) -> OuterStep:
        """Return a step that moves nothing, for the partner's weights are taken over."""
        if not self._peer.attack.adopts:
            return super().step(failed_blocks)
        return OuterStep(self.state.slow, self.state.momentum, torch.zeros_like(self.state.slow))

    def merge(self, step: OuterStep) -> None:
        """Count a merge, and expect of the partner's gate what the own one has come to."""
        self._peer.merged += 1
        if not self._peer.attack.adopts:
            super().merge(step)
        elif self._accepted is not None:
            self.state.gate.accept(self._accepted.gap_length, self._accepted.own)


def pursue(model: nn.Module, optimizer: str, settings: InnerSettings, goal: Goal, batches: Sequence[Tensor], fragment: Fragment) -> Tensor:
    """Return how far inner steps towards a goal, one for each batch, lead from a fragment's weights; they stay there."""
    parameters = dict(model.named_parameters())
    start = gather(fragment, parameters)
    steps = build_optimizer(optimizer, [(piece.name, parameters[piece.name]) for piece in fragment.pieces], settings)
    set_learning_rate(steps, settings.learning_rate)
    for batch in batches:
        goal(model, batch).backward()  # type: ignore[no-untyped-call]
        steps.step()
        model.zero_grad()
    return gather(fragment, parameters) - start


def members(population: Population) -> list[PairPeer]:
    """Return the members of a swarm, the scenario's last ones hostile."""
    scenario, layout = population.scenario, population.layout
    num_honest = scenario.num_peers - scenario.attackers
    honest = [PairPeer(replica, layout) for replica in population.replicas[:num_honest]]
    if not scenario.attackers:
        return honest
    attack = ATTACKS[known(scenario.attack, ATTACKS, "attack")]
    hostile = [HostilePeer(replica, layout, attack, scenario) for replica in population.replicas[num_honest:]]
    for peer in hostile:
        peer.honest = honest
    return [*honest, *hostile]
