"""What state synchronization needs of this peer's meetings; peer/node/meetings.py has it."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from typing import Protocol


class OwnMeetings(Protocol):
    """The meetings of this peer, which stop while its weights are replaced."""

    usual_s: float
    """Typical duration of completed meetings."""

    def set_aside(self) -> AbstractAsyncContextManager[None]:
        """End all meetings, and begin none while the body runs."""
        ...

    async def until_quiet(self) -> None:
        """Wait for the end of the meetings in progress."""
        ...
