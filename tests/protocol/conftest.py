"""The two transports as a fixture. They are imported on first use, because importing hivemind takes seconds."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.protocol.worlds import Play


@pytest.fixture(params=["memory", "libp2p"])
def play(request: pytest.FixtureRequest) -> Play:
    """Run a scenario over one transport; parametrized over both."""
    from tests.protocol import worlds

    return worlds.in_memory if request.param == "memory" else worlds.over_libp2p
