"""Staged runs with a hostile holder of one stage, and what honest holders do about what they receive.

A hop is a call here: a holder computes its stage, asks a holder of the next one, and answers with the gradient of its input. As in a real
pipeline, each holder knows its neighbours alone. Of answers it shortens those that are too long, and compares some with another holder's.
Of what comes from below it compares where the sources lead its weights. A neighbour whose answers are odd three times, or whose
micro-batches are opposed, rests for ten minutes of a second a step.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import Final

import torch
from torch import Tensor

from gossamer.peer.model.computing import next_token_loss
from gossamer.peer.model.stages import stage_output
from gossamer.peer.pipeline.doubling import Doubling
from gossamer.peer.simulator.hop_attacks import DRIVER_ATTACKS, HONEST, HOP_ATTACKS, HopSight, SentText, with_backdoor
from gossamer.peer.simulator.population import Population
from gossamer.peer.simulator.scenario import ALL_CHECKS, NO_CHECKS
from gossamer.peer.simulator.stages import MicroBatch, Stages
from gossamer.peer.trainer import magnitudes
from gossamer.peer.trainer.likeness import AnswersAlike, GradientAnswer, Likeness, compare
from gossamer.peer.trainer.opposition import GradientSample, Opposition
from gossamer.protocol.identity import PeerId

REST_STEPS: Final = 600
Answer = tuple[Tensor, Tensor | None]  # loss, and the gradient of the stage's input; None at the first stage, and where a hop is given up


@dataclass(slots=True)
class Sender:
    """What one holder keeps of the holders of the next stage."""

    doubling: Doubling
    lengths: magnitudes.GradientLengths = field(default_factory=magnitudes.GradientLengths)
    rests_until: dict[int, int] = field(default_factory=dict)  # by replica, in steps
    loss: Tensor = field(default_factory=lambda: torch.tensor(0.0))  # of the last hop


@dataclass(slots=True)
class Receiver:
    """What one holder remembers about the holders of the lower stage."""

    sample: GradientSample
    opposition: Opposition = field(default_factory=Opposition)
    rests_until: dict[int, int] = field(default_factory=dict)  # by replica, in steps


class HostileStages(Stages):
    """The stages of all replicas; the last `attackers` replicas are hostile where they hold `attack_stage`, once the run has got so far.

    A hostile driver adds no gradient of its own.

    `likenesses` are of the answers of honest holders to doubled micro-batches, with the step.
    """

    def __init__(self, population: Population) -> None:
        super().__init__(population)
        scenario = self._scenario
        self.likenesses: list[tuple[int, Likeness]] = []
        self.odd: list[int] = []  # the replicas whose answers were found odd
        self.num_unlike = 0  # doubled micro-batches that were given up
        self.opposed: list[int] = []  # the replicas whose micro-batches were found to be opposed
        self._attacked_stage = (scenario.attack_stage or self._section.count) - 1
        self.take_up(scenario.attack)
        self._hostile = range(scenario.num_honest, scenario.num_peers)
        self._turns_at = int(scenario.attack_from * scenario.num_steps)
        self._peers = [PeerId.of_public_key(number.to_bytes(32, "big")) for number in range(scenario.num_peers)]
        self._senders: dict[tuple[int, int], Sender] = {}  # by holder and stage
        self._receivers: dict[tuple[int, int], Receiver] = {}
        self._routes = Random(f"{scenario.seed}/copies")
        self._memories: defaultdict[int, dict[str, Tensor]] = defaultdict(dict)
        self._draws = torch.Generator().manual_seed(scenario.seed)

    def take_up(self, attack: str) -> None:
        """Choose what the hostile holders answer, or what hostile drivers send."""
        is_of_drivers = self._attacked_stage == 0
        self._attack = HOP_ATTACKS[HONEST if is_of_drivers else attack]
        self._send = DRIVER_ATTACKS[attack if is_of_drivers else HONEST]

    def _forward(self, micro: MicroBatch) -> Tensor:
        driver, tokens = micro.path[0], micro.tokens
        if self._is_hostile_now(driver) and self._send is not DRIVER_ATTACKS[HONEST]:
            return self._sent_by_hostile(self._send(tokens, self._draws), micro.path)
        loss, _ = self._answer(tokens, micro.path, 0, None)
        return loss.detach()

    def _is_hostile_now(self, holder: int) -> bool:
        return holder in self._hostile and self._step >= self._turns_at

    def _sent_by_hostile(self, sending: SentText | None, path: tuple[int, ...]) -> Tensor:
        if sending is None:
            return self._sender(path[0], 0).loss
        with torch.no_grad():
            output = self._received(sending.factor * stage_output(self._stages[path[0]][0], sending.text, None, self._dtype))
        loss, _ = self._ask(sending.tokens, path, 0, output)
        return loss

    # ------------------------------------------------------------------ one holder

    def _answer(self, tokens: Tensor, path: tuple[int, ...], stage: int, received: Tensor | None) -> Answer:
        """Compute a stage and have the next ones compute theirs; add the gradient."""
        if received is not None:
            received = received.clone().requires_grad_()
        if stage == self._section.count - 1:
            with self._judged(path, stage):
                loss = self._last_stage(path[stage], tokens, received)
        else:
            module = self._stages[path[stage]][stage]
            with torch.no_grad():
                output = self._received(stage_output(module, tokens, received, self._dtype))
            loss, gradient = self._ask(tokens, path, stage, output)
            if gradient is None:
                return loss, None
            with self._judged(path, stage):
                torch.autograd.backward(stage_output(module, tokens, received, self._dtype), gradient)
        if received is None:
            return loss, None
        assert received.grad is not None
        return loss, self._received(self._told(tokens, path[stage], stage, received))

    def _last_stage(self, holder: int, tokens: Tensor, received: Tensor | None) -> Tensor:
        loss = next_token_loss(self._stages[holder][-1], tokens, self._dtype, received)
        torch.autograd.backward(loss * (len(tokens) / self._batch_size))
        return loss.detach()

    def _told(self, tokens: Tensor, holder: int, stage: int, received: Tensor) -> Tensor:
        """Return the gradient that a holder answers: its own, or what its attack crafts."""
        assert received.grad is not None
        if not (self._is_hostile_now(holder) and stage == self._attacked_stage):
            return received.grad
        sight = HopSight(received.grad, lambda: self._backdoored(holder, tokens, received), self._memories[holder], self._draws)
        return self._attack(sight)

    def _backdoored(self, holder: int, tokens: Tensor, received: Tensor) -> Tensor:
        """Return the gradient of the last stage's input for labels with the backdoor; no gradient is added."""
        inputs = received.detach().clone().requires_grad_()
        loss = next_token_loss(self._stages[holder][-1], with_backdoor(tokens), self._dtype, inputs)
        (gradient,) = torch.autograd.grad(loss * (len(tokens) / self._batch_size), inputs)
        return gradient

    # ------------------------------------------------------------------ one receiver

    def _receiver(self, holder: int, stage: int) -> Receiver:
        if (holder, stage) not in self._receivers:
            self._receivers[holder, stage] = Receiver(GradientSample(self._stages[holder][stage].parameters()))
        return self._receivers[holder, stage]

    @contextmanager
    def _judged(self, path: tuple[int, ...], stage: int) -> Iterator[None]:
        """Judge the source of a micro-batch by the gradient that is added within."""
        if not stage or self._scenario.hop_checks != ALL_CHECKS:
            yield
            return
        receiver, source = self._receiver(path[stage], stage), path[stage - 1]
        before = receiver.sample.read()
        yield
        if receiver.opposition.note(str(source), receiver.sample.read() - before):
            self.opposed.append(source)
            receiver.rests_until[source] = self._step + REST_STEPS

    # ------------------------------------------------------------------ one sender

    def _sender(self, holder: int, stage: int) -> Sender:
        if (holder, stage) not in self._senders:
            draws, groups = Random(f"{self._scenario.seed}/double/{len(self._senders)}"), {peer: str(peer) for peer in self._peers}
            self._senders[holder, stage] = Sender(Doubling(draws, groups, self._section.count - 1 - stage))
        return self._senders[holder, stage]

    def _ask(self, tokens: Tensor, path: tuple[int, ...], stage: int, output: Tensor) -> Answer:
        """Have a holder of the next stage answer, or several, and return what of it is used."""
        above = stage + 1
        if self._scenario.hop_checks == NO_CHECKS:
            return self._answer(tokens, path, above, output)
        sender, free = self._sender(path[stage], stage), self._free(path[stage], stage)
        if not free:
            return sender.loss, None
        first = path[above] if path[above] in free else self._routes.choice(free)
        asked = [first]
        if self._scenario.hop_checks == ALL_CHECKS and sender.doubling.is_due(self._peers[first]):
            asked += self._one_of(free, asked)
        answers = [self._asked(tokens, path, above, output, holder) for holder in asked]
        if len(answers) == 1 or None in [gradient for _, gradient in answers]:
            loss, gradient = answers[0]
        else:
            source = self._peers[path[stage - 1]] if stage else None
            ask = partial(self._asked, tokens, path, above, output)
            loss, gradient = self._compared(sender, free, asked, answers, source, ask)
        sender.loss = loss
        return loss, None if gradient is None else sender.lengths.shorten(gradient)

    def _asked(self, tokens: Tensor, path: tuple[int, ...], above: int, output: Tensor, holder: int) -> Answer:
        """Have one holder answer; what is behind it, it chooses itself."""
        if holder != path[above]:
            path = (*path[:above], holder, *(self._routes.randrange(len(self._peers)) for _ in path[above + 1 :]))
        return self._answer(tokens, path, above, output)

    def _compared(
        self,
        sender: Sender,
        free: list[int],
        asked: list[int],
        answers: list[Answer],
        source: PeerId | None,
        ask: Callable[[int], Answer],
    ) -> Answer:
        """Compare the answers; ask a third holder where two are unlike, and learn which one is odd."""
        found = self._compare(answers)
        if not found.alike and (third := self._one_of(free, asked)):
            asked, answers = [*asked, *third], [*answers, ask(third[0])]
            found = self._compare(answers)
        self._note_likeness(asked, answers)
        if not found.alike:
            self.num_unlike += 1
            return answers[0][0], None
        answered = {number: sender.doubling.asked(self._peers[holder]) for number, holder in enumerate(asked, 1)}
        learned = sender.doubling.learn(answered, found.odd, found.evidence, source)
        if found.odd is not None:
            odd = asked[found.odd - 1]
            self.odd.append(odd)
            if learned.must_rest:
                sender.doubling.forgive(self._peers[odd])
                sender.rests_until[odd] = self._step + REST_STEPS
        return answers[0][0], torch.stack([answer.gradient for answer in found.alike]).mean(0)

    def _compare(self, answers: list[Answer]) -> AnswersAlike:
        known = [(loss, gradient) for loss, gradient in answers if gradient is not None]
        return compare([GradientAnswer(number, gradient, float(loss)) for number, (loss, gradient) in enumerate(known, 1)])

    def _note_likeness(self, asked: list[int], answers: list[Answer]) -> None:
        honest = [
            GradientAnswer(holder, gradient, float(loss))
            for holder, (loss, gradient) in zip(asked, answers, strict=True)
            if holder not in self._hostile and gradient is not None
        ]
        if len(honest) >= 2:
            self.likenesses.append((self._step, Likeness.of(honest[0], honest[1])))

    def _one_of(self, free: list[int], asked: list[int]) -> list[int]:
        """Return one more holder, if there is one."""
        others = [holder for holder in free if holder not in asked]
        return [self._routes.choice(others)] if others else []

    def _free(self, sender: int, stage: int) -> list[int]:
        """Return the holders of the next stage that a sender asks, and that take its micro-batches."""
        resting = self._sender(sender, stage).rests_until
        allowed = [holder for holder in range(len(self._peers)) if resting.get(holder, 0) <= self._step]
        return [holder for holder in allowed if self._receiver(holder, stage + 1).rests_until.get(sender, 0) <= self._step]
