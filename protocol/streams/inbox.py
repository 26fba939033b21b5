"""Frames that have arrived and wait to be read, one inbox per stream, of either transport.

Bounded, so that a partner who sends faster than we read has to wait. Knows three endings: the partner's (what came before
can still be read), ours (nothing more is read or kept), and none yet.
"""

from __future__ import annotations

import asyncio
from collections import deque

from protocol.errors import PeerGone


class Inbox:
    """A queue of frames between one writer and one reader on the same loop. Both are cancel-safe: nothing is lost or doubled."""

    def __init__(self, max_frames: int) -> None:
        self._max_frames = max_frames
        self._frames: deque[bytes] = deque()
        self._end: str | None = None
        self._arrived = asyncio.Event()
        self._has_room = asyncio.Event()
        self._has_room.set()

    @property
    def ended(self) -> str | None:
        """Why nothing more will come, None while something may."""
        return self._end

    async def room(self) -> None:
        """Wait until another frame may be put, or none is wanted any more."""
        await self._has_room.wait()

    def put(self, frame: bytes) -> None:
        """Add a frame, above the bound too: the writer waits for `room` first. After the end it is dropped."""
        if self._end is not None:
            return
        self._frames.append(frame)
        self._arrived.set()
        if len(self._frames) >= self._max_frames:
            self._has_room.clear()

    async def arrived(self) -> bool:
        """Wait until there is a frame to read, or never will be; return whether there is one."""
        await self._arrived.wait()
        return bool(self._frames)

    async def get(self) -> bytes:
        """Return the next frame. Raises PeerGone when none is left and none will come."""
        while not self._frames:
            if self._end is not None:
                raise PeerGone(self._end)
            self._arrived.clear()
            await self._arrived.wait()
        frame = self._frames.popleft()
        if len(self._frames) < self._max_frames:
            self._has_room.set()
        return frame

    def end(self, why: str) -> None:
        """Let nothing more in; what is here can still be read. The first reason given stays."""
        if self._end is None:
            self._end = why
        self._arrived.set()
        self._has_room.set()

    def close(self) -> None:
        """Let nothing more in and throw away what is here."""
        self._frames.clear()
        self.end("this side closed the stream")
