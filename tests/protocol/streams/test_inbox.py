"""The inbox: its order, its bound, and its three ways to end."""

from __future__ import annotations

import asyncio

import pytest

from gossamer.protocol.errors import PeerGone
from gossamer.protocol.streams.transport import Inbox


async def test_frames_are_read_in_order_and_the_end_comes_last() -> None:
    inbox = Inbox(2)
    for number in range(3):  # one above the bound: the writer did not await room
        inbox.put(bytes([number]))
    inbox.end("over")
    inbox.put(b"late")
    assert [await inbox.get() for _ in range(3)] == [b"\0", b"\1", b"\2"]
    with pytest.raises(PeerGone, match="over"):
        await inbox.get()


async def test_a_full_inbox_has_no_room_until_a_frame_is_read() -> None:
    inbox = Inbox(2)
    inbox.put(b"1")
    await inbox.room()
    inbox.put(b"2")
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(1):
            await inbox.room()
    await inbox.get()
    await inbox.room()


async def test_closing_discards_frames_and_wakes_both_sides() -> None:
    inbox = Inbox(1)
    inbox.put(b"1")
    waiting = asyncio.create_task(inbox.room())
    await asyncio.sleep(0)
    inbox.close()
    await waiting
    with pytest.raises(PeerGone, match="this side"):
        await inbox.get()


async def test_a_cancelled_reader_loses_nothing() -> None:
    inbox = Inbox(1)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(1):
            await inbox.get()
    inbox.put(b"1")
    assert await inbox.get() == b"1"


async def test_a_frame_that_was_read_is_not_waited_for_again() -> None:
    inbox = Inbox(2)
    inbox.put(b"1")
    assert await inbox.wait_for_message() and await inbox.get() == b"1"
    waiting = asyncio.create_task(inbox.wait_for_message())
    await asyncio.sleep(1)
    assert not waiting.done()
    inbox.put(b"2")
    assert await waiting


async def test_the_first_reason_is_kept() -> None:
    inbox = Inbox(1)
    inbox.end("first")
    inbox.end("second")
    assert inbox.ended == "first"
    await inbox.wait_for_message()
