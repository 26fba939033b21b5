"""The rendered page of one run: whatever the number of viewers, the peer is asked and the page is drawn once in a while."""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from gossamer.cli.page import run_page
from gossamer.protocol.errors import BadSettings

LOOK_S = 2.0  # a younger rendering is reused, and so is a younger failure: a peer that does not answer holds each request for seconds


@dataclass(frozen=True)
class Rendering:
    """A piece of a page, as it is sent."""

    content: bytes

    @cached_property
    def packed(self) -> bytes:
        """Return the content, compressed."""
        return gzip.compress(self.content, 6, mtime=0)

    @cached_property
    def tag(self) -> str:
        """Return the name of this content, for a viewer that has it."""
        return f'"{hashlib.sha256(self.content).hexdigest()[:16]}"'


class RunPage:
    """The page of the run that `look` returns a picture of (cli/whole_run.py). Belongs to one event loop."""

    def __init__(self, look: Callable[[], dict[str, Any]], query: str = "", invite: str = "") -> None:
        self._look = look
        self._query = query
        self._invite, self._code = invite, qr_code(invite) if invite else ""
        self._lock = asyncio.Lock()
        self._looked_s = -LOOK_S
        self._drawn: tuple[Rendering, Rendering] | BadSettings | None = None

    async def whole(self) -> Rendering:
        """Return the whole page. Raises BadSettings if the peer does not answer."""
        return (await self._renderings())[0]

    async def live(self) -> Rendering:
        """Return the sections that change. Raises BadSettings if the peer does not answer."""
        return (await self._renderings())[1]

    async def _renderings(self) -> tuple[Rendering, Rendering]:
        async with self._lock:
            if self._drawn is None or time.monotonic() - self._looked_s >= LOOK_S:
                self._drawn = await asyncio.to_thread(self._draw)
                self._looked_s = time.monotonic()
            if isinstance(self._drawn, BadSettings):
                raise self._drawn.with_traceback(None)  # each raise adds to it
            return self._drawn

    def _draw(self) -> tuple[Rendering, Rendering] | BadSettings:
        try:
            shown = self._look()
        except BadSettings as error:
            return error
        whole = run_page.page(shown, self._query, self._invite, self._code)
        return Rendering(whole.encode()), Rendering(run_page.live(shown).encode())


def qr_code(link: str) -> str:
    """Return a link's QR code as SVG. In capitals, which an invite may have, it takes half the room."""
    import segno  # only for a page with an invite

    code = segno.make(link.upper(), error="l", boost_error=False)
    return str(code.svg_inline(border=4, dark="#000", light="#fff", omitsize=True, title="The invite as a QR code"))
