"""The two transports as a fixture. They are imported on first use, because importing hivemind takes seconds."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import uvloop

if TYPE_CHECKING:
    from tests.protocol.worlds import World

ON_UVLOOP = pytest.mark.real_time(loop_factory=uvloop.new_event_loop)  # as in the node process; libp2p/ tests asyncio's own loop


@pytest.fixture(params=["memory", pytest.param("libp2p", marks=ON_UVLOOP)])
def world(request: pytest.FixtureRequest) -> World:
    """Yield each of the two transports to a coroutine."""
    from tests.protocol import worlds

    return worlds.MemoryWorld() if request.param == "memory" else worlds.TunnelWorld()
