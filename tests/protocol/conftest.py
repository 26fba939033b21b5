"""The two worlds as a fixture. They are imported when first used: hivemind takes seconds."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.protocol.worlds import Play


@pytest.fixture(params=["memory", "libp2p"])
def play(request: pytest.FixtureRequest) -> Play:
    """Run a scenario in one world, then, as another test, in the other."""
    from tests.protocol import worlds

    return worlds.in_memory if request.param == "memory" else worlds.over_libp2p
