"""What becomes of a fragment that is due: a meeting, or, when nobody can be met in time, what the manifest says."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from pathlib import Path

import pytest

from gossamer.peer.link import messages
from gossamer.peer.meeting.commands import Finish
from gossamer.peer.node.meetings import Meetings
from gossamer.protocol.errors import GossamerError, RefusalCode
from gossamer.protocol.identity import Identity, PeerId
from gossamer.protocol.messages.messages import Refusal, RunPhase
from gossamer.protocol.streams.transport import Purpose, Stream
from gossamer.protocol.tasks import cancel, loop_s
from tests.protocol.samples import changed
from tests.swarm.mallory import MALLORY, hello_to
from tests.swarm.tiny import tiny_manifest
from tests.swarm.world import Peer, Swarm

ADDRESS = "/ip4/192.0.2.1/tcp/4001"
RUN = {"total_steps": 100_000}
QUIET = tiny_manifest(run=RUN)
DUE = messages.Due(0, RunPhase.TRAIN)


@pytest.fixture
def swarm(tmp_path: Path) -> Swarm:
    return Swarm(tmp_path, manifest=QUIET)


async def still(swarm: Swarm) -> Peer:
    """A peer whose trainer makes no steps, so that nothing is due but what the test says."""
    peer = swarm.add()
    peer.trainer.frozen = True
    peer.start()
    await asyncio.sleep(1.0)
    return peer


def notified(peer: Peer, kind: type[messages.Solo] | type[messages.Defer]) -> list[int]:
    return [request.fragment for request in peer.link.reported if isinstance(request, kind)]


async def refuses(purpose: Purpose, stream: Stream) -> None:
    await stream.receive()
    await stream.send(Refusal(RefusalCode.STEP_TOO_FAR))


async def test_a_peer_without_partners_takes_a_solo_step_at_once(swarm: Swarm) -> None:
    peer = await still(swarm)
    peer.node.on_report(DUE)
    await asyncio.sleep(0.5)
    assert notified(peer, messages.Solo) == [0]


async def test_a_search_waits_for_its_partner_without_polling(monkeypatch: pytest.MonkeyPatch, swarm: Swarm) -> None:
    """The partner is in our other meeting, then in a back-off: each takes a few tries, however long it lasts."""
    tries = 0
    try_next = Meetings.try_next

    async def counted(meetings: Meetings, fragment: int, tried: set[PeerId]) -> Finish | None:
        nonlocal tries
        tries += 1
        return await try_next(meetings, fragment, tried)

    monkeypatch.setattr(Meetings, "try_next", counted)
    a, b = await still(swarm), await still(swarm)
    await swarm.until(lambda: a.lifecycle.may_meet and b.lifecycle.may_meet and bool(a.book.live(loop_s())))
    assert all(await asyncio.gather(*(a.node.searches.search(fragment) for fragment in range(3))))
    assert tries <= 10
    for _ in range(3):
        a.book.note_refusal(b.peer_id, loop_s())
    free_s, before = a.book.get(b.peer_id).backs_off_until_s, tries
    assert free_s > loop_s() + 3.0
    assert await a.node.searches.search(0)
    assert free_s <= loop_s() < free_s + 2.0 and tries - before <= 12


@pytest.mark.parametrize(
    ("no_partner", "kind", "other"), [("solo", messages.Solo, messages.Defer), ("defer", messages.Defer, messages.Solo)]
)
async def test_without_a_partner_by_the_deadline_the_manifest_decides(
    tmp_path: Path, no_partner: str, kind: type[messages.Solo] | type[messages.Defer], other: type[messages.Solo] | type[messages.Defer]
) -> None:
    async with Swarm(tmp_path, manifest=tiny_manifest(run=RUN, outer={"no_partner": no_partner})) as swarm:
        peer = await still(swarm)
        swarm.network.start_peer(MALLORY.peer_id, refuses)
        peer.book.add_address(MALLORY.peer_id, ADDRESS, loop_s())
        for _ in range(2):  # the second moves the goal of the search that is under way
            peer.node.on_report(DUE)
        await asyncio.sleep(1.0)
        assert not notified(peer, kind), "it did not try as long as it may"
        await asyncio.sleep(swarm.manifest.outer.deadline_s + 2.0)
        assert notified(peer, kind) == [0] and not notified(peer, other)
        assert len(peer.meetings) >= 2, "it asked only once"
        peer.node.on_report(DUE)  # a later one is searched for anew
        await asyncio.sleep(swarm.manifest.outer.deadline_s + 2.0)
        assert notified(peer, kind) == [0, 0]


async def test_one_caller_after_another_that_goes_silent_does_not_keep_a_fragment_from_its_solo_step(swarm: Swarm) -> None:
    peer = await still(swarm)
    peer.book.add_address(MALLORY.peer_id, ADDRESS, loop_s())
    swarm.network.start_peer(MALLORY.peer_id, refuses)

    async def pester() -> None:
        for number in itertools.count(100):
            caller = Identity(number.to_bytes(2, "little") * 16)
            hello = changed(hello_to(swarm, peer.peer_id), sender=caller.peer_id, signature=b"").signed(caller)
            stream = await swarm.network.start_peer(caller.peer_id, refuses).connect(peer.peer_id, (), Purpose.MEET)
            await stream.send(hello)
            with contextlib.suppress(GossamerError):
                while not isinstance(await stream.receive(), Refusal):
                    pass
            stream.close()

    task = asyncio.create_task(pester())
    await swarm.until(lambda: peer.node.meetings.active, within_s=5.0)
    peer.node.on_report(DUE)
    await asyncio.sleep(2 * swarm.manifest.outer.deadline_s + 5.0)
    assert notified(peer, messages.Solo)
    await cancel(task)


async def test_a_meeting_that_the_partner_began_satisfies_the_search(swarm: Swarm) -> None:
    a, b = await still(swarm), await still(swarm)
    for peer, other in ((a, b), (b, a)):
        peer.book.add_address(other.peer_id, ADDRESS, loop_s())
    a.book.note_not_ready(b.peer_id, loop_s())
    a.node.on_report(DUE)
    await b.node.meetings.try_next(0, set())
    await asyncio.sleep(15.0)
    assert a.num_completed == 1 and len(a.meetings) == 1 and not notified(a, messages.Solo)
