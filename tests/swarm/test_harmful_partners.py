"""Partners by their records: a harmful one is refused, rests, is not called and costs next to nothing; honest ones never rest.

The verdicts on messages are the test's own: what a probe finds is tested elsewhere.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from gossamer.peer.link import messages
from gossamer.peer.swarm.partner_records import GOOD_PROBES, RESTS_S, Trust
from gossamer.protocol.identity import PeerId
from tests.swarm.sybils import HOST, credential_of
from tests.swarm.tiny import tiny_manifest
from tests.swarm.world import Peer, Swarm, play

QUIET = tiny_manifest(run={"total_steps": 100_000})
INVITES = tiny_manifest(run={"total_steps": 100_000, "access": "invite", "issuers": [str(HOST.peer_id)]})
EVIDENCE = "it would raise the loss on our text by 0.3 nats"
Verdict = Callable[[PeerId, messages.Checked], messages.Checked]


def judge(peer: Peer, verdict: Verdict) -> None:
    """Have a peer's trainer find this about its partners' messages."""

    def spoil(reply: messages.Reply) -> messages.Reply:
        if not isinstance(reply, messages.Checked) or not reply.accepted:
            return reply
        meetings = (active.meeting for active in peer.node.meetings.active.values())
        return verdict(next(meeting.partner for meeting in meetings if meeting.number == reply.meeting), reply)

    peer.trainer.spoil = spoil


def honest(seed: str, rate: float = 0.0) -> Verdict:
    """Gains as measured between honest peers; a share of the messages is refused by chance."""
    draws = random.Random(seed)

    def verdict(partner: PeerId, checked: messages.Checked) -> messages.Checked:
        is_refused = draws.random() < rate
        return replace(refused(checked) if is_refused else checked, gain=0.02, deviation=draws.gauss(0.0, 1.0))

    return verdict


def refused(checked: messages.Checked) -> messages.Checked:
    return replace(checked, accepted=False, reason=EVIDENCE, is_harmful=True, gain=-0.3, failed_blocks="")


def refusing(bad: PeerId, other: Verdict) -> Verdict:
    return lambda partner, checked: refused(checked) if partner == bad else other(partner, checked)


def with_bad(peer: Peer, bad: Peer) -> list[int]:
    """The bytes of a peer's meetings with another, as far as its events report them."""
    return [done.bytes_sent + done.bytes_received for done in peer.meetings if done.partner == str(bad.peer_id)]


async def acquainted(swarm: Swarm, peers: int | list[Peer]) -> list[Peer]:
    """Start these peers, or so many, with trainers that only answer, so that the hours of a story pass quickly."""
    peers = [swarm.add(step_s=1.0) for _ in range(peers)] if isinstance(peers, int) else peers
    for peer in peers:
        peer.trainer.frozen = True
        peer.start()
    await swarm.until(lambda: all(peer.peer.node and peer.lifecycle.may_meet for peer in peers))
    for peer in peers:
        for other in peers:
            peer.book.add_address(other.peer_id, "/ip4/192.0.2.1/tcp/4001", asyncio.get_running_loop().time())
    return peers


async def meet(peers: list[Peer], until: Callable[[], object], *, fragments: int = 1, most_turns: int = 60) -> None:
    """Have every peer look for partners in turns of some 20 s, until something holds."""
    for _ in range(most_turns):
        if until():
            return
        await asyncio.gather(*(peer.node.searches.search(fragment) for peer in peers for fragment in range(fragments)))
        await asyncio.sleep(15.0)
    assert until(), "it did not come to pass"


def test_a_harmful_partner_is_refused_rests_is_not_called_and_costs_no_bytes(tmp_path: Path) -> None:
    async def story(swarm: Swarm) -> None:
        bad, *good = peers = await acquainted(swarm, 4)
        for peer in good:
            judge(peer, refusing(bad.peer_id, honest(str(peer.peer_id))))
        judge(bad, honest("bad"))
        await meet(peers, lambda: all(len(peer.shunned) == 3 for peer in good))
        for peer in good:
            for number, shunned in enumerate(peer.shunned, 1):
                assert shunned.partner == str(bad.peer_id) and f"{bad.peer_id.short()} sent a harmful message" in shunned.reason
                assert EVIDENCE in shunned.reason and f"number {number}" in shunned.reason and "rests for" in shunned.reason
            assert "4.0 hours" in peer.shunned[2].reason
            assert [
                late.until - early.until >= rest_s for early, late, rest_s in zip(peer.shunned, peer.shunned[1:], RESTS_S[1:], strict=False)
            ]
        spent, completed = [with_bad(peer, bad) for peer in good], [peer.num_completed for peer in good]
        num_before, turns = len(bad.meetings), iter(range(11))
        await meet(peers, lambda: next(turns, 99) == 10)
        assert [with_bad(peer, bad) for peer in good] == spent, "it was met, or called"
        assert all(peer.num_completed > count + 5 for peer, count in zip(good, completed, strict=True))
        assert not bad.partners() and not any(peer.partners()[str(bad.peer_id)] for peer in good)
        assert len(bad.meetings) > num_before, "it never tried"
        for done in bad.meetings[num_before:]:
            assert done.outcome == "refused" and "GATE" in done.reason
            assert "3 messages would have raised the loss" in done.reason and "hours" in done.reason
            assert done.bytes_received < 0.05 * max(spent[0]), "it received more than a refusal"

    play(Swarm(tmp_path, manifest=QUIET), story)


def test_a_rest_outlives_a_restart(tmp_path: Path) -> None:
    async def story(swarm: Swarm) -> None:
        bad, victim, other = peers = await acquainted(swarm, 3)
        judge(victim, refusing(bad.peer_id, honest("victim")))
        await meet(peers, lambda: len(victim.shunned) == 3 and not victim.peer.records.trust(other.peer_id).must_probe)
        victim.peer.partner_file.save()
        trust, until_s = victim.peer.records.trust(other.peer_id), victim.peer.records.rests_until_s(bad.peer_id)
        victim.save()
        victim.kill()
        await asyncio.sleep(5.0)
        victim.start()
        victim.trainer.frozen = True
        judge(victim, refusing(bad.peer_id, honest("victim")))
        await swarm.until(lambda: victim.peer.node and victim.lifecycle.may_meet)
        assert victim.peer.records.trust(other.peer_id) == trust == Trust(False, 1.0, 1.0)
        assert victim.peer.records.rests_until_s(bad.peer_id) == until_s > swarm.network.now_s() + 60.0
        count, spent = victim.num_completed, with_bad(victim, bad)
        await meet(peers, lambda: victim.num_completed > count + 2)
        assert swarm.network.now_s() < until_s and with_bad(victim, bad) == spent

    play(Swarm(tmp_path, manifest=QUIET), story)


def test_honest_peers_never_rest_and_come_to_be_trusted(tmp_path: Path) -> None:
    async def story(swarm: Swarm) -> None:
        peers = await acquainted(swarm, 3)
        for peer in peers:
            judge(peer, honest(str(peer.peer_id)))

        def have_met() -> bool:
            return all(len(peer.partners()) == 2 and min(peer.partners().values()) >= GOOD_PROBES for peer in peers)

        await meet(peers, have_met, fragments=3)
        pairs = [(peer.peer.records, other.peer_id) for peer in peers for other in peers if other is not peer]
        assert sum(records.trust(other).must_probe for records, other in pairs) <= 1
        assert not any(records.is_shunned(other, swarm.network.now_s()) for records, other in pairs)
        assert not any(peer.shunned or peer.outcomes()["gated"] for peer in peers)

    play(Swarm(tmp_path, manifest=QUIET), story)


def test_a_peer_whose_only_partner_rests_steps_alone_at_once(tmp_path: Path) -> None:
    async def story(swarm: Swarm) -> None:
        bad, victim = swarm.start(2, step_s=1.0)
        judge(victim, refusing(bad.peer_id, honest("victim")))
        await swarm.until(lambda: len(victim.shunned) == 2, within_s=400.0)
        solo = len(victim.trainer.solo)
        await asyncio.sleep(60.0)
        assert len(victim.trainer.solo) >= solo + 24, "it waits for a partner that rests"
        assert all(fragment.meeting is None for fragment in victim.trainer.replica.fragments)

    play(Swarm(tmp_path, manifest=QUIET), story)


def test_a_partner_that_always_rejects_our_messages_rests_too(tmp_path: Path) -> None:
    async def story(swarm: Swarm) -> None:
        bad, *good = peers = await acquainted(swarm, 3)
        judge(bad, lambda partner, checked: replace(checked, accepted=False, reason="no", failed_blocks=""))
        for peer in good:
            judge(peer, honest(str(peer.peer_id)))
        turns = iter(range(26))
        await meet(peers, lambda: next(turns, 99) == 25)
        for peer in good:
            whole = max(with_bad(peer, bad))
            assert len([num for num in with_bad(peer, bad) if num > 0.5 * whole]) <= 8, "an exchange each time"
            assert peer.num_completed > 13 and not peer.shunned

    play(Swarm(tmp_path, manifest=QUIET), story)


def test_new_keys_of_an_invite_are_soon_refused_at_their_hello_and_its_proven_member_is_met(tmp_path: Path) -> None:
    async def story(swarm: Swarm) -> None:
        made = [swarm.add(step_s=1.0) for _ in range(8)]
        for number, peer in enumerate(made):
            peer.join_with(credential_of(swarm, peer.identity, invite=1), place=1 + number)
        victim, proven, *keys = await acquainted(swarm, made)
        harmful = {key.peer_id for key in keys}
        ordinary = honest("victim")
        judge(victim, lambda partner, checked: refused(checked) if partner in harmful else ordinary(partner, checked))
        everybody = {peer.peer_id for peer in swarm.peers}
        for _ in range(3):
            await proven.node.meetings.try_next(0, everybody - {victim.peer_id})
            await asyncio.sleep(1.0)
        assert proven.partners()[str(victim.peer_id)] >= 2
        for key in keys:
            key.peer.book.note_meeting(victim.peer_id, asyncio.get_running_loop().time(), 0)
            await key.node.meetings.try_next(0, everybody - {victim.peer_id})
            await asyncio.sleep(1.0)
        reasons = [key.meetings[-1].reason for key in keys]
        assert [EVIDENCE in reason for reason in reasons] == [True] * 3 + [False] * 3
        assert all("peers with the same invite or network sent harmful messages" in reason for reason in reasons[3:])
        await proven.node.meetings.try_next(0, everybody - {victim.peer_id})
        assert proven.meetings[-1].outcome == "completed"

    play(Swarm(tmp_path, manifest=INVITES), story)
