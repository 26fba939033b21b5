"""Fetching by pieces: how much is under way, and that whatever breaks costs only what was under way."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from gossamer.peer.sync import client, transfer
from gossamer.peer.sync import pieces as files
from gossamer.peer.sync.transfer import UNDER_WAY_PIECES, Flow
from gossamer.protocol.memory.conversation import Link as Wire
from gossamer.protocol.messages.messages import ContentsKind, FetchRequest, Message
from gossamer.protocol.streams import transport
from gossamer.protocol.streams.transport import Purpose, Stream, Transport
from tests.swarm.tiny import tiny_manifest
from tests.swarm.world import Peer, Swarm, frozen_source, play

QUIET = tiny_manifest(run={"total_steps": 100_000})
JOINER = {"waits_for_start": True, "is_founder": False}


@pytest.mark.parametrize(("pieces_per_s", "window"), [(0.5, 2), (10, 10), (100, 100), (10_000, UNDER_WAY_PIECES[1])])
def test_about_a_second_of_a_sources_rate_is_in_flight(pieces_per_s: float, window: int) -> None:
    flow = Flow(0.0)
    for number in range(round(20 * pieces_per_s)):
        flow.note(1, (number + 1) / pieces_per_s)
        assert UNDER_WAY_PIECES[0] <= flow.window <= UNDER_WAY_PIECES[1]
    assert abs(flow.window - window) <= 0.02 * window


def test_one_request_is_for_an_eighth_of_what_is_in_flight_and_never_for_less_than_a_piece() -> None:
    flow = Flow(0.0)
    assert flow.run(64) == 1
    for number in range(2000):
        flow.note(1, (number + 1) / 160)
    assert flow.window == 160 and flow.run(64) == 20 and flow.run(4) == 4


class Asked:
    """A joiner's transport that notes what is asked for, and breaks streams: each one after so many messages received."""

    def __init__(self, inner: Transport, breaks: list[int]) -> None:
        self._inner = inner
        self._breaks = breaks
        self.offsets: list[int] = []
        self.sizes: list[int] = []
        self.num_streams = 0

    async def connect(self, partner: object, addresses: object, purpose: Purpose) -> Stream:
        stream = await self._inner.connect(partner, addresses, purpose)  # type: ignore[arg-type]
        if purpose is Purpose.FETCH:
            self.num_streams += 1
            stream = BreakingStream(self, stream, self._breaks.pop(0) if self._breaks else 10**9)  # type: ignore[assignment]
        return stream


class BreakingStream:
    def __init__(self, asked: Asked, inner: Stream, breaks_at: int) -> None:
        self._asked, self._inner, self._left = asked, inner, breaks_at

    def __getattr__(self, name: str) -> object:
        return getattr(self._inner, name)

    async def send(self, message: Message) -> None:
        await self._inner.send(message)
        if isinstance(message, FetchRequest) and message.num_bytes and message.kind is ContentsKind.STATE:
            self._asked.offsets.append(message.offset)
            self._asked.sizes.append(message.num_bytes)

    async def receive(self) -> Message:
        if self._left == 0:
            self._inner.close()
        self._left -= 1
        return await self._inner.receive()


def joining(tmp_path: Path, wire: Wire, breaks: list[int]) -> tuple[Asked, Peer, float]:
    """Let a peer join one that stands still; return what it asked for, and after how long it had begun."""
    asked: list[Asked] = []
    took_s: list[float] = []

    def wrap(peer: Peer, transport: Transport) -> Transport:
        if not peer.habits.waits_for_start:
            return transport
        asked.append(Asked(transport, breaks))
        return asked[0]

    async def story(swarm: Swarm) -> None:
        await frozen_source(swarm, 20)
        joiner = swarm.add(**JOINER)
        joiner.trainer.frozen = True
        began_s = asyncio.get_running_loop().time()
        joiner.start()
        await swarm.until(lambda: joiner.transfers, within_s=300.0)
        took_s.append(asyncio.get_running_loop().time() - began_s)

    swarm = Swarm(tmp_path, manifest=QUIET, wire=wire, wrap=wrap)
    play(swarm, story)
    return asked[0], swarm.peers[1], took_s[0]


CUTS = [3, 7, 1, 12, 2, 9, 5, 4, 3, 6, 8, 2, 11, 3, 5, 7, 4, 2, 6, 10]  # messages received on a stream: one for the clock, then two a piece


def test_a_stream_that_is_cut_at_twenty_points_goes_on_each_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "PIECE_BYTES", 500)
    asked, joiner, _ = joining(tmp_path, Wire(latency_s=0.02, bytes_per_s=1e6), list(CUTS))
    (transferred,) = joiner.transfers
    assert asked.num_streams > len(CUTS) and transferred.fetched_bytes == transferred.num_bytes
    num_pieces = -(-transferred.num_bytes // 500)
    assert set(asked.offsets) == {500 * piece for piece in range(num_pieces)}
    under_way = sum(UNDER_WAY_PIECES[0] for _ in CUTS)
    assert len(asked.offsets) - num_pieces <= under_way, "more was fetched twice than was under way at the cuts"


@pytest.mark.parametrize("cut_at", range(1, 60, 3))
def test_a_stream_that_is_cut_anywhere_goes_on_from_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cut_at: int) -> None:
    monkeypatch.setattr(files, "PIECE_BYTES", 1500)
    asked, joiner, _ = joining(tmp_path, Wire(latency_s=0.02, bytes_per_s=1e6), [9, cut_at])
    (transferred,) = joiner.transfers
    assert len(asked.offsets) - -(-transferred.num_bytes // 1500) <= 8, "more was fetched twice than a second's worth"


@pytest.mark.parametrize("bytes_per_s", [1000.0, 2500.0, 10_000.0])
def test_a_joiner_has_begun_in_about_the_time_that_its_line_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bytes_per_s: float
) -> None:
    """The demo's model on lines of 2, 5 and 20 Mbit/s takes as long as this one on these."""
    monkeypatch.setattr(files, "PIECE_BYTES", 1500)
    _, joiner, took_s = joining(tmp_path, Wire(latency_s=0.05, bytes_per_s=bytes_per_s), [])
    (transferred,) = joiner.transfers
    assert took_s < 1.5 * transferred.num_bytes / bytes_per_s + 5.0
    told = [reported.reason for reported in joiner.reported if " of weights" in reported.reason or "B/s" in reported.reason]
    assert any("B/s" in words and " s left" in words for words in told) and told[-1].startswith("downloaded ")


@pytest.mark.parametrize(("bytes_per_s", "most_pieces"), [(4_000.0, 1), (1e6, 8)])
def test_requests_on_a_fast_line_are_for_runs_of_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bytes_per_s: float, most_pieces: int
) -> None:
    monkeypatch.setattr(files, "PIECE_BYTES", 200)
    asked, joiner, _ = joining(tmp_path, Wire(latency_s=0.02, bytes_per_s=bytes_per_s), [])
    (transferred,) = joiner.transfers
    assert sum(asked.sizes) == transferred.num_bytes
    assert max(asked.sizes) == 200 * most_pieces


def in_bulk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scale pieces, chunks and answers down to a state of forty kilobytes."""
    monkeypatch.setattr(files, "PIECE_BYTES", 200)
    monkeypatch.setattr(transfer, "BULK_WORTH_BYTES", 0)
    for module in (client, transport):
        monkeypatch.setattr(module, "CHUNK_BYTES", 800)


def test_a_state_comes_over_a_bulk_stream_and_equals_its_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    in_bulk(monkeypatch)
    asked, joiner, _ = joining(tmp_path, Wire(latency_s=0.02, bytes_per_s=1e6), [])
    (transferred,) = joiner.transfers
    assert sum(asked.sizes) == transferred.num_bytes and max(asked.sizes) > 800


@pytest.mark.parametrize("cut_at", range(1, 80, 6))
def test_a_bulk_stream_that_is_cut_anywhere_goes_on_from_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cut_at: int) -> None:
    in_bulk(monkeypatch)
    asked, joiner, _ = joining(tmp_path, Wire(latency_s=0.02, bytes_per_s=1e6), [9, cut_at])
    (transferred,) = joiner.transfers
    assert transferred.fetched_bytes == transferred.num_bytes
    assert sum(asked.sizes) < 2 * transferred.num_bytes
