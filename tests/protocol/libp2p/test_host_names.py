"""DNS names in untrusted records, whose name servers may never answer."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable
from typing import Any, cast

import pytest

from gossamer.protocol.libp2p import host_names
from gossamer.protocol.libp2p.dialer import Dialer
from gossamer.protocol.libp2p.p2pd import Control
from tests.protocol.peers import seeded

Found = list[tuple[object, ...]]


def name_server(answer: Callable[[str], Found]) -> Any:
    return lambda host, port, family, type: answer(host)  # noqa: A006 - a name of the socket module


def dialer() -> Dialer:
    return Dialer(cast(Control, None), lambda: ("/ip4/8.8.4.4/tcp/1",))


def test_names_that_nobody_resolves_keep_neither_the_disk_nor_other_names_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """The threads of the event loop write the journal, without which no meeting counts."""
    is_over, asked, own = threading.Event(), list[str](), dialer()

    def answer(host: str) -> Found:
        asked.append(host)
        if host.startswith("silent"):
            is_over.wait()
        return [(0, 0, 0, "", ("8.8.8.8", 0))]

    monkeypatch.setattr(host_names, "RESOLVE_S", 0.05)
    monkeypatch.setattr(socket, "getaddrinfo", name_server(answer))

    async def main() -> None:
        for number in range(40):
            names = [f"/dns4/silent-{number}-{name}.example/tcp/1" for name in range(4)]
            assert not await own.dialable_addresses(seeded(number).peer_id, names)
        assert len(asked) == 40, "one look-up of a partner at a time"
        async with asyncio.timeout(5.0):
            await asyncio.to_thread(int)
            monkeypatch.setattr(host_names, "RESOLVE_S", 5.0)
            assert await own.dialable_addresses(seeded(99).peer_id, ["/dns4/there.example/tcp/1"]) == ["/ip4/8.8.8.8/tcp/1"]

    try:
        asyncio.run(main())
    finally:
        is_over.set()


def test_only_so_many_names_are_looked_up_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    is_over, asked, own = threading.Event(), list[str](), dialer()

    def answer(host: str) -> Found:
        asked.append(host)
        is_over.wait()
        return []

    monkeypatch.setattr(host_names, "RESOLVE_S", 0.01)
    monkeypatch.setattr(host_names, "LOOK_UPS", 3)
    monkeypatch.setattr(socket, "getaddrinfo", name_server(answer))

    async def main() -> None:
        for number in range(6):
            assert not await own.dialable_addresses(seeded(number).peer_id, [f"/dns4/silent-{number}.example/tcp/1"])
        assert len(asked) == 3

    try:
        asyncio.run(main())
    finally:
        is_over.set()
