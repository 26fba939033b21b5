"""p2pd starts with its settings or reports the reason, and always ends with its parent."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from gossamer.protocol.errors import BadSettings, TransportError, Unreachable
from gossamer.protocol.identity import Identity
from gossamer.protocol.libp2p import p2pd as daemon
from gossamer.protocol.libp2p.p2pd import Daemon, DaemonSettings
from tests.protocol.peers import seeded
from tests.protocol.worlds import LOCAL, start_daemon

pytestmark = pytest.mark.real_time


@pytest.fixture
def settings(folder: Path) -> DaemonSettings:
    Identity.load_or_create(folder / "key")
    return DaemonSettings(folder / "key", folder / "run", "127.0.0.1")


RELAY = f"/ip4/127.0.0.1/tcp/9/p2p/{seeded(1).peer_id}"


def oom_score(pid: int) -> int:
    return int(Path(f"/proc/{pid}/oom_score_adj").read_text())


async def start(settings: DaemonSettings) -> None:
    async with Daemon(settings):
        pass


async def test_it_runs_inside_the_with_block_with_our_peer_id(settings: DaemonSettings) -> None:
    async with Daemon(settings) as p2pd:
        assert p2pd.peer_id == Identity.load_or_create(settings.identity_file).peer_id
        assert p2pd.addresses == (f"/ip4/127.0.0.1/tcp/{p2pd.port}",)
        assert p2pd.port > 0
        assert await p2pd.control.connected() == {}
        process = psutil.Process(p2pd.pid)
        assert process.name() == "p2pd"
        assert oom_score(p2pd.pid) == 1000, "the kernel kills it before the trainer"
    assert not process.is_running()
    assert not any(settings.folder.iterdir())


async def test_it_ends_at_its_memory_limit(settings: DaemonSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(daemon, "MEMORY_BYTES", 32 << 20)
    with pytest.raises(TransportError, match="ended at once"):
        await start(settings)


@pytest.mark.parametrize("through", [(), (RELAY,)], ids=["open", "behind a relay"])
async def test_libp2ps_own_dht_serves_no_peer(folder: Path, through: tuple[str, ...]) -> None:
    async with AsyncExitStack() as stack:
        p2pd = await start_daemon(stack, folder / "a", replace(LOCAL, through=through))
        stranger = await start_daemon(stack, folder / "b")
        await stranger.control.connect(p2pd.peer_id, [f"/ip4/127.0.0.1/tcp/{p2pd.port}"])
        with pytest.raises(Unreachable, match="protocols not supported"):
            await stranger.control.open_stream(p2pd.peer_id, "/ipfs/kad/1.0.0")


async def test_a_crash_is_detected(settings: DaemonSettings) -> None:
    async with Daemon(settings) as p2pd:
        watch = asyncio.create_task(p2pd.died())
        await asyncio.sleep(0)
        assert not watch.done()
        os.kill(p2pd.pid, signal.SIGKILL)
        assert await watch == -signal.SIGKILL


@pytest.mark.parametrize("reuse", [False, True], ids=["plain", "SO_REUSEPORT"])
async def test_a_busy_port_is_reported(settings: DaemonSettings, reuse: bool) -> None:
    with socket.socket() as other:
        if reuse:  # another p2pd of this user: the kernel would let both bind the port
            other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(BadSettings, match=f"port {port} is in use") as caught:
            await start(replace(settings, port=port))
    assert str(port) in caught.value.hint


async def test_a_port_taken_after_the_check_is_reported(settings: DaemonSettings, busy_port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(daemon, "_check_port", lambda host, port: None)
    with pytest.raises(BadSettings, match=f"port {busy_port} is in use"):
        await start(replace(settings, port=busy_port))


async def test_a_foreign_host_is_rejected(settings: DaemonSettings) -> None:
    for host in ("203.0.113.1", "example.org"):
        with pytest.raises(BadSettings, match=host) as caught:
            await start(replace(settings, host=host))
        assert caught.value.hint


async def test_a_folder_that_others_may_enter_is_rejected(settings: DaemonSettings) -> None:
    settings.folder.mkdir()
    settings.folder.chmod(0o755)  # independent of the umask
    with pytest.raises(BadSettings, match="other users") as caught:
        await start(settings)
    assert "chmod 700" in caught.value.hint


async def test_a_folder_too_deep_for_sockets_is_rejected(settings: DaemonSettings) -> None:
    with pytest.raises(BadSettings, match="too long"):
        await start(replace(settings, folder=settings.folder / ("x" * 100)))


async def test_another_binary_is_rejected(settings: DaemonSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(daemon, "KNOWN_SHA256", {key: "0" * 64 for key in daemon.KNOWN_SHA256})
    daemon.verified_binary.cache_clear()
    with pytest.raises(BadSettings, match="SHA-256"):
        await start(settings)


PARENT = """
import asyncio, sys
from pathlib import Path
from gossamer.protocol.libp2p.p2pd import Daemon, DaemonSettings
from tests.protocol.peers import seeded
async def main():
    async with Daemon(DaemonSettings(Path(sys.argv[1]), Path(sys.argv[2]), "127.0.0.1")) as p2pd:
        print(p2pd.pid, flush=True)
        await asyncio.Event().wait()
asyncio.run(main())
"""


def test_it_ends_when_its_parent_is_killed(settings: DaemonSettings) -> None:
    command = [sys.executable, "-c", PARENT, str(settings.identity_file), str(settings.folder)]
    with subprocess.Popen(command, cwd=Path(__file__).parents[3], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        process = psutil.Process(int(parent.stdout.readline()))
        parent.kill()
    psutil.wait_procs([process], timeout=5)
    assert not process.is_running()
