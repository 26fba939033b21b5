"""Getting a state to begin with: the next source goes on where one fails, and only a refusal by all ends the attempt."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import itertools
import random
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from gossamer.optim.fragments import scatter
from gossamer.peer.link import messages
from gossamer.peer.link.socket import LinkLost
from gossamer.peer.machine.events import Event, ProcessReported, Warned
from gossamer.peer.swarm.membership import OwnCredential
from gossamer.peer.swarm.sybil_groups import SybilGroups
from gossamer.peer.sync import pieces as files
from gossamer.peer.sync.client import FetchClient, as_final
from gossamer.peer.sync.decision import Wanted
from gossamer.peer.sync.sources import Sources
from gossamer.peer.sync.state_transfer import StateTransfer, TransferProgress
from gossamer.protocol.errors import BadMessage, BadSettings, RefusalCode, Refused, RunRefusesUs, WrongVersion
from gossamer.protocol.messages.messages import Chunk, Contents, ContentsKind, FetchRequest, Part, Refusal
from gossamer.protocol.streams.transport import Purpose, Stream
from tests.swarm.mallory import MALLORY
from tests.swarm.tiny import tiny_manifest
from tests.swarm.world import Peer, Swarm, frozen_source, play, started

QUIET = tiny_manifest(run={"total_steps": 100_000})


class InOrder(random.Random):
    """Has the sources asked in the order in which they were heard of."""

    def shuffle(self, x: object) -> None:
        """Leave them as they are."""


async def newcomer(swarm: Swarm, *sources: object) -> tuple[Peer, StateTransfer]:
    """A peer that waits for more company than comes, so that only the test has it join; it knows these sources, in this order."""
    peer = swarm.add(waits_for_start=True, is_founder=False, wait_for_peers=9)
    peer.trainer.frozen = True
    peer.start()
    await started()
    for source in sources:
        peer.book.add_address(source.peer_id, "/ip4/192.0.2.1/tcp/4001", asyncio.get_running_loop().time())  # type: ignore[attr-defined]
    client = FetchClient(peer.identity, swarm.terms.run_id, OwnCredential(), peer.transport)
    sources = Sources(client, SybilGroups(peer.book, swarm.terms), InOrder())
    return peer, StateTransfer(sources, swarm.terms, peer.lifecycle, peer.node.meetings, peer.link, swarm.folder / "joining", peer.on_event)


def wanted(swarm: Swarm, earliest_steps: int = 0, latest_steps: int = 100_000) -> Callable[[], Wanted]:
    return lambda: Wanted(swarm.terms.state_bytes, earliest_steps, latest_steps, swarm.manifest.run.total_steps)


async def announces_too_much(purpose: Purpose, stream: Stream) -> None:
    request = await stream.receive()
    await stream.send(Contents(ContentsKind.STATE, 2**40, b"h" * 32, 5).signed(MALLORY, *request.asked))  # type: ignore[arg-type]
    await asyncio.sleep(100.0)


async def cuts_its_state_short(purpose: Purpose, stream: Stream) -> None:
    """Answer each request, the first one for a state that ends a byte before what is asked for: half of a value is missing."""
    for number in itertools.count():
        request = await stream.receive()
        assert isinstance(request, FetchRequest)
        data = bytes(max(0, request.num_bytes - (number == 0)))
        header = Contents(ContentsKind.STATE, request.offset + len(data), hashlib.sha256(data).digest(), 5)
        await stream.send(header.signed(MALLORY, *request.asked))
        if data:
            await stream.send(Chunk(Part.CONTENTS, request.offset, data))


async def does_not_want_us(purpose: Purpose, stream: Stream) -> None:
    await stream.receive()
    await stream.send(Refusal(RefusalCode.NOT_INVITED))


@pytest.mark.parametrize("answer", [announces_too_much, cuts_its_state_short])
def test_a_source_with_a_wrong_size_is_banned_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: Callable[[Purpose, Stream], Awaitable[None]]
) -> None:
    monkeypatch.setattr(files, "PIECE_BYTES", 3000)

    async def story(swarm: Swarm) -> None:
        resident = await frozen_source(swarm)
        swarm.network.start_peer(MALLORY.peer_id, answer)
        peer, joining = await newcomer(swarm, MALLORY, resident)
        assert await joining.ask_everybody(wanted(swarm)) is None
        assert peer.book.is_banned(MALLORY.peer_id, asyncio.get_running_loop().time())
        assert peer.trainer.started and peer.global_step == resident.global_step and torch.allclose(peer.slow, resident.slow, atol=0.01)
        (transferred,) = peer.transfers
        assert (transferred.sources, transferred.global_step, transferred.num_bytes) == (
            (str(resident.peer_id),),
            resident.global_step,
            swarm.terms.state_bytes,
        )
        assert transferred.seconds > 0.0 and transferred.fetched_bytes == transferred.num_bytes
        assert not list(swarm.folder.glob("joining*"))

    play(Swarm(tmp_path, manifest=QUIET), story)


@pytest.mark.parametrize("off_steps", [1, -1])
def test_a_source_with_another_global_step_is_unused_and_not_banned(tmp_path: Path, off_steps: int) -> None:
    async def story(swarm: Swarm) -> None:
        resident = await frozen_source(swarm)
        peer, joining = await newcomer(swarm, resident)
        before = peer.hash
        bounds = (resident.global_step + 1,) if off_steps > 0 else (0, resident.global_step - 1)
        answers = await joining.ask_everybody(wanted(swarm, *bounds))
        assert peer.book.get(resident.peer_id).global_step == resident.global_step, "its answer is later news than its record"
        assert answers is not None and len(answers) == 1 and peer.hash == before and not peer.trainer.started
        assert not peer.transfers
        assert not peer.book.is_banned(resident.peer_id, asyncio.get_running_loop().time())

    play(Swarm(tmp_path, manifest=QUIET), story)


@pytest.mark.parametrize("others_wait", [False, True])
def test_one_that_has_not_begun_keeps_a_refused_joiner_waiting(tmp_path: Path, others_wait: bool) -> None:
    async def story(swarm: Swarm) -> None:
        swarm.network.start_peer(MALLORY.peer_id, does_not_want_us)
        waiting = [swarm.add(waits_for_start=True, wait_for_peers=9).start()] if others_wait else []
        _, joining = await newcomer(swarm, MALLORY, *waiting)
        if not others_wait:
            with pytest.raises(RunRefusesUs):
                await joining.learn_global_steps()
            return
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(joining.learn_global_steps(), 100.0)

    play(Swarm(tmp_path, manifest=QUIET), story)


def test_only_refusals_that_no_retry_can_change_are_final() -> None:
    final = {code: type(as_final(Refused(code, ""))) for code in RefusalCode if as_final(Refused(code, ""))}
    assert final == {
        RefusalCode.NOT_INVITED: RunRefusesUs,
        RefusalCode.WRONG_RUN: RunRefusesUs,
        RefusalCode.WRONG_VERSION: WrongVersion,
    }


def test_no_state_is_beyond_the_end_of_the_run() -> None:
    with pytest.raises(BadMessage):
        Wanted(8, 0, 100, 100).check(Contents(ContentsKind.STATE, 8, b"h" * 32, 101))
    Wanted(8, 100, 100, 100).check(Contents(ContentsKind.STATE, 8, b"h" * 32, 100))


def test_a_source_of_nonsense_costs_one_more_download_and_is_banned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "PIECE_BYTES", 3000)

    async def gives_nonsense(purpose: Purpose, stream: Stream) -> None:
        while True:
            request = await stream.receive()
            assert isinstance(request, FetchRequest)
            data = b"\xff" * request.num_bytes
            header = Contents(ContentsKind.STATE, swarm.terms.state_bytes, hashlib.sha256(data).digest(), 5)
            await stream.send(header.signed(MALLORY, *request.asked))
            await stream.send(Chunk(Part.CONTENTS, request.offset, data))

    async def story(swarm: Swarm) -> None:
        resident = await frozen_source(swarm)
        swarm.network.start_peer(MALLORY.peer_id, gives_nonsense)
        peer, joining = await newcomer(swarm, MALLORY, resident)
        await joining.take_over(wanted(swarm))
        assert peer.book.is_banned(MALLORY.peer_id, asyncio.get_running_loop().time())
        assert peer.transfers[-1].sources == (str(resident.peer_id),)

    swarm = Swarm(tmp_path, manifest=QUIET)
    play(swarm, story)


def test_a_source_is_not_banned_for_pieces_that_another_one_gave_before_a_restart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "PIECE_BYTES", 3000)

    async def story(swarm: Swarm) -> None:
        resident = await frozen_source(swarm)
        peer, joining = await newcomer(swarm, resident)
        with contextlib.closing(files.Pieces.open(joining.file, swarm.terms.run_id, swarm.terms.state_bytes)) as pieces:
            pieces.put(range(1), b"\xff" * files.PIECE_BYTES, 5)
        await joining.take_over(wanted(swarm))
        assert not peer.book.is_banned(resident.peer_id, asyncio.get_running_loop().time())
        assert peer.transfers[-1].sources == (str(resident.peer_id),)

    play(Swarm(tmp_path, manifest=QUIET), story)


def test_a_full_disk_is_reported_before_anything_is_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(swarm: Swarm) -> None:
        (resident,) = swarm.start(1)
        await swarm.until(lambda: resident.global_step >= 5)
        _, joining = await newcomer(swarm, resident)
        monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
        with pytest.raises(BadSettings, match="kB are free"):
            await joining.take_over(wanted(swarm))
        monkeypatch.undo()
        assert not list(swarm.folder.glob("joining*"))

    play(Swarm(tmp_path, manifest=QUIET), story)


def test_a_peer_that_trains_goes_on_while_its_disk_has_no_room_for_newer_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(swarm: Swarm) -> None:
        residents = swarm.start(2)
        await swarm.until(lambda: min(resident.global_step for resident in residents) >= 80)
        for resident in residents:
            resident.trainer.frozen = True
        monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
        behind = swarm.add()
        behind.trainer.frozen = True
        behind.start()
        await swarm.until(lambda: any("kB are free" in reported.reason for reported in behind.reported), 60.0)
        await asyncio.sleep(30.0)
        assert behind.failure is None and not behind.transfers
        monkeypatch.undo()
        await swarm.until(lambda: behind.transfers, 60.0)

    play(Swarm(tmp_path, manifest=QUIET), story)


def test_a_newcomer_rejects_weights_that_predict_worse_than_its_own(tmp_path: Path) -> None:
    async def story(swarm: Swarm) -> None:
        resident = await frozen_source(swarm)
        for fragment in resident.trainer.replica.fragments:
            fragment.slow = fragment.slow + torch.randn(fragment.slow.shape, generator=torch.Generator().manual_seed(3))
            scatter(fragment.codec.fragment, fragment.slow, resident.trainer.replica.parameters)
        peer, joining = await newcomer(swarm, resident)
        before = peer.hash
        answers = await joining.ask_everybody(wanted(swarm))
        assert answers and "held-out loss" in str(answers[0]) and peer.hash == before
        assert not peer.book.is_banned(resident.peer_id, asyncio.get_running_loop().time())

    play(Swarm(tmp_path, manifest=QUIET), story)


class LateMeetings:
    """Meetings that take some seconds to end before weights can be replaced."""

    @contextlib.asynccontextmanager
    async def set_aside(self) -> AsyncIterator[None]:
        await asyncio.sleep(5.0)
        yield


def test_the_bound_on_a_state_is_that_of_the_moment_its_step_is_read(tmp_path: Path) -> None:
    """The own bound grows while meetings end: where the others are has been read before."""

    async def story(swarm: Swarm) -> None:
        resident = await frozen_source(swarm)
        peer, joining = await newcomer(swarm, resident)
        joining.meetings = LateMeetings()
        has_set_aside_s = asyncio.get_running_loop().time() + 4.0

        def growing() -> Wanted:
            return replace(wanted(swarm)(), typical_steps=500, takes_clock=asyncio.get_running_loop().time() >= has_set_aside_s)

        await joining.ask_everybody(growing)
        (adopt,) = [request for request in peer.link.reported if isinstance(request, messages.Adopt)]
        assert asyncio.get_running_loop().time() >= has_set_aside_s
        assert (adopt.global_step, adopt.takes_clock) == (500, False)

    play(Swarm(tmp_path, manifest=QUIET), story)


class BeginsAtLast:
    """The link to a trainer that refuses a state by its loss, and begins with its own weights once it may. Keeps when it was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, bool]] = []
        self._began_s = asyncio.get_running_loop().time()

    async def request(self, request: messages.Adopt) -> messages.Adopted:
        self.asked.append((round(asyncio.get_running_loop().time() - self._began_s), request.may_begin))
        return messages.Adopted(request.name, request.may_begin, "its held-out loss is 2.0000, that of our own weights 0.1000")


def test_a_program_with_better_weights_than_the_runs_begins_with_them_after_a_minute_and_says_so(tmp_path: Path) -> None:
    async def story(swarm: Swarm) -> None:
        resident = await frozen_source(swarm)
        peer, joining = await newcomer(swarm, resident)
        trainer, emitted = BeginsAtLast(), list[Event]()
        joining.link, joining.emit = trainer, emitted.append  # type: ignore[assignment]
        await joining.take_over(wanted(swarm))
        assert [may_begin for _, may_begin in trainer.asked] == [False, False, False, True]
        assert [seconds for seconds, _ in trainer.asked] == pytest.approx([0, 5, 20, 65], abs=3), (
            "the run has time to learn, and the source is spared"
        )
        reasons = [event.reason for event in emitted if isinstance(event, ProcessReported) and "asks again" in event.reason]
        assert [reason.rsplit(" ", 2)[1] for reason in reasons] == ["5", "15", "45"]
        (warned,) = [event.words for event in emitted if isinstance(event, Warned)]
        assert warned.startswith("this peer began with its own weights") and "0.1000" in warned

    play(Swarm(tmp_path, manifest=QUIET), story)


class DyingTrainer:
    """The link to a trainer that dies while it judges a state."""

    async def request(self, request: messages.Adopt) -> messages.Adopted:
        raise LinkLost


def test_a_copy_that_the_trainer_died_over_is_there_for_the_next_one(tmp_path: Path) -> None:
    """It may be the last copy of a stage, so it is not given up as if the trainer had refused it."""

    async def story(swarm: Swarm) -> None:
        peer, joining = await newcomer(swarm)
        copy, size = swarm.folder / "copy", swarm.terms.state_bytes
        with contextlib.closing(files.Pieces.open(copy, swarm.terms.run_id, size)) as pieces:
            pieces.put(range(pieces.num_pieces), bytes(size), 5)
        joining.link = DyingTrainer()  # type: ignore[assignment]
        moved, sync = list[str](), peer.node.state_sync
        sync.transfer, sync.copy, sync.move_back, peer.book.stage = joining, copy, moved.append, 1
        await sync._begin()
        assert not moved and copy.stat().st_size == size

    play(Swarm(tmp_path, manifest=QUIET), story)


def test_a_whole_transfer_says_what_follows_and_no_time_left() -> None:
    progress = TransferProgress(0.0, 0)
    assert progress.describe(50_000_000, 100_000_000, 10.0) == "downloading weights: 50 % of 100 MB from 0 peers, 5.0 MB/s, 10 s left"
    assert progress.describe(100_000_000, 100_000_000, 20.0) == (
        "downloaded 100 MB of weights from 0 peers; the trainer compares them with its own"
    )
