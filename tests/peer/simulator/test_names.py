from __future__ import annotations

import pytest

from peer.simulator.names import known
from protocol.errors import BadSettings


def test_a_known_name_is_returned() -> None:
    assert known("noloco", ["noloco", "local"], "method") == "noloco"


def test_an_unknown_name_is_answered_with_the_nearest() -> None:
    with pytest.raises(BadSettings, match="no method named 'nolco'") as caught:
        known("nolco", ["diloco", "noloco", "streaming"], "method")
    assert caught.value.hint == "did you mean noloco, diloco?"


def test_a_name_like_none_is_answered_with_all() -> None:
    with pytest.raises(BadSettings) as caught:
        known("xyz", ["local", "ddp"], "method")
    assert caught.value.hint == "did you mean local, ddp?"
