"""The same attacks on real peers: node, meeting machine, exchange, gate and codec are the product's, in virtual time, on a tiny model."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from random import Random
from typing import Any

from gossamer.peer.link import messages
from gossamer.peer.model.evaluation import held_out_loss
from gossamer.peer.model.plan import inner_settings
from gossamer.peer.simulator.attacks import ATTACKS, AWAY, Attack
from gossamer.peer.simulator.hostile import Attacker, HostileSide
from gossamer.peer.simulator.population import Traffic
from gossamer.peer.trainer.fragment_state import FragmentState
from gossamer.peer.trainer.probe import TokenProbe
from gossamer.peer.trainer.stopwatch import InnerStep
from gossamer.peer.trainer.text_training import probe_pool
from tests.attacks.trial import Outcome, Setup
from tests.peer.open_gates import open_gates
from tests.swarm.tiny import CountedReplica, tiny_manifest
from tests.swarm.world import Peer, Swarm, play

STEP_S = 2.0  # so that a partner that rests for a minute is met again
NUM_STEPS = 160
EVAL_BATCHES = 60
WITHIN_S = 3000.0
FAR = 10_000  # batches of an attacker's text that nobody trains on
MANIFEST = tiny_manifest(codec={"name": "modulo4"}, outer={"inner_steps": 5, "alpha": 0.0, "beta": 1.0, "gamma": 1.0})


@dataclass(frozen=True, slots=True)
class RealOutcome(Outcome):
    """What became of the honest members, and what they said of the messages that they refused."""

    reasons: tuple[str, ...] = ()


class HostileMember:
    """Makes a peer of a test swarm hostile, from its own step `turns_at` on."""

    def __init__(self, peer: Peer, attack: Attack, honest: list[Peer], traffic: Traffic, seed: int, num_steps: int) -> None:
        self._peer = peer
        self._attack = attack
        self._honest = {str(member.peer_id): member for member in honest}
        self._turns_at = int((attack.from_share or Fraction(1, 2)) * num_steps)
        replica = peer.trainer.replica
        manifest, random = peer.swarm.manifest, Random(f"{seed}/{peer.peer_id}")
        self.attacker = Attacker(
            replica.program.model,
            replica.fragments,
            [member.trainer.replica.fragments for member in honest],
            lambda number: replica.program.corpus.batch(FAR + number),
            manifest.inner.optimizer,
            inner_settings(manifest),
            TokenProbe(replica.program.model, replica.program.inner.computing.dtype, probe_pool(replica.program.corpus), random),
            replica.probe_gate,
            traffic,
            f"{seed}/{peer.peer_id}",
        )
        self._inner_step = replica.inner_step
        hostile: Any = replica
        hostile.inner_step = self._train
        peer.trainer.spoil = self._answer

    @property
    def _replica(self) -> CountedReplica:
        return self._peer.trainer.replica

    @property
    def is_hostile(self) -> bool:
        return self._replica.own_steps >= self._turns_at

    def _train(self, *given: Any) -> InnerStep:
        self.attacker.take_over()
        if self._attack.trains or not self.is_hostile:
            return self._inner_step(*given)
        replica, num_tokens = self._replica, self._peer.swarm.manifest.inner.batch_size * self._peer.swarm.manifest.inner.sequence_length
        replica.move_fast_weights()
        replica.own_steps += 1
        replica.global_step += 1
        replica.count(num_tokens)
        return InnerStep(1.0, 0.0, num_tokens)

    def _answer(self, reply: messages.Reply) -> messages.Reply:
        """Put the hostile side in the place of the one that the trainer has opened, and claim what the attack claims."""
        if not isinstance(reply, messages.Opened) or not self.is_hostile:
            return reply
        active = self._peer.node.meetings.active.items()  # without this one if it has ended meanwhile
        held = {driver.meeting.number: (fragment, driver.meeting.partner) for fragment, driver in active}
        fragment, partner_id = held.get(reply.meeting, (0, None))
        partner = self._honest.get(str(partner_id))
        if partner is None or not self.attacker.strikes(self._attack):
            return reply
        theirs = partner.trainer.replica.fragments[fragment]

        def side_of(state: FragmentState) -> HostileSide:
            return HostileSide(state, self._attack, self.attacker, fragment, theirs)

        self._peer.trainer.replace_side(reply.meeting, side_of)
        tokens = reply.tokens if self._attack.tokens is None else self._attack.tokens
        return replace(reply, tokens=tokens, global_step=reply.global_step + self._attack.lead_steps)


def play_real(name: str, setup: Setup, num_steps: int = NUM_STEPS) -> RealOutcome:
    """Play a swarm with an attack to its end and measure the honest members. The setup's settings are not used."""
    with tempfile.TemporaryDirectory(prefix="attack-") as folder:
        swarm = Swarm(Path(folder), setup.seed, manifest=MANIFEST)
        members: list[HostileMember] = []
        traffic = Traffic()

        async def story(swarm: Swarm) -> None:
            peers = [swarm.add(step_s=STEP_S) for _ in range(setup.num_peers)]
            honest, liars = peers[: -setup.num_hostile], peers[-setup.num_hostile :]
            members.extend(HostileMember(peer, ATTACKS[name], honest, traffic, setup.seed, num_steps) for peer in liars if name != AWAY)
            for peer in peers:
                if not setup.gate:
                    open_gates([peer.trainer.replica])
                peer.start()
            await swarm.until(lambda: min(peer.trainer.replica.own_steps for peer in peers) >= num_steps // 2, WITHIN_S)
            if name == AWAY:
                swarm.network.partition([peer.peer_id for peer in honest], *([peer.peer_id] for peer in liars))
            await swarm.until(lambda: min(peer.trainer.replica.own_steps for peer in honest) >= num_steps, WITHIN_S)

        play(swarm, story)
        honest = swarm.peers[: -setup.num_hostile]
        losses = [held_out_loss(peer.trainer.replica.program.model, peer.trainer.replica.program.corpus, EVAL_BATCHES) for peer in honest]
        verdicts = [
            reply for peer in honest for reply in peer.trainer.handled if isinstance(reply, messages.Checked) and not reply.accepted
        ]
        return RealOutcome(
            loss=statistics.fmean(losses),
            worst=max(losses),
            tried=traffic.hostile,
            merged=traffic.hostile_merged,
            refused=len(verdicts),
            reasons=tuple(verdict.reason for verdict in verdicts),
        )


def real_outcomes(setups: Sequence[Setup]) -> Callable[[str], list[RealOutcome]]:
    """Return what plays an attack in each of some swarms of real peers."""
    return lambda attack: [play_real(attack, setup) for setup in setups]
