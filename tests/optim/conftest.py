"""One thread for torch in this folder: the tensors are small and the machine is shared. A fixture runs a test with each form of coding."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.optim.codings import CODINGS, coded_by

torch.set_num_threads(1)


@pytest.fixture(params=CODINGS)
def coding(request: pytest.FixtureRequest) -> Iterator[None]:
    with coded_by(request.param):
        yield
