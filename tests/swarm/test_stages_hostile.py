"""Real nodes of a staged run beside a stranger with a valid key, and kills at any message of a hop."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from gossamer.peer.node import carrying
from gossamer.peer.pipeline import doubling
from gossamer.peer.pipeline.greeting import LaneSide
from gossamer.peer.pipeline.lane import FIRST_PATIENCE_S, FIRST_WINDOW, IDLE_S
from gossamer.peer.swarm.known_peer import HOP_S, PARTNER_HOPS
from gossamer.peer.swarm.membership import Membership, OwnCredential
from gossamer.protocol.errors import PeerGone, RefusalCode, Refused, TransportError, Unreachable
from gossamer.protocol.identity import Identity
from gossamer.protocol.limits import CHUNK_BYTES
from gossamer.protocol.messages.messages import Chunk, HopAnswer, HopForward, HopNotice, Lane, Message, NoticeKind, Opening, Part, RunPhase
from gossamer.protocol.messages.revocations import Revocation
from gossamer.protocol.messages.terms import FragmentTerms, ModelPlan, StageTerms
from gossamer.protocol.run.invite import Credential, Invite
from gossamer.protocol.run.manifest import Manifest, SignedManifest, StagedManifest
from gossamer.protocol.streams.admission import StreamCaps
from gossamer.protocol.streams.transport import Purpose, Stream
from gossamer.protocol.tasks import cancel, loop_s
from tests.swarm.claims import STRANGERS
from tests.swarm.holders import IN_BATCH, TOKEN_BYTES, VALUE_BYTES, Holder, StagedRun, play

MALLORY = Identity((5).to_bytes(4, "little") * 8)  # on the list of members, and in no test a holder


def membership(run: StagedRun, stage: int, who: Identity = MALLORY, credential: Credential | None = None) -> Membership:
    """Return what a member says of itself that holds a stage."""
    plan = ModelPlan(16, (FragmentTerms(0, 1000, 0),), 800, StageTerms(stage, run.manifest.num_stages, TOKEN_BYTES, VALUE_BYTES, IN_BATCH))
    return Membership.of(who, run.manifest, OwnCredential(credential)).with_plan(plan)


async def keep_calling(run: StagedRun, stranger: Identity, victim: Holder) -> None:
    """Hold a call to a victim that carries nothing, and call again whenever it ends."""
    while True:
        with suppress(TransportError, Refused):
            stream = await run.network.peers[stranger.peer_id].connect(victim.peer_id, (), Purpose.PASS)
            await stream.receive()
        await asyncio.sleep(1.0)


async def greeted(
    run: StagedRun, victim: int, stage: int, who: Identity = MALLORY, window: int = 1, credential: Credential | None = None
) -> Stream:
    """Open a lane to the holder of a stage, as the holder of another one."""
    await run.until(lambda: run.of(victim)[0].trainer.steps >= 2)

    async def refuse(purpose: Purpose, stream: Stream) -> None:
        stream.close()

    transport = run.network.start_peer(who.peer_id, refuse)
    stream: Stream = await transport.connect(run.of(victim)[0].peer_id, (), Purpose.PASS)
    global_step, now_s = run.of(victim)[0].trainer.steps, run.network.now_s()
    own = LaneSide(membership(run, stage, who, credential), global_step, RunPhase.TRAIN, window, (), now_s)
    await own.open(stream, victim + 1, random.Random(1))
    return stream


def forward(number: int) -> Iterator[Message]:
    yield HopForward(number, bytes([number]) * 16, False, 0)
    yield Chunk(Part.TOKENS, 0, bytes(TOKEN_BYTES))
    for offset in range(0, VALUE_BYTES, CHUNK_BYTES):
        yield Chunk(Part.ACTIVATIONS, offset, bytes(min(CHUNK_BYTES, VALUE_BYTES - offset)))


def bad_forward(last: Message) -> Callable[[], list[Message]]:
    return lambda: [*list(forward(1))[:3], last]


HOSTILE: dict[str, Callable[[], list[Message]]] = {
    "too long": bad_forward(Chunk(Part.ACTIVATIONS, CHUNK_BYTES, bytes(VALUE_BYTES - CHUNK_BYTES + 1))),
    "out of order": bad_forward(Chunk(Part.ACTIVATIONS, CHUNK_BYTES + 1, b"x")),
    "another part": bad_forward(Chunk(Part.GRADIENT, 0, b"x")),
    "over credit": lambda: [message for number in range(1, 40) for message in forward(number)],
    "an answer from below": lambda: [HopAnswer(1, 1.0, 1, 0)],
    "a notice from above": lambda: [HopNotice(1, NoticeKind.DELAYED)],
    "another greeting": lambda: [*forward(1), membership_lane()],
}


def membership_lane() -> Lane:
    opening = Opening(4, bytes(32), MALLORY.peer_id, MALLORY.peer_id, bytes(16), stage=1)
    return Lane(opening, 0, RunPhase.TRAIN, 0).signed(MALLORY)


@pytest.mark.parametrize("how", HOSTILE)
def test_a_lower_holder_that_breaks_the_rules_is_banned_and_nothing_else_suffers(how: str, tmp_path: Path) -> None:
    async def story(run: StagedRun) -> None:
        stream, last = await greeted(run, victim=1, stage=0), run.of(1)[0]
        with pytest.raises(PeerGone):
            for message in HOSTILE[how]():
                await stream.send(message)
            while True:
                await stream.receive()
        await asyncio.sleep(1.0)
        assert last.peer.is_banned(MALLORY.peer_id)
        steps = last.trainer.steps
        await run.until(lambda: last.trainer.steps > steps + 3, 20.0)
        assert not last.peer.is_banned(run.of(0)[0].peer_id)
        with pytest.raises((Unreachable, Refused, PeerGone)):
            await greeted(run, victim=1, stage=0)

    play(StagedRun(tmp_path, 2, 2), story)


def test_a_lower_holder_that_reads_nothing_loses_its_lane(tmp_path: Path) -> None:
    """It sends one micro-batch again and again, and reads neither the answer nor the notices that the others are known."""

    async def story(run: StagedRun) -> None:
        stream, last = await greeted(run, victim=1, stage=0), run.of(1)[0]
        with pytest.raises(PeerGone):
            for number in range(1, 600):
                for message in forward(1):
                    await stream.send(HopForward(number, b"n" * 16, False, 0) if isinstance(message, HopForward) else message)
        await run.until(lambda: all(lane.lane.partner != MALLORY.peer_id for lane in last.pipeline.lanes.values()), 60.0)
        assert not last.peer.is_banned(MALLORY.peer_id)
        steps = last.trainer.steps
        await run.until(lambda: last.trainer.steps > steps + 3, 20.0)

    play(StagedRun(tmp_path, 2, 2), story)


def test_a_silent_last_stage_costs_little_and_the_honest_middle_keeps_its_lane(tmp_path: Path) -> None:
    async def story(run: StagedRun) -> None:
        driver, middle = run.of(0)[0], run.of(1)[0]
        await greeted(run, victim=1, stage=2, window=1024)
        (lane,) = driver.pipeline.lanes
        silent = [one for one in middle.pipeline.carrier.down.values() if one.partner == MALLORY.peer_id]
        assert len(silent) == 1
        steps, began_s = driver.trainer.steps, asyncio.get_running_loop().time()
        while silent[0].number in middle.pipeline.carrier.down:
            assert len(silent[0].unanswered) <= FIRST_WINDOW
            await asyncio.sleep(0.1)
            run.check()
        assert asyncio.get_running_loop().time() - began_s < FIRST_PATIENCE_S
        await run.until(lambda: driver.trainer.steps > steps + 3, 20.0)
        assert list(driver.pipeline.lanes) == [lane]

    play(StagedRun(tmp_path, 3, 3), story)


@pytest.mark.parametrize("stage", [1, 3])
def test_a_lane_from_a_stage_that_is_no_neighbour_is_refused(stage: int, tmp_path: Path) -> None:
    async def story(run: StagedRun) -> None:
        with pytest.raises(Refused) as caught:
            await greeted(run, victim=1, stage=stage)
        assert caught.value.code is RefusalCode.WRONG_TERMS
        assert not run.of(1)[0].peer.is_banned(MALLORY.peer_id)

    play(StagedRun(tmp_path, 2, 2), story)


OTHERS = [Identity(number.to_bytes(4, "little") * 8) for number in (3, 4)]  # members that are holders in no test of two holders


async def is_refused(run: StagedRun, victim: int, stage: int, who: Identity) -> bool:
    try:
        await greeted(run, victim, stage, who)
    except Refused as refused:
        assert refused.code is RefusalCode.BUSY
        return True
    return False


@pytest.mark.parametrize(("victim", "limit"), [(0, "MOST_INBOUND_DOWN_LANES"), (1, "MOST_UP_LANES")])
def test_idle_lanes_of_strangers_make_room(victim: int, limit: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lane that carries hops stays."""
    monkeypatch.setattr(carrying, limit, 1 + victim)  # beside the lane of the two holders: one

    async def story(run: StagedRun) -> None:
        (holder,), (partner,) = run.of(victim), run.of(1 - victim)
        await run.until(lambda: holder.trainer.steps >= 2)
        holder.carrying._greeting[MALLORY.peer_id] = victim == 1
        assert await is_refused(run, victim, 1 - victim, OTHERS[0]), "a call that is being answered counts"
        del holder.carrying._greeting[MALLORY.peer_id]
        refused = await asyncio.gather(*(is_refused(run, victim, 1 - victim, who) for who in OTHERS))
        assert sorted(refused) == [False, True]
        late = OTHERS[refused.index(True)]
        assert await is_refused(run, victim, 1 - victim, late)
        await asyncio.sleep(2 * IDLE_S)  # a stranger above that takes a hop is waited for first
        assert not await is_refused(run, victim, 1 - victim, late)
        await asyncio.sleep(1.0)
        assert {one.lane.partner for one in holder.pipeline.lanes.values()} == {partner.peer_id, late.peer_id}

    play(StagedRun(tmp_path, 2, 2), story)


def test_an_idle_lane_of_the_largest_group_makes_room_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two networks, the one that has two idle lanes loses its older one, though the other network's lane is idle for longer."""

    async def story(run: StagedRun) -> None:
        (holder,) = run.of(1)
        alone, *alike, late = [Identity(number.to_bytes(4, "little") * 8) for number in (4, 5, 6, 7)]
        run.network.places |= {alone.peer_id: "/ip4/192.0.2.9/tcp/1"} | {who.peer_id: "/ip4/198.51.100.9/tcp/1" for who in alike}
        await run.until(lambda: len(holder.pipeline.carrier.up) == 2)
        monkeypatch.setattr(carrying, "MOST_UP_LANES", 5)
        for who in (alone, *alike):
            await greeted(run, 1, 0, who)
            await asyncio.sleep(1.0)
        await asyncio.sleep(IDLE_S)
        await greeted(run, 1, 0, late)
        await asyncio.sleep(1.0)
        kept = {one.lane.partner for one in holder.pipeline.lanes.values()}
        assert kept >= {alone.peer_id, alike[1].peer_id, late.peer_id} and alike[0].peer_id not in kept

    run = StagedRun(tmp_path, 2, 3)
    for holder, stage in zip(run.holders, (0, 1, 0), strict=True):
        holder.fits = (stage,)
    play(run, story)


def test_a_slow_mate_keeps_no_holder_of_another_stage_in_its_network_out(tmp_path: Path) -> None:
    """Turns are those of meetings: only mates have them."""

    async def story(run: StagedRun) -> None:
        holder, *mates = run.of(1)
        run.network.places[MALLORY.peer_id] = place = "/ip4/198.51.100.9/tcp/1"
        (await greeted(run, 1, 0)).close()
        await asyncio.sleep(2 * carrying.YOUNG_S)
        book = holder.peer.book
        for mate, took_s in zip(mates, (60.0, 1.0), strict=True):
            book.note_meeting(mate.peer_id, loop_s(), 0, took_s=took_s)
        book.connected(mates[0].peer_id, place)
        book.note_held(mates[0].peer_id, loop_s(), 60.0)
        assert not book.is_welcome(MALLORY.peer_id, loop_s())
        assert not await is_refused(run, 1, 0, MALLORY)

    run = StagedRun(tmp_path, 2, 4)
    for holder, stage in zip(run.holders, (0, 1, 1, 1), strict=True):
        holder.fits = (stage,)
    play(run, story)


async def keep_sending(stream: Stream) -> None:
    """Send a hop, wait for its answer, and again."""
    with suppress(PeerGone):
        for number in range(1, 10_000):
            for message in forward(1):
                await stream.send(HopForward(number, random.randbytes(16), False, 0) if isinstance(message, HopForward) else message)
            while not isinstance(await stream.receive(), HopAnswer | HopNotice):
                pass


def test_identities_of_one_network_keep_no_other_lower_holder_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their lanes carry hops all the time, so none is idle."""

    async def story(run: StagedRun) -> None:
        (holder,) = run.of(1)
        *alike, late, other = [Identity(number.to_bytes(4, "little") * 8) for number in (3, 4, 5, 6, 7)]
        run.network.places |= {who.peer_id: "/ip4/198.51.100.9/tcp/1" for who in (*alike, other)}
        await run.until(lambda: len(holder.pipeline.carrier.up) == 1)
        monkeypatch.setattr(carrying, "MOST_UP_LANES", 4)
        work = [asyncio.create_task(keep_sending(await greeted(run, 1, 0, who))) for who in alike]
        await asyncio.sleep(IDLE_S + 5.0)
        assert await is_refused(run, 1, 0, other), "one more of that network"
        assert not await is_refused(run, 1, 0, late)
        await asyncio.sleep(1.0)
        kept = {one.lane.partner for one in holder.pipeline.lanes.values()}
        assert kept >= {run.of(0)[0].peer_id, late.peer_id} and len(kept) == 4
        await cancel(*work)

    play(StagedRun(tmp_path, 2, 2, others=[Identity(number.to_bytes(4, "little") * 8) for number in (6, 7)]), story)


def test_lanes_that_strangers_open_from_above_replace_none_of_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(carrying, "DOWN_LANES", 2)
    monkeypatch.setattr(carrying, "UNCALLED_S", 1e6)  # the newcomer calls nobody itself

    async def story(run: StagedRun) -> None:
        (first,) = run.of(0)
        await greeted(run, 0, 1, MALLORY)
        await greeted(run, 0, 1, OTHERS[1])
        newcomer = run.add(fits=(1,)).start()
        await run.until(lambda: newcomer.peer_id in [lane.partner for lane in first.carrying._called_down], 20.0)

    play(StagedRun(tmp_path, 2, 2), story)


@pytest.mark.parametrize(("victim", "how"), [(0, "revoked"), (1, "revoked"), (1, "expired"), (0, "banned"), (1, "banned")])
def test_a_holder_loses_its_lanes_with_its_membership_and_by_a_ban(victim: int, how: str, tmp_path: Path) -> None:
    run = StagedRun(tmp_path, 2, 2)
    host = run.holders[0].identity
    access = {"access": "invite", "issuers": [str(holder.peer_id) for holder in run.holders], "total_steps": 1_000_000}
    manifest = Manifest.checked({"run": access, "stages": {"count": 2}})
    assert isinstance(manifest, StagedManifest)
    run.manifest, run.signed = manifest, SignedManifest.sign(manifest, host)

    async def story(run: StagedRun) -> None:
        (holder,) = run.of(victim)
        not_after_s = int(run.network.now_s()) + (60 if how == "expired" else 3600)
        invite = Invite.issue(host, manifest.run_id, (f"/ip4/192.0.2.1/tcp/1/p2p/{host.peer_id}",), None, not_after_s)
        await greeted(run, victim, 1 - victim, credential=invite.credential_for(MALLORY.peer_id))
        await asyncio.sleep(5.0)
        assert MALLORY.peer_id in [one.lane.partner for one in holder.pipeline.lanes.values()]
        if how == "banned":
            holder.peer.book.ban(MALLORY.peer_id, loop_s(), "it gives values that are not finite")  # to its ward, in another stream
        if how == "revoked":
            holder.carrying.membership.terms.revocations.add(Revocation(manifest.run_id, host.peer_id, MALLORY.peer_id, 1).signed(host))
        await asyncio.sleep(60.0 if how == "expired" else 3.0)
        assert MALLORY.peer_id not in [one.lane.partner for one in holder.pipeline.lanes.values()]
        assert holder.pipeline.lanes, "the lanes of members stay"

    play(run, story)


def one_driver(folder: Path, num_above: int, service_s: float = 0.2) -> StagedRun:
    """One holder of the first of two stages, and several of the second, the last one dishonest; each second hop is doubled."""
    run = StagedRun(folder, 2, 1 + num_above)
    for number, holder in enumerate(run.holders):
        holder.fits, holder.service_s = (min(number, 1),), service_s
    return run


def test_a_holder_whose_answers_are_unlike_those_of_others_rests_for_ten_minutes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doubling, "EVERY", 2)

    async def story(run: StagedRun) -> None:
        driver, *honest, liar = run.holders
        liar.trainer.lies = True
        await run.until(lambda: driver.shunned, 120.0)
        (shunned,) = driver.shunned
        assert shunned.partner == str(liar.peer_id)
        assert "answered 3 micro-batches unlike other holders of stage 2 of 2: other bytes" in shunned.reason
        assert shunned.reason.endswith("the partner rests for 10 min")
        assert shunned.until is not None and abs(shunned.until - run.network.now_s() - 600.0) < 2.0
        await asyncio.sleep(1.0)
        began_s, steps = asyncio.get_running_loop().time(), driver.trainer.steps
        while asyncio.get_running_loop().time() < began_s + 590.0:
            assert {one.lane.partner for one in driver.pipeline.lanes.values()} <= {one.peer_id for one in honest}
            await asyncio.sleep(5.0)
        assert driver.trainer.steps > steps + 100 and not driver.peer.is_banned(liar.peer_id)
        assert driver.peer.book.is_welcome(liar.peer_id, asyncio.get_running_loop().time() + 10.0), "the rest ends"
        assert 3 <= driver.status.hops["odd"] <= driver.status.hops["compared"] and not driver.warnings.get("answers")

    play(one_driver(tmp_path, 3, service_s=0.5), story)


def test_of_two_holders_nobody_can_tell_and_the_operator_hears_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doubling, "EVERY", 4)

    async def story(run: StagedRun) -> None:
        driver, honest, liar = run.holders
        liar.trainer.lies = True
        await run.until(lambda: driver.warnings.get("answers"), 120.0)
        words = driver.warnings["answers"]
        assert honest.peer_id.short() in words and liar.peer_id.short() in words and "invite another peer" in words
        steps = driver.trainer.steps
        await run.until(lambda: driver.trainer.steps > steps + 3)
        assert not driver.shunned
        liar.trainer.lies = False
        await run.until(lambda: not driver.warnings["answers"], 120.0)

    play(one_driver(tmp_path, 2), story)


def test_where_all_have_one_invite_each_peer_stands_for_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A dishonest peer that is alone is found there too; two that work together are not."""
    monkeypatch.setattr(doubling, "EVERY", 2)

    async def story(run: StagedRun) -> None:
        driver, *_, liar = run.holders
        monkeypatch.setattr(type(driver.carrying.groups), "names", lambda self, entries: {entry.peer_id: "invite" for entry in entries})
        liar.trainer.lies = True
        await run.until(lambda: driver.shunned, 120.0)
        assert driver.shunned[0].partner == str(liar.peer_id)

    play(one_driver(tmp_path, 3), story)


def test_a_driver_whose_micro_batches_all_others_oppose_rests_for_ten_minutes(tmp_path: Path) -> None:
    async def story(run: StagedRun) -> None:
        *drivers, last = run.holders
        await run.until(lambda: len(last.trainer.sources - {""}) == 3, 60.0)
        groups = last.pipeline.carrier.doubling.groups
        (hostile,) = (driver for driver in drivers if groups[driver.peer_id] == max(groups.values()))
        last.trainer.opposes = groups[hostile.peer_id]
        await run.until(lambda: last.shunned, 60.0)
        (shunned,) = last.shunned
        assert shunned.partner == str(hostile.peer_id)
        assert "sends micro-batches that lead the weights against those of all other holders of stage 1 of 2: other bytes" in shunned.reason
        assert shunned.reason.endswith("the partner rests for 10 min")
        began_s, steps = asyncio.get_running_loop().time(), last.trainer.steps
        while asyncio.get_running_loop().time() < began_s + 590.0:
            await asyncio.sleep(5.0)
            assert hostile.peer_id not in {one.lane.partner for one in last.pipeline.lanes.values()}
        assert last.trainer.steps > steps + 100 and len(last.shunned) == 1 and not last.peer.is_banned(hostile.peer_id)
        last.trainer.opposes = ""
        await run.until(lambda: hostile.peer_id in {one.lane.partner for one in last.pipeline.lanes.values()}, 120.0)

    run = StagedRun(tmp_path, 2, 4)
    for number, holder in enumerate(run.holders):
        holder.fits, holder.service_s = (number // 3,), 0.5  # minutes pass with few events
    play(run, story)


def test_strangers_whose_lanes_carry_nothing_take_no_share_of_the_window(tmp_path: Path) -> None:
    async def story(run: StagedRun) -> None:
        (driver,), (last,) = run.of(0), run.of(1)
        await run.until(lambda: last.pipeline.carrier.capacity.total == last.pipeline.carrier.capacity.most)
        for number in range(3, 6):
            await greeted(run, 1, 0, Identity(number.to_bytes(4, "little") * 8))
        steps = driver.trainer.steps
        await run.until(lambda: driver.trainer.steps > steps + 3)
        assert [lane.window for lane in driver.pipeline.carrier.down.values()] == [last.pipeline.carrier.capacity.most]

    play(StagedRun(tmp_path, 2, 2), story)


def test_a_partner_that_has_carried_hops_is_no_stranger_and_one_that_only_opens_a_lane_is(tmp_path: Path) -> None:
    async def story(run: StagedRun) -> None:
        (driver,), (last,) = run.of(0), run.of(1)
        await run.until(lambda: last.peer.has_met(driver.peer_id) and driver.peer.has_met(last.peer_id))
        stream = await greeted(run, 1, 0)
        await stream.send(HopForward(1, b"n" * 16, False, 0))
        await asyncio.sleep(5.0)
        assert not last.peer.has_met(MALLORY.peer_id)
        stream.close()
        await asyncio.sleep(1.0)
        assert not last.peer.has_met(MALLORY.peer_id)

    play(StagedRun(tmp_path, 2, 2), story)


def test_a_single_hop_makes_no_partner(tmp_path: Path) -> None:
    async def story(run: StagedRun) -> None:
        (last,) = run.of(1)
        stream = await greeted(run, 1, 0)
        for message in forward(1):
            await stream.send(message)
        while not isinstance(await stream.receive(), HopAnswer):
            pass
        await asyncio.sleep(1.0)
        stream.close()
        await asyncio.sleep(1.0)
        entry = last.peer.book.get(MALLORY.peer_id)
        assert entry.has_carried and not entry.is_partner and not last.peer.has_met(MALLORY.peer_id)

    play(StagedRun(tmp_path, 2, 2), story)


def test_holders_of_a_new_run_find_each_other_among_many_silent_strangers(tmp_path: Path) -> None:
    """No holder is a partner yet. Strangers hold all places for strangers, and each stranger calls again as soon as it is sent away."""

    async def story(run: StagedRun) -> None:
        async def refuse(purpose: Purpose, stream: Stream) -> None:
            stream.close()

        victims = list(run.holders)
        for stranger in STRANGERS:
            run.network.start_peer(stranger.peer_id, refuse)
        crowd = [asyncio.create_task(keep_calling(run, stranger, victim)) for stranger in STRANGERS for victim in victims]
        await asyncio.sleep(2.0)
        for victim in victims:
            admission = run.network.peers[victim.peer_id].admission
            assert sum(admission.is_calling(stranger.peer_id) for stranger in STRANGERS) >= StreamCaps().strangers - len(victims)
        late = run.add(fits=(1,)).start()
        await run.until(lambda: all(holder.is_training and holder.trainer.steps >= 2 for holder in run.holders), 120.0)
        await run.until(lambda: any(driver.peer.has_met(late.peer_id) for driver in run.of(0)), 2 * PARTNER_HOPS * HOP_S)
        for task in crowd:
            task.cancel()
        for stranger in STRANGERS:
            run.network.kill(stranger.peer_id)

    play(StagedRun(tmp_path, 2, 4, others=STRANGERS), story)


@pytest.mark.parametrize(("stage", "seed"), [(stage, seed) for stage in range(3) for seed in range(4)])
def test_a_kill_at_any_message_of_a_hop(stage: int, seed: int, tmp_path: Path) -> None:
    """Whatever message a holder dies at: nobody adds twice, drivers go on, and a run that rests keeps no hop and no file."""

    async def story(run: StagedRun) -> None:
        rng = random.Random(f"{stage}/{seed}")
        victim = rng.choice(run.of(stage))
        run.network.counted = frozenset({Purpose.PASS})
        side = rng.choice(("sent", "received"))
        counts = run.network.counts[victim.peer_id]
        at = getattr(counts, f"num_{side}") + rng.randint(1, 60)
        run.network.kill_at(victim.peer_id, **{side: at}, is_delivered=rng.random() < 0.5)
        await run.until(lambda: not run.network.is_up(victim.peer_id), 60.0)
        drivers = [holder for holder in run.of(0) if holder is not victim]
        before = {driver.peer_id: driver.trainer.steps for driver in drivers}
        await run.until(lambda: all(driver.trainer.steps > before[driver.peer_id] + 1 for driver in drivers), 30.0)
        victim.start()
        await run.until(lambda: victim.is_training and victim.trainer.steps >= 1, 60.0)
        for driver in run.of(0):
            driver.peer.stop()
        await asyncio.sleep(20.0)
        for holder in run.holders:
            assert holder.pipeline.carrier.is_quiet and not list(holder.payloads.path("").glob("hop-*"))

    play(StagedRun(tmp_path, 3, 6, seed), story)
