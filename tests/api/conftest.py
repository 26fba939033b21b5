from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.api.forked import Forks, forking


@pytest.fixture(scope="package")
def forks() -> Iterator[Forks]:
    with forking() as started:
        yield started
