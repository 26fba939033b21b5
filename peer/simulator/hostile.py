"""Hostile members: they turn during the run, then send what their attack crafts (attacks.py).

Between meetings a hostile member trains honestly unless its attack says otherwise. After each meeting it takes over what the partner's
weights have become, so that it stays near the swarm whatever it sent. It accepts everything itself; its own gate tells it what others may
accept. `Attacker` and `HostileSide` know nothing of the simulator: tests/attacks gives them to real peers too.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from fractions import Fraction
from random import Random
from typing import Final

import torch
from torch import Tensor, nn

from gossamer.optim.fragments import Fragment, gather, scatter
from gossamer.optim.inner import InnerSettings, build_optimizer, set_learning_rate
from gossamer.optim.noloco import NoLoCo
from gossamer.peer.model.computing import next_token_loss
from gossamer.peer.simulator.attacks import ATTACKS, Attack, Goal, Sight, Terms
from gossamer.peer.simulator.pairs import PairPeer
from gossamer.peer.simulator.population import Diverged, Population, SimulatedReplica, Traffic
from gossamer.peer.trainer.fragment_state import FragmentState, OuterStep, Since
from gossamer.peer.trainer.meeting import MeetingSide
from gossamer.peer.trainer.probe import Probe, ProbeGate, Shifts
from gossamer.protocol.identity import PeerId

LOSS_BATCHES: Final = 4  # on which an attacker measures a loss
LOSS_FROM: Final = 1000  # the first of them
PURSUIT_STEPS: Final = 5  # inner steps in which an attacker computes a direction


class Attacker:
    """What one hostile member keeps over its life.

    `traffic` counts its hostile messages. `batches(n)` is the n-th batch of its text. `honest` are the fragments of the honest members.
    """

    def __init__(
        self,
        model: nn.Module,
        fragments: Sequence[FragmentState],
        honest: Sequence[Sequence[FragmentState]],
        batches: Callable[[int], Tensor],
        optimizer: str,
        settings: InnerSettings,
        probe: Probe,
        probe_gate: ProbeGate,
        traffic: Traffic,
        seed: str,
    ) -> None:
        self.traffic = traffic
        self._probe = probe
        self._probe_gate = probe_gate
        self._model = model
        self._fragments = fragments
        self._honest = honest
        self._batches = batches
        self._optimizer = optimizer
        self._settings = settings
        self._start = [fragment.slow.clone() for fragment in fragments]
        self._memories: list[dict[str, Tensor]] = [{} for _ in fragments]
        self._followed: dict[int, FragmentState] = {}
        self._random = Random(seed)
        self._draws = torch.Generator().manual_seed(self._random.getrandbits(63))
        self._num_batches = 0

    def strikes(self, attack: Attack) -> bool:
        """Return whether the next message is hostile."""
        return self._random.random() < attack.strikes

    def sight(self, fragment: int, partner: FragmentState, terms: Terms) -> Sight:
        """Return what it knows in a meeting over a fragment."""
        return Sight(
            state=self._fragments[fragment],
            partner=partner,
            start=self._start[fragment],
            honest=[fragments[fragment] for fragments in self._honest],
            terms=terms,
            memory=self._memories[fragment],
            pursue=lambda start, goal: self._pursue(self._fragments[fragment].codec.fragment, start, goal),
            loss=lambda weights: self._loss(self._fragments[fragment].codec.fragment, weights),
            is_unnoticed=lambda weights, shift: self._is_unnoticed(self._fragments[fragment], weights, shift),
            draws=self._draws,
        )

    def follow(self, fragment: int, partner: FragmentState) -> None:
        """Take a partner's weights over at the next `take_over`: as the meeting will have left them, merged or not."""
        self._followed[fragment] = partner

    def take_over(self) -> None:
        """Take over the weights of the partners since the last call, between inner steps."""
        for fragment, partner in self._followed.items():
            state = self._fragments[fragment]
            if state.meeting is not None:
                continue
            state.move_fast_weights()
            state.slow, state.since = partner.fast(), Since()
            scatter(state.codec.fragment, state.slow, dict(self._model.named_parameters()))
        self._followed = {
            fragment: partner for fragment, partner in self._followed.items() if self._fragments[fragment].meeting is not None
        }

    def _is_unnoticed(self, state: FragmentState, weights: Tensor, shift: Tensor) -> bool:
        """Return whether an honest peer that has met whom this one has met would move weights of a fragment by the whole shift."""
        piece, parameters = state.codec.fragment, dict(self._model.named_parameters())
        own = gather(piece, parameters)
        scatter(piece, weights, parameters)
        shifts = Shifts(shift, torch.zeros_like(shift), own - state.slow)
        judgement = self._probe.judge(self._probe_gate, piece, shifts, 0.5, is_behind=False)
        scatter(piece, own, parameters)
        return not judgement.reason and judgement.part == 1.0

    @torch.no_grad()
    def _loss(self, piece: Fragment, weights: Tensor) -> float:
        """Return the loss on own text with other weights of a fragment."""
        parameters = dict(self._model.named_parameters())
        own = gather(piece, parameters)
        scatter(piece, weights, parameters)
        loss = sum(float(next_token_loss(self._model, self._batches(LOSS_FROM + number))) for number in range(LOSS_BATCHES))
        scatter(piece, own, parameters)
        return loss / LOSS_BATCHES

    def _pursue(self, piece: Fragment, start: Tensor, goal: Goal) -> Tensor:
        """Return how far a few inner steps towards a goal lead from weights of a fragment."""
        parameters = dict(self._model.named_parameters())
        own, gradients = gather(piece, parameters), {name: parameter.grad for name, parameter in parameters.items()}
        scatter(piece, start, parameters)
        steps = build_optimizer(self._optimizer, [(part.name, parameters[part.name]) for part in piece.pieces], self._settings)
        set_learning_rate(steps, self._settings.learning_rate)
        for _ in range(PURSUIT_STEPS):
            self._num_batches += 1
            self._model.zero_grad()
            goal(self._model, self._batches(self._num_batches)).backward()  # type: ignore[no-untyped-call]
            steps.step()
        reached = gather(piece, parameters)
        scatter(piece, own, parameters)
        for name, parameter in parameters.items():
            parameter.grad = gradients[name]
        return reached - start


class HostileSide(MeetingSide):
    """A hostile member's side of a meeting with an honest one."""

    def __init__(self, state: FragmentState, attack: Attack, attacker: Attacker, fragment: int, partner: FragmentState) -> None:
        super().__init__(state)
        self._attack = attack
        self._attacker = attacker
        self._fragment = fragment
        self._partner = partner
        self._own_tokens = self.since.tokens
        if attack.tokens is not None:
            self.since = replace(self.since, tokens=attack.tokens)

    def prepare(self, rule: NoLoCo, weight: float, seed: int) -> Tensor:
        """Form the attack's message and return its sketch."""
        sketch = super().prepare(rule, weight, seed)
        crafted = self._attack.craft(self._attacker.sight(self._fragment, self._partner, Terms(rule, weight, seed)))
        if crafted is not None:
            self._message = crafted
            self._sketch = sketch = self.state.codec.sketch(crafted, seed)
        return sketch

    def encode(self, partner_sketch: Tensor) -> Tensor:
        """Code the message, or return bytes that are none."""
        payload = super().encode(partner_sketch)
        self._attacker.traffic.hostile += 1
        return torch.full_like(payload, 255) if self._attack.garbles else payload

    def judge(self, partner_payload: Tensor, share: float = 1.0, most_part: float = 1.0, place: str = "") -> str:
        """Accept everything."""
        reason = super().judge(partner_payload, share, most_part, place)
        if not self._attack.adopts:
            return reason
        self._attacker.follow(self._fragment, self._partner)
        return ""

    @property
    def failed_blocks(self) -> Tensor:
        """Return the blocks that could not be decoded, as the attack says."""
        if not self._attack.adopts:
            return super().failed_blocks
        codec, start = self.state.codec, 0
        failed = torch.zeros(codec.num_blocks, dtype=torch.bool)
        for piece in codec.fragment.pieces if self._attack.hides else ():
            first, stop = (-(-place // codec.codec.block_values) for place in (start, start + piece.numel))
            failed[first : stop - 1] |= self._attack.hides in piece.name
            start += piece.numel
        return failed

    @property
    def part(self) -> float:
        """The part of the outer step that is taken: all of it, though it moves nothing."""
        return 1.0 if self._attack.adopts else super().part

    @property
    def is_whole(self) -> bool:
        """Whether the whole message is accepted."""
        return self._attack.adopts or super().is_whole

    def step_as_decided(self, probe: Probe | None, gate: ProbeGate, failed_blocks: Tensor, *, lag_steps: int) -> OuterStep:
        """Return the step for these failed blocks, unmeasured."""
        return self.step(failed_blocks)

    def step(self, failed_blocks: Tensor) -> OuterStep:
        """Return a step that moves nothing, for the partner's weights are taken over."""
        if not self._attack.adopts:
            return super().step(failed_blocks)
        return OuterStep(self.state.slow, self.state.momentum, torch.zeros_like(self.state.slow))

    def merge(self, step: OuterStep) -> None:
        """Count a merge, and expect of the partner's gate what the own one has come to."""
        self._attacker.traffic.hostile_merged += 1
        if not self._attack.adopts:
            self.since = replace(self.since, tokens=self._own_tokens)
            super().merge(step)
        elif self._accepted is not None:
            self.state.gate.accept(self._accepted.gap_length, self._accepted.own)


class HostilePeer(PairPeer):
    """A simulated member that attacks from its own step `turns_at` on."""

    def __init__(self, replica: SimulatedReplica, population: Population, attack: Attack, honest: Sequence[PairPeer]) -> None:
        super().__init__(replica, population.layout)
        scenario = population.scenario
        self._scenario = scenario
        self._honest = honest
        self._keys = Random(f"{scenario.seed}/keys/{replica.number}")
        self.attacker = Attacker(
            replica.model,
            self.fragments,
            [peer.fragments for peer in honest],
            lambda number: replica.batches.batch(replica.own_steps + number),
            scenario.manifest.inner.optimizer,
            scenario.inner_settings_at(Fraction(1)),
            self.probe,
            self.probe_gate,
            population.traffic,
            f"{scenario.seed}/attack/{replica.number}",
        )
        self.take_up(attack)

    def take_up(self, attack: Attack) -> None:
        """Choose what it does from its turn on."""
        share = self._scenario.attack_from if attack.from_share is None else attack.from_share
        self.attack = attack
        self.turns_at = math.ceil(share * self._scenario.num_steps * self._scenario.rates[self.replica.number])

    def judge(self, side: MeetingSide, payload: Tensor, partner: PairPeer) -> str:
        """Judge a message as an honest member, in a hostile meeting not at all."""
        return side.judge(payload) if isinstance(side, HostileSide) else super().judge(side, payload, partner)

    @property
    def claimed_steps(self) -> int:
        """The own steps that it names."""
        since = max(0, self.replica.own_steps - self.turns_at)
        return self.replica.own_steps - since + int(self.attack.pace * since)

    @property
    def is_hostile(self) -> bool:
        """Return whether it has turned."""
        return self.replica.own_steps >= self.turns_at

    @property
    def always_calls(self) -> bool:
        """Whether it calls at each step, due or not."""
        return self.is_hostile and self.attack.calls

    def inner_step(self, num_tokens: int) -> None:
        """Train on the next batch, or only claim to; its own divergence ends nothing."""
        self.attacker.take_over()
        if self.is_hostile and self.attack.lead_steps:
            self.replica.global_step = self._step_claimed([peer.replica.global_step for peer in self._honest])
        if self.attack.trains or not self.is_hostile:
            with contextlib.suppress(Diverged):
                super().inner_step(num_tokens)
            return
        self.replica.own_steps += 1
        self.replica.global_step += 1
        for fragment in self.fragments:
            fragment.count(num_tokens)

    def _step_claimed(self, honest: Sequence[int]) -> int:
        lead = self.attack.lead_steps
        return max(honest) + lead if lead > 0 else max(0, min(honest) + lead)

    def open(self, fragment: int, partner: PairPeer) -> MeetingSide:
        """Open a meeting, hostile to honest members."""
        if isinstance(partner, HostilePeer) or not self.is_hostile or not self.attacker.strikes(self.attack):
            return super().open(fragment, partner)
        if self.attack.has_new_keys:
            self.peer_id = PeerId.of_public_key(self._keys.randbytes(32))
        return HostileSide(self.fragments[fragment], self.attack, self.attacker, fragment, partner.fragments[fragment])


def members(population: Population) -> list[PairPeer]:
    """Return the members of a swarm, the scenario's last ones hostile."""
    num_honest, attack = population.scenario.num_honest, ATTACKS.get(population.scenario.attack)
    honest = [PairPeer(replica, population.layout) for replica in population.replicas[:num_honest]]
    if attack is None:  # of a staged run, the attackers' meetings are honest
        return [PairPeer(replica, population.layout) for replica in population.replicas]
    return [*honest, *(HostilePeer(replica, population, attack, honest) for replica in population.replicas[num_honest:])]
