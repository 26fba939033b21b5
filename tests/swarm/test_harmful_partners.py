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
from tests.swarm.tiny import tiny_manifest
from tests.swarm.world import Peer, Swarm, play

QUIET = tiny_manifest(run={"total_steps": 100_000})
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
        return replace(refused(checked) if is_refused else checked, gain=draws.gauss(0.02, 0.04), noise=0.03)

    return verdict


def refused(checked: messages.Checked) -> messages.Checked:
    return replace(checked, accepted=False, reason=EVIDENCE, is_harmful=True, gain=-0.3, failed_blocks="")


def refusing(bad: PeerId, other: Verdict) -> Verdict:
    return lambda partner, checked: refused(checked) if partner == bad else other(partner, checked)


def with_bad(peer: Peer, bad: Peer) -> list[int]:
    """The bytes of a peer's meetings with another, as far as its events report them."""
    return [done.bytes_sent + done.bytes_received for done in peer.meetings if done.partner == str(bad.peer_id)]


def test_a_harmful_partner_is_refused_rests_is_not_called_and_costs_no_bytes(tmp_path: Path) -> None:
    async def story(swarm: Swarm) -> None:
        bad, *good = swarm.start(4, step_s=1.0)
        for peer in good:
            judge(peer, refusing(bad.peer_id, honest(str(peer.peer_id))))
        judge(bad, honest("bad"))
        await swarm.until(lambda: all(len(peer.shunned) == 3 for peer in good), within_s=1500.0)
        for peer in good:
            for number, (shunned, rest_s) in enumerate(zip(peer.shunned, RESTS_S, strict=False), 1):
                assert abs(shunned.until - shunned.ts - rest_s) < 1.0 or shunned.until > swarm.network.now_s() - 1500.0
                assert shunned.partner == str(bad.peer_id) and EVIDENCE in shunned.reason
                assert bad.peer_id.short() in shunned.reason and f"number {number}" in shunned.reason and "rests for" in shunned.reason
            assert "4.0 hours" in peer.shunned[2].reason
        spent, completed = [with_bad(peer, bad) for peer in good], [peer.outcomes()["completed"] for peer in good]
        refusals = len([done for done in bad.meetings if done.outcome == "refused"])
        await asyncio.sleep(600.0)
        assert [with_bad(peer, bad) for peer in good] == spent, "it was met, or called"
        assert all(peer.outcomes()["completed"] > count + 30 for peer, count in zip(good, completed, strict=True))
        assert not bad.partners() and not any(peer.partners()[str(bad.peer_id)] for peer in good)
        refused_calls = [done for done in bad.meetings if done.outcome == "refused"][refusals:]
        assert refused_calls, "it never tried"
        for done in refused_calls:
            assert "GATE" in done.reason and "3 messages would have raised the loss" in done.reason and "hours" in done.reason
            assert done.bytes_received < 0.05 * max(spent[0]), "it received more than a refusal"

    play(Swarm(tmp_path, manifest=QUIET), story)


def test_a_rest_outlives_a_restart(tmp_path: Path) -> None:
    async def story(swarm: Swarm) -> None:
        bad, victim, other = swarm.start(3, step_s=1.0)
        judge(victim, refusing(bad.peer_id, honest("victim")))
        await swarm.until(lambda: len(victim.shunned) == 2, within_s=400.0)
        await swarm.until(lambda: not victim.peer.records.trust(other.peer_id).must_probe, within_s=400.0)
        victim.peer.partner_file.save()
        trust, until_s = victim.peer.records.trust(other.peer_id), victim.peer.records.rests_until_s(bad.peer_id)
        assert until_s > swarm.network.now_s() + 60.0
        victim.save()
        victim.kill()
        await asyncio.sleep(5.0)
        victim.start()
        judge(victim, refusing(bad.peer_id, honest("victim")))
        assert victim.peer.records.trust(other.peer_id) == trust == Trust(False, 1.0, 16.0)
        assert victim.peer.records.rests_until_s(bad.peer_id) == until_s
        count, spent = victim.outcomes()["completed"], with_bad(victim, bad)
        await swarm.until(lambda: victim.outcomes()["completed"] > count + 5)
        assert swarm.network.now_s() < until_s and with_bad(victim, bad) == spent
        await swarm.until(lambda: len(victim.shunned) == 3, within_s=800.0)

    play(Swarm(tmp_path, manifest=QUIET), story)


def test_honest_peers_never_rest_and_come_to_be_trusted(tmp_path: Path) -> None:
    async def story(swarm: Swarm) -> None:
        peers = [*swarm.start(2), *swarm.start(2, step_s=0.5)]
        for peer in peers:
            judge(peer, honest(str(peer.peer_id)))
        await swarm.until(
            lambda: all(num >= GOOD_PROBES for peer in peers for num in met(peer)) and len(met(peers[0])) == 3, within_s=300.0
        )
        doubtful = 0
        for peer in peers:
            records = peer.peer.records
            others = [other.peer_id for other in peers if other is not peer]
            doubtful += sum(records.trust(other).must_probe for other in others)
            assert not records.shunned(others, swarm.network.now_s()) and not peer.shunned
            assert not peer.outcomes()["gated"]
        assert doubtful <= 1, "out of 12"

    def met(peer: Peer) -> list[int]:
        return list(peer.partners().values())

    play(Swarm(tmp_path, manifest=QUIET), story)


def test_a_peer_whose_only_partner_rests_steps_alone_at_once(tmp_path: Path) -> None:
    async def story(swarm: Swarm) -> None:
        bad, victim = swarm.start(2, step_s=1.0)
        judge(victim, refusing(bad.peer_id, honest("victim")))
        await swarm.until(lambda: len(victim.shunned) == 2, within_s=400.0)
        solo = len(victim.trainer.solo)
        await asyncio.sleep(60.0)
        assert len(victim.trainer.solo) >= solo + 3 * 60 / 6 - 6, "it waits for a partner that rests"
        assert all(fragment.meeting is None for fragment in victim.trainer.replica.fragments)

    play(Swarm(tmp_path, manifest=QUIET), story)


def test_a_partner_that_always_rejects_our_messages_rests_too(tmp_path: Path) -> None:
    async def story(swarm: Swarm) -> None:
        bad, *good = swarm.start(3, step_s=1.0)
        judge(bad, lambda partner, checked: replace(checked, accepted=False, reason="no", failed_blocks=""))
        for peer in good:
            judge(peer, honest(str(peer.peer_id)))
        await asyncio.sleep(600.0)
        for peer in good:
            exchanged = [num for num in with_bad(peer, bad) if num > 0.5 * max(with_bad(peer, bad))]
            assert len(exchanged) <= 8, "an exchange each time"
            assert peer.outcomes()["completed"] > 30 and not peer.shunned

    play(Swarm(tmp_path, manifest=QUIET), story)
