"""Resolve: it is repeated over refusals, restarts, silence and wrong answers until there is an answer about this meeting."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from gossamer.peer.meeting.driver import PAUSE_S, TRY_S, Caller
from gossamer.peer.swarm.address_book import AddressBook
from gossamer.protocol.memory.network import MemoryNetwork
from gossamer.protocol.messages.messages import Committed, Message, Outcome, Resolve
from gossamer.protocol.streams.transport import Purpose, Stream
from gossamer.protocol.tasks import loop_s
from tests.protocol.peers import nobody, seeded
from tests.protocol.samples import MEETING_ID, RUN_ID

A, B = seeded(1).peer_id, seeded(2).peer_id
ANSWER = Outcome(MEETING_ID, True, b"\x05")


class Partner:
    """Answers each Resolve by script: a message, or None for silence."""

    def __init__(self, *answers: Message | None) -> None:
        self.answers = list(answers)
        self.questions: list[Message] = []
        self.num_open = 0

    async def serve(self, purpose: Purpose, stream: Stream) -> None:
        self.num_open += 1
        try:
            self.questions.append(await stream.receive())
            answer = self.answers.pop(0)
            if answer is not None:
                await stream.send(answer)
            await stream.receive()  # until the other side closes
        finally:
            self.num_open -= 1


async def asked(partner: Partner, prepare: Callable[[MemoryNetwork], None] = lambda network: None) -> tuple[Outcome, float]:
    """Return the outcome and how long it took to learn."""
    network = MemoryNetwork()
    mine = network.start_peer(A, nobody)
    network.start_peer(B, partner.serve)
    prepare(network)
    outcome = await Caller(mine, AddressBook(A), RUN_ID).ask(B, MEETING_ID)
    took_s = loop_s()
    await asyncio.sleep(1.0)
    assert partner.num_open == 0  # no stream is left behind
    await network.close()
    return outcome, took_s


async def test_resolve_names_run_and_meeting_and_the_first_answer_is_taken() -> None:
    partner = Partner(ANSWER)
    outcome, took_s = await asked(partner)
    assert outcome == ANSWER and took_s < PAUSE_S
    assert partner.questions == [Resolve(RUN_ID, MEETING_ID)]


async def test_dropped_is_an_answer_too() -> None:
    outcome, _ = await asked(Partner(Outcome(MEETING_ID, False)))
    assert not outcome.is_committed


@pytest.mark.parametrize("wrong", [Committed(MEETING_ID), Outcome(b"x" * 16, True)], ids=repr)
async def test_an_answer_about_another_meeting_is_ignored(wrong: Message) -> None:
    partner = Partner(wrong, wrong, ANSWER)
    outcome, took_s = await asked(partner)
    assert outcome == ANSWER and len(partner.questions) == 3 and took_s >= 2 * PAUSE_S


async def test_resolve_is_sent_again_to_a_silent_partner() -> None:
    partner = Partner(None, ANSWER)
    outcome, took_s = await asked(partner)
    assert outcome == ANSWER and TRY_S <= took_s < TRY_S + 2 * PAUSE_S + 1.0


async def test_resolve_is_sent_again_until_the_partner_has_restarted() -> None:
    partner = Partner(ANSWER)

    def die(network: MemoryNetwork) -> None:
        network.kill(B)
        asyncio.get_running_loop().call_later(60.0, lambda: network.start_peer(B, partner.serve))

    outcome, took_s = await asked(partner, die)
    assert outcome == ANSWER and 60.0 <= took_s < 60.0 + TRY_S + 2 * PAUSE_S


async def test_resolve_is_repeated_until_it_is_cancelled() -> None:
    resolver = Caller(MemoryNetwork().start_peer(A, nobody), AddressBook(A), RUN_ID)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(300.0):
            await resolver.ask(B, MEETING_ID)
    assert loop_s() == pytest.approx(300.0)
