from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from gossamer.protocol.memory.network import MemoryNetwork


@pytest.fixture
@asynccontextmanager
async def network() -> AsyncIterator[MemoryNetwork]:
    network = MemoryNetwork()
    yield network
    await network.close()
