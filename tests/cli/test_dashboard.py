from __future__ import annotations

import socket

import pytest

from gossamer.cli.dashboard import listening
from gossamer.protocol.errors import BadSettings


def test_the_page_listens_on_this_machine_alone() -> None:
    with listening(0) as listener:
        assert listener.getsockname()[0] == "127.0.0.1"


def test_a_busy_port_is_refused_with_a_hint() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        with pytest.raises(BadSettings, match="in use") as caught:
            listening(other.getsockname()[1])
    assert "--port" in caught.value.hint
