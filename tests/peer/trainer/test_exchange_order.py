"""What the exchange does with requests that are repeated, out of turn, or too late."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch

from gossamer.peer.link import messages
from gossamer.peer.link.messages import File
from gossamer.peer.trainer.replica import JOURNALED
from gossamer.protocol.messages.messages import RunPhase
from tests.peer.exchange import Terms, checked, exchange, meet, opened
from tests.peer.trainer.test_exchange import Peer, pair, same, sides


def test_a_meeting_counts_once(tmp_path: Path) -> None:
    peers = pair(tmp_path)
    meet(sides(peers), Terms())
    after = peers[0].state()
    assert peers[0].side.answer(messages.Apply(1, "ab" * 16, "")) == messages.Applied(1)
    assert peers[0].side.answer(messages.Apply(99, "ab" * 16, "")) == messages.Applied(99)  # asked by a node that was restarted
    assert same(after, peers[0].state())
    assert len(peers[0].steps) == 1


def test_a_meeting_that_counted_before_a_restart_does_not_count_again(tmp_path: Path) -> None:
    peers = pair(tmp_path)
    meet(sides(peers), Terms())
    restarted = Peer(tmp_path, "again")
    restarted.replica.restore(restarted.replica.kept().tensors, peers[0].replica.kept().state)
    exchange((restarted.side, pair(tmp_path)[1].side), Terms(number=5))
    assert checked(restarted.side, 5).accepted
    before = restarted.state()
    assert restarted.side.answer(messages.Apply(5, "ab" * 16, "")) == messages.Applied(5)
    assert same(before, restarted.state())
    assert isinstance(restarted.side.answer(messages.Open(6, 0)), messages.Opened)  # and the fragment is free


def test_the_journal_of_applied_meetings_is_bounded(tmp_path: Path) -> None:
    peers = pair(tmp_path)
    for number in range(1, JOURNALED + 9):
        peers[0].replica.journal(f"{number:032x}")
    meet(sides(peers), Terms(name="ab" * 16))
    assert len(peers[0].replica.applied) == JOURNALED
    assert "ab" * 16 in peers[0].replica.applied


def test_a_fragment_is_in_one_meeting_at_a_time(tmp_path: Path) -> None:
    peer = pair(tmp_path)[0]
    opened(peer.side, Terms(number=1))
    assert peer.side.answer(messages.Open(2, 0)) == messages.Unavailable(2, "the fragment is in another meeting")
    assert isinstance(peer.side.answer(messages.Open(1, 1)), messages.Unavailable)  # the number is taken
    assert isinstance(peer.side.answer(messages.Open(3, 1)), messages.Opened)


def test_a_fragment_in_a_meeting_takes_no_solo_step(tmp_path: Path) -> None:
    peer = pair(tmp_path)[0]
    while 0 not in peer.replica.countdown.due():
        peer.replica.countdown.tick()
    opened(peer.side, Terms(number=1))
    before = peer.state()
    peer.side.answer(messages.Solo(0))
    assert same(before, peer.state())
    peer.side.answer(messages.Drop(1))
    assert not same(before, peer.state())


def test_two_fragments_meet_side_by_side(tmp_path: Path) -> None:
    peers = pair(tmp_path)
    both = Terms(number=1), Terms(number=2, fragment=1, name="cd" * 16)
    for terms in both:
        exchange(sides(peers), terms)
    for terms in reversed(both):
        for peer in peers:
            assert checked(peer.side, terms.number).accepted
            peer.side.answer(messages.Apply(terms.number, terms.name, ""))
    assert peers[0].steps == [(1, 0), (0, 0)]


def test_dropping_restores(tmp_path: Path) -> None:
    peers = pair(tmp_path, "modulo4")
    before = peers[0].state()
    exchange(sides(peers), Terms())
    checked(peers[0].side, 1)
    for _ in range(2):
        assert peers[0].side.answer(messages.Drop(1)) is None
    assert same(before, peers[0].state())
    assert not peers[0].side.get(1, File.OWN_PAYLOAD)
    assert not peers[0].side.get(1, File.OWN_SKETCH)
    for late in (messages.Prepare(1, 0, 0, 1, RunPhase.TRAIN), messages.Encode(1), messages.Check(1), messages.Apply(1, "ab" * 16, "")):
        assert isinstance(peers[0].side.answer(late), messages.Unavailable)
    assert same(before, peers[0].state())
    peers[1].side.answer(messages.Drop(1))
    meet(sides(peers), Terms(number=2))


def test_steps_out_of_turn_are_refused(tmp_path: Path) -> None:
    peer = pair(tmp_path, "modulo4")[0]
    opened(peer.side, Terms())
    before = peer.state()
    for early in (messages.Encode(1), messages.Check(1), messages.Apply(1, "ab" * 16, "")):
        assert isinstance(peer.side.answer(early), messages.Unavailable)
    peer.side.answer(messages.Prepare(1, 100, 0, 7, RunPhase.TRAIN))
    for early in (messages.Check(1), messages.Apply(1, "ab" * 16, "")):
        assert isinstance(peer.side.answer(early), messages.Unavailable)
    assert same(before, peer.state())


def test_nothing_applies_before_it_was_judged(tmp_path: Path) -> None:
    peers = pair(tmp_path)
    exchange(sides(peers), Terms())
    assert isinstance(peers[0].side.answer(messages.Apply(1, "ab" * 16, "")), messages.Unavailable)


def test_a_list_of_failed_blocks_that_does_not_fit_changes_nothing(tmp_path: Path) -> None:
    peers = pair(tmp_path, "modulo4")
    exchange(sides(peers), Terms())
    assert checked(peers[0].side, 1).accepted
    before = peers[0].state()
    assert isinstance(peers[0].side.answer(messages.Apply(1, "ab" * 16, "0101")), messages.Unavailable)
    assert same(before, peers[0].state())
    assert peers[0].side.answer(messages.Apply(1, "ab" * 16, "01")) == messages.Applied(1)


def test_own_weights_that_are_not_finite_are_not_sent(tmp_path: Path) -> None:
    peer = pair(tmp_path)[0]
    peer.parameters["matrix"][3] = torch.nan
    opened(peer.side, Terms())
    assert isinstance(peer.side.answer(messages.Prepare(1, 100, 0, 7, RunPhase.TRAIN)), messages.Unavailable)
    assert not peer.side.get(1, File.OWN_PAYLOAD)


def test_a_full_folder_costs_the_meeting_only(tmp_path: Path) -> None:
    peer = pair(tmp_path)[0]
    opened(peer.side, Terms())
    before = peer.state()
    shutil.rmtree(tmp_path / "i")  # every write fails from now on, as on a full disk
    reply = peer.side.answer(messages.Prepare(1, 100, 0, 7, RunPhase.TRAIN))
    assert isinstance(reply, messages.Unavailable)
    assert same(before, peer.state())


def test_the_partners_clock_is_passed_on(tmp_path: Path) -> None:
    peers = pair(tmp_path)
    peers[1].replica.global_step = 77
    meet(sides(peers), Terms())
    assert peers[0].steps == [(0, 77)]
    assert peers[1].steps == [(0, 0)]


def test_equal_shares_when_neither_side_trained(tmp_path: Path) -> None:
    peers = Peer(tmp_path, "i"), Peer(tmp_path, "j")
    for peer, draws in zip(peers, (1, 2), strict=True):
        peer.move(torch.Generator().manual_seed(draws))
    mean = (peers[0].fast() + peers[1].fast()) / 2 - peers[0].replica.fragments[0].slow
    meet(sides(peers), Terms())
    moved = peers[0].replica.fragments[0].momentum
    assert torch.allclose(moved, 0.7 * mean, atol=1e-6)
