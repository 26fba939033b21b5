from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from gossamer.cli.local_swarm import LocalSwarm, local_swarm


@pytest.fixture
def swarm(tmp_path: Path, no_umask: None) -> Iterator[LocalSwarm]:
    with local_swarm(tmp_path) as started:
        yield started
