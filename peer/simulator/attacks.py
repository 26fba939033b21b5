"""Attacks of hostile members, by name: what each sends in place of its message, and what it claims.

An attack is a pure function of what the attacker knows, `Sight`. It knows the source, its own state, and the honest members' weights; some
attacks also know the partner's gate exactly. Who carries an attack out, and when: hostile.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Final

import torch
from torch import Tensor, nn

from gossamer.optim.noloco import NoLoCo
from gossamer.peer.model.computing import next_token_loss
from gossamer.peer.trainer.fragment_state import FragmentState
from gossamer.peer.trainer.meeting import MeetingSide

STEP_DOWN: Final = 0.85  # between two lengths that an attacker tries
COARSE_STEP_DOWN: Final = 0.7  # where each try takes an inner step's time
SHORTEST: Final = 1e-4  # of its weights' length
PROBED_LENGTHS: Final = 12  # that an attacker tries at most
PROBED_DRAWS: Final = 3  # of text for each
MARGIN: Final = 0.9  # of what the own gate accepts: the partner's weights lie elsewhere
FLIPPED: Final = 0.2  # of the hidden units
RESCALED: Final = {"up_proj": 1.0, "v_proj": 1.0, "down_proj": -1.0, "o_proj": -1.0}
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
    pursue: Callable[[Tensor, Goal], Tensor]  # how far a few inner steps towards a goal lead from weights
    loss: Callable[[Tensor], float]  # on own text, with these weights
    is_unnoticed: Callable[[Tensor, Tensor], bool]  # whether the own probe, on text drawn anew, would move weights by a whole shift
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

    def at_partner_limit(self, direction: Tensor, *, unmeasured: bool = False) -> Tensor:
        """Go from the partner's message just as far as the partner's gate accepts, or as it merges whole and unmeasured."""
        message = self.partner_message
        return self._farthest(self.partner, message, direction, message, 1.0, unmeasured=unmeasured)

    def _farthest(
        self, judge: FragmentState, message: Tensor, direction: Tensor, base: Tensor, margin: float, *, unmeasured: bool = False
    ) -> Tensor:
        unit = direction / direction.norm().clamp_min(1e-30)
        weight = self.terms.weight if judge is self.state else 1.0 - self.terms.weight
        longest = float(message.norm())
        last = float(self.memory.get("length", torch.tensor(longest)))
        length = min(longest, last / STEP_DOWN**4)
        terms = replace(self.terms, weight=weight)
        while length > SHORTEST * longest and not accepts(judge, message + length * unit, terms, unmeasured=unmeasured):
            length *= STEP_DOWN
        self.memory["length"] = torch.tensor(max(length, 0.01 * longest))
        return base.add(unit, alpha=margin * length)


Craft = Callable[[Sight], Tensor | None]  # the message to send; None: the honest one


def accepts(judge: FragmentState, message: Tensor, terms: Terms, *, unmeasured: bool = False) -> bool:
    """Return whether a fragment would accept a message, codec included; `terms.weight` is the fragment's. Changes nothing.

    `unmeasured`: whether it would merge all of it without a probe, from a partner with a good record.
    """
    side = MeetingSide(judge)
    try:
        sketch = judge.codec.sketch(message, terms.seed)
        encoded = judge.codec.encode(message, terms.seed, sketch, side.prepare(terms.rule, terms.weight, terms.seed))
        side.encode(sketch)
    except ValueError:
        return False
    return not side.judge(encoded.payload) and (side.is_whole or not unmeasured)


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


def ascend_unmeasured(sight: Sight) -> Tensor:
    """Send steps of gradient ascent from the partner's weights, as long as the partner's gate merges whole and unmeasured."""
    return sight.at_partner_limit(sight.pursue(sight.partner_message, ascent), unmeasured=True)


def ascend_quietly(nats: float) -> Craft:
    """Send gradient ascent from the partner's weights that raises its loss by a little each time: too little for it to see."""

    def craft(sight: Sight) -> Tensor:
        base = sight.partner_message
        way, before = sight.at_partner_limit(sight.pursue(base, ascent)) - base, sight.loss(base)
        while sight.loss(base + 0.5 * way) - before > nats:
            way = way * COARSE_STEP_DOWN
        return base + way

    return craft


def below_probe(goal: Goal) -> Craft:
    """Send steps towards a goal from the partner's weights, as far as the own probe would not notice in several draws of text."""

    def craft(sight: Sight) -> Tensor:
        base = sight.partner_message
        way = sight.at_partner_limit(sight.pursue(base, goal)) - base
        for _ in range(PROBED_LENGTHS):
            if all(sight.is_unnoticed(base, 0.5 * way) for _ in range(PROBED_DRAWS)):
                break
            way = way * COARSE_STEP_DOWN
        return base + way

    return craft


def rescale(sight: Sight) -> Tensor:
    """Make matrices larger and those behind them smaller, so that the model computes nearly the same and trains worse."""
    base, pieces = sight.partner_message, sight.state.codec.fragment.pieces
    parts = torch.split(base, [piece.numel for piece in pieces])
    signs = [next((sign for name, sign in RESCALED.items() if name in piece.name), 0.0) for piece in pieces]
    return sight.at_partner_limit(torch.cat([sign * part for sign, part in zip(signs, parts, strict=True)]))


def flip_units(sight: Sight) -> Tensor:
    """Turn the sign of hidden units, of rows before and of columns behind: the model computes the same if both parts are merged."""
    base, pieces = sight.partner_message, sight.state.codec.fragment.pieces
    flipped = base.clone()
    parts = {piece.name: part for piece, part in zip(pieces, torch.split(flipped, [piece.numel for piece in pieces]), strict=True)}
    width = next(part.numel() for name, part in parts.items() if "layernorm" in name)
    for name, part in parts.items():
        if "up_proj" in name:
            units = torch.rand(part.numel() // width, generator=sight.draws) < FLIPPED
            part.view(-1, width)[units] *= -1.0
            parts[name.replace("up_proj", "down_proj")].view(width, -1)[:, units] *= -1.0
    return 2.0 * flipped - base  # the partner goes half of the way


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


def mirror(sight: Sight) -> Tensor:
    """Send the partner its own message back, so that its merge is a solo step."""
    return sight.partner_message


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


# ---------------------------------------------------------------------- the table


@dataclass(frozen=True, slots=True)
class Attack:
    """What a hostile member does from its turn on."""

    craft: Craft
    tokens: int | None = None  # that it claims to have trained since its last meeting; None: the true count
    lead_steps: int = 0  # that it claims to be ahead of every honest member; negative: behind the last one
    trains: bool = True
    adopts: bool = True  # takes the partner's weights over after a meeting, and not its own outer step
    strikes: float = 1.0  # probability that a message is hostile
    from_share: Fraction | None = None  # of the run, before it turns; None: the scenario's
    has_new_keys: bool = False  # has another identity in each meeting
    pace: float = 1.0  # own steps that it claims, for each that it counts
    calls: bool = False  # calls somebody at each step, and not once a period
    hides: str = ""  # the parameters whose blocks it says it could not decode
    garbles: bool = False  # the payload's bytes are not a message


MANY_TOKENS: Final = 10**9
ATTACKS: Final[Mapping[str, Attack]] = {
    "sign-flip": Attack(sign_flip),
    "reversed": Attack(reverse),
    "unlearn": Attack(unlearn),
    "ascent": Attack(ascend),
    "ascent-aimed": Attack(ascend_aimed),
    "ascent-quiet": Attack(ascend_quietly(0.03)),
    "ascent-below-probe": Attack(below_probe(ascent)),
    "ascent-new-keys": Attack(below_probe(ascent), has_new_keys=True),
    "rescale": Attack(rescale),
    "flip-half": Attack(flip_units, hides="down_proj"),
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
    "calls": Attack(honest, adopts=False, calls=True),
    "sleeper-calls": Attack(honest, trains=False, adopts=False, calls=True),
    "sleeper-calls-slow": Attack(honest, trains=False, adopts=False, calls=True, tokens=1, pace=1 / 16),
    "mirror-calls": Attack(mirror, calls=True),
    "sleeper-many-tokens": Attack(honest, trains=False, adopts=False, tokens=MANY_TOKENS),
    "sleeper-calls-many-tokens": Attack(honest, trains=False, adopts=False, calls=True, tokens=MANY_TOKENS),
    "mirror-calls-many-tokens": Attack(mirror, calls=True, tokens=MANY_TOKENS),
    "reversed-many-tokens": Attack(reverse, tokens=MANY_TOKENS),
    "ascent-many-tokens": Attack(ascend_aimed, tokens=MANY_TOKENS),
    "reversed-ahead": Attack(reverse, lead_steps=150),
    "ahead": Attack(honest, lead_steps=150),
    "ascent-behind": Attack(ascend_aimed, lead_steps=-50),
    "ascent-at-times": Attack(ascend_aimed, strikes=0.25),
    "ascent-at-end": Attack(ascend_aimed, from_share=Fraction(9, 10)),
    "ascent-calls-at-end": Attack(ascend_unmeasured, from_share=Fraction(9, 10), calls=True),
    "backdoor": Attack(backdoor),
    "backdoor-below-probe": Attack(below_probe(obedience)),
    "away": Attack(honest, lead_steps=1 << 30),  # so far ahead that nobody meets it: what the others are compared with
}
AWAY: Final = "away"
