"""Caps on inbound streams. What a handler's failure and a silent opener lead to is in the transport contract."""

from __future__ import annotations

import asyncio
from typing import cast

from protocol.identity import PeerId
from protocol.memory import virtual_time
from protocol.streams.admission import Admission, Arriving, StreamCaps, first_frame
from protocol.streams.transport import Purpose
from tests.protocol.peers import seeded

A, B = seeded(1).peer_id, seeded(2).peer_id


def test_caps_hold_per_partner_and_purpose_and_in_all() -> None:
    admission = Admission(StreamCaps(per_purpose=2, total=4))

    def enter(partner: PeerId, purpose: Purpose) -> bool:
        place = admission.enter(partner, purpose)
        if place is not None:
            place.is_heard = True
        return place is not None

    assert enter(A, Purpose.MEET)
    assert enter(A, Purpose.MEET)
    assert not enter(A, Purpose.MEET)
    assert enter(A, Purpose.FETCH)
    assert enter(B, Purpose.MEET)
    assert not enter(B, Purpose.FETCH)


def test_a_place_is_free_again_after_leaving() -> None:
    admission = Admission(StreamCaps(per_purpose=1, total=1))
    for _ in range(3):
        place = admission.enter(A, Purpose.MEET)
        assert place is not None
        assert not admission.enter(A, Purpose.MEET)
        admission.leave(place)


class Opener:
    """A stream whose opener speaks when told to."""

    def __init__(self, partner: PeerId) -> None:
        self.partner = partner
        self.speaks = asyncio.Event()

    def stream(self) -> Arriving:
        return cast(Arriving, self)

    async def arrived(self) -> None:
        await self.speaks.wait()


def test_where_all_is_full_the_one_silent_longest_gives_way_and_nobody_else_does() -> None:
    async def main() -> None:
        admission = Admission(StreamCaps(per_purpose=2, total=3))
        openers = [Opener(seeded(number).peer_id) for number in range(1, 4)]
        openers[0].speaks.set()
        places = [admission.enter(opener.partner, Purpose.MEET) for opener in openers]
        waits = [asyncio.create_task(first_frame(opener.stream(), place)) for opener, place in zip(openers, places, strict=True) if place]
        assert await waits[0], "it has something to say"
        newcomer = admission.enter(seeded(9).peer_id, Purpose.MEET)
        assert newcomer is not None
        assert not await waits[1], "silent the longest"
        assert not waits[2].done()
        openers[2].speaks.set()
        assert await waits[2]
        newcomer.is_heard = True
        assert not admission.enter(seeded(10).peer_id, Purpose.MEET), "all are talking"
        for place in filter(None, places):
            admission.leave(place)  # also of the one that has lost it
        assert admission.enter(A, Purpose.MEET)

    virtual_time.run(main())


def test_a_place_that_is_lost_before_anybody_waits_is_lost_all_the_same() -> None:
    async def main() -> None:
        admission = Admission(StreamCaps(total=1))
        place = admission.enter(A, Purpose.MEET)
        assert place is not None
        assert admission.enter(B, Purpose.MEET)
        assert not await first_frame(Opener(A).stream(), place)
        assert asyncio.get_running_loop().time() < 1.0

    virtual_time.run(main())
