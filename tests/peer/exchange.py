"""A meeting by hand: two trainers' sides, each with its own payload folder, and the bytes carried between them as two nodes would."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from gossamer.peer.link import messages
from gossamer.peer.link.messages import File, payload_name
from gossamer.peer.link.payload_folder import PayloadFolder
from gossamer.protocol.messages.messages import RunPhase
from tests.peer.small import AskedReplica


@dataclass(frozen=True)
class Side:
    """One trainer: who answers its requests, and where its bytes lie."""

    answer: Callable[[messages.MeetingRequest], messages.Reply]
    payloads: PayloadFolder

    def put(self, number: int, file: File, data: bytes) -> None:
        self.payloads.write(payload_name(number, file), data)

    def get(self, number: int, file: File) -> bytes:
        return bytes(self.payloads.read(payload_name(number, file)))


def replica_side(replica: AskedReplica, folder: Path) -> Side:
    def answer(request: messages.MeetingRequest) -> messages.Reply:
        reply = replica.handle(request)
        assert reply is not None
        return reply

    return Side(answer, PayloadFolder(folder))


@dataclass(frozen=True)
class Terms:
    """What the two sides of a meeting agree on."""

    fragment: int = 0
    number: int = 1
    seed: int = 7
    phase: RunPhase = RunPhase.TRAIN
    name: str = "ab" * 16


def opened(side: Side, terms: Terms) -> messages.Opened:
    reply = side.answer(messages.Open(terms.number, terms.fragment))
    assert isinstance(reply, messages.Opened), reply
    return reply


def exchange(sides: tuple[Side, Side], terms: Terms) -> tuple[messages.Opened, messages.Opened]:
    """Open on both sides and carry everything up to the payloads across."""
    both = opened(sides[0], terms), opened(sides[1], terms)
    prepare(sides, terms, both)
    carry(sides, terms.number, File.OWN_PAYLOAD, File.PARTNER_PAYLOAD)
    return both


def prepare(sides: tuple[Side, Side], terms: Terms, both: tuple[messages.Opened, messages.Opened]) -> None:
    replies = [
        side.answer(messages.Prepare(terms.number, partner.tokens, partner.global_step, terms.seed, terms.phase))
        for side, partner in zip(sides, reversed(both), strict=True)
    ]
    if all(isinstance(reply, messages.SketchReady) for reply in replies):
        carry(sides, terms.number, File.OWN_SKETCH, File.PARTNER_SKETCH)
        replies = [side.answer(messages.Encode(terms.number)) for side in sides]
    assert all(isinstance(reply, messages.PayloadReady) for reply in replies), replies


def carry(sides: tuple[Side, Side], number: int, own: File, partner: File) -> None:
    for giver, taker in (sides, sides[::-1]):
        taker.put(number, partner, giver.get(number, own))


def checked(side: Side, number: int) -> messages.Checked:
    reply = side.answer(messages.Check(number))
    assert isinstance(reply, messages.Checked), reply
    return reply


def decide(sides: tuple[Side, Side], terms: Terms, failed_blocks: str = "") -> None:
    for side in sides:
        verdict = checked(side, terms.number)
        assert verdict.accepted, verdict.reason
        assert side.answer(messages.Apply(terms.number, terms.name, failed_blocks)) == messages.Applied(terms.number)


def meet(sides: tuple[Side, Side], terms: Terms, failed_blocks: str = "") -> None:
    """Hold a whole meeting; `failed_blocks` is the union that both sides agreed on."""
    exchange(sides, terms)
    decide(sides, terms, failed_blocks)
