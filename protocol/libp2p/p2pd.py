"""The p2pd process: start it with our flags, query it over its control socket, and end it with this process.

hivemind's own p2pd ends with an unreachable bootstrap node, relays for any peer and shares its control socket, and its control client
blocks on a hung daemon. So we start the binary, and `Control` opens one connection per request.
"""

from __future__ import annotations

import asyncio
import errno
import hashlib
import ipaddress
import logging
import os
import platform
import signal
import socket
import sys
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, Self

from gossamer.protocol.addresses import CIRCUIT, address_bytes, port_of, read_address, route
from gossamer.protocol.errors import BadMessage, BadSettings, TransportError, Unreachable
from gossamer.protocol.identity import PeerId, need_private
from gossamer.protocol.libp2p.hivemind_imports import (
    P2P,
    Client,
    Multiaddr,
    P2PDaemonError,
    hivemind_cli,
    p2pd_pb2,
    read_pbmsg_safe,
    write_pbmsg,
)
from gossamer.protocol.libp2p.splice import Pair
from gossamer.protocol.tasks import cancel

log = logging.getLogger(__name__)

ASK_S = 5.0  # timeout of a request that p2pd answers from memory: on a busy machine it waits seconds for a core
DIAL_S = 5.0  # timeout of a request that makes p2pd dial
HEAD_START_S = 2.0  # direct addresses are dialled alone for this long: p2pd dials all at once, and a nearby relay often wins
BUFFER_BYTES = 256 * 1024
ERROR_CHARS = 300  # longest quoted error of p2pd, which lists every address that it tried


Accept = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None] | None]


class Control:
    """Client of one p2pd's control socket, for several tasks. Every method raises Unreachable if p2pd has ended or does not respond."""

    def __init__(self, path: Path) -> None:
        self._path = path

    async def identify(self) -> tuple[PeerId, tuple[str, ...]]:
        """Return p2pd's peer id and its multiaddrs, without /p2p."""
        response = await self._ask(p2pd_pb2.Request(type=p2pd_pb2.Request.IDENTIFY), ASK_S)
        return PeerId(response.identify.id), tuple(filter(None, map(_address_text, response.identify.addrs)))

    async def connected(self) -> dict[PeerId, str]:
        """Return the connected peers with their remote multiaddrs, empty if unknown; of several connections to a peer, a direct one."""
        response = await self._ask(p2pd_pb2.Request(type=p2pd_pb2.Request.LIST_PEERS), ASK_S)
        found: dict[PeerId, str] = {}
        for peer in response.peers:  # one entry per connection
            address = _address_text(peer.addrs[0]) if peer.addrs else ""
            with suppress(BadMessage):  # hosts with other types of keys are not Gossamer peers
                if route(found.get(PeerId(peer.id), CIRCUIT)) == "relayed":
                    found[PeerId(peer.id)] = address
        return found

    async def connect(self, partner: PeerId, addresses: Sequence[str]) -> None:
        """Dial `partner` unless connected, through a relay only if all else fails. Skips invalid addresses. Raises Unreachable."""
        raw = {address: parsed for address in addresses if (parsed := _transport_part(address, partner)) is not None}
        direct = [parsed for address, parsed in raw.items() if CIRCUIT not in address]
        if 0 < len(direct) < len(raw):
            with suppress(Unreachable):
                return await self._dial(partner, direct, HEAD_START_S)
        await self._dial(partner, list(raw.values()), DIAL_S)

    async def _dial(self, partner: PeerId, raw: Sequence[bytes], timeout_s: float) -> None:
        request = p2pd_pb2.ConnectRequest(peer=partner.raw, addrs=raw)
        await self._ask(p2pd_pb2.Request(type=p2pd_pb2.Request.CONNECT, connect=request), timeout_s)

    async def disconnect(self, partner: PeerId) -> None:
        """Close every connection to a partner, with all its streams. Raises Unreachable."""
        request = p2pd_pb2.Request(type=p2pd_pb2.Request.DISCONNECT, disconnect=p2pd_pb2.DisconnectRequest(peer=partner.raw))
        await self._ask(request, ASK_S)

    async def open_stream(self, partner: PeerId, protocol: str) -> tuple[Pair, str]:
        """Open a raw byte stream to `partner`; also return its multiaddr, empty if unknown. The caller closes it. Raises Unreachable."""
        request = p2pd_pb2.StreamOpenRequest(peer=partner.raw, proto=[protocol])
        response, reader, writer = await self._send(p2pd_pb2.Request(type=p2pd_pb2.Request.STREAM_OPEN, streamOpen=request), DIAL_S)
        return (reader, writer), _address_text(response.streamInfo.addr)

    async def receive_streams(self, protocol: str, listener: Path) -> None:
        """Make p2pd connect inbound streams of `protocol` to the Unix socket `listener`. See `receiving`."""
        request = p2pd_pb2.StreamHandlerRequest(addr=Multiaddr(f"/unix{listener}").to_bytes(), proto=[protocol], balanced=False)
        await self._ask(p2pd_pb2.Request(type=p2pd_pb2.Request.STREAM_HANDLER, streamHandler=request), ASK_S)

    async def _ask(self, request: Any, timeout_s: float) -> Any:
        response, _, writer = await self._send(request, timeout_s)
        writer.transport.abort()
        return response

    async def _send(self, request: Any, timeout_s: float) -> tuple[Any, asyncio.StreamReader, asyncio.StreamWriter]:
        """Send a request on a new connection; return p2pd's response and the connection. Raises Unreachable."""
        try:
            async with asyncio.timeout(timeout_s):
                reader, writer = await asyncio.open_unix_connection(self._path, limit=BUFFER_BYTES)
                try:
                    await write_pbmsg(writer, request)
                    return await _read_response(reader), reader, writer
                except BaseException:
                    writer.transport.abort()
                    raise
        except TimeoutError:
            raise Unreachable(f"p2pd did not respond within {timeout_s:g} s") from None
        except (OSError, EOFError) as error:
            raise Unreachable(f"p2pd has ended: {error}") from error


async def _read_response(reader: asyncio.StreamReader) -> Any:
    response = p2pd_pb2.Response()
    await read_pbmsg_safe(reader, response)
    if response.type == p2pd_pb2.Response.ERROR:
        raise Unreachable(f"p2pd: {' '.join(response.error.msg.split())[:ERROR_CHARS]}")
    return response


@asynccontextmanager
async def receiving(control: Control, protocol: str, listener: Path, accept: Accept) -> AsyncIterator[None]:
    """Pass inbound streams of `protocol`, each with a header for `read_stream_header`, to `accept` over the Unix socket `listener`."""
    server = await asyncio.start_unix_server(accept, listener, limit=BUFFER_BYTES)
    try:
        await control.receive_streams(protocol, listener)
        yield
    finally:
        server.close()
        with suppress(FileNotFoundError):
            os.unlink(listener)


async def read_stream_header(reader: asyncio.StreamReader) -> tuple[PeerId, str]:
    """Read p2pd's header of an inbound stream: the peer, and its multiaddr, empty if unknown. Raises BadMessage for another type of key."""
    info = p2pd_pb2.StreamInfo()
    await read_pbmsg_safe(reader, info)
    return PeerId(info.peer), _address_text(info.addr)


@lru_cache(1024)  # all connections are listed several times a second
def _address_text(raw: bytes) -> str:
    """Return a multiaddr as text; empty if it has a protocol that hivemind's library does not know.

    p2pd also dials the addresses that a peer names itself, WebTransport ones too, and then reports such an address.
    """
    try:
        return str(Multiaddr(raw))
    except ValueError:
        return ""


def _transport_part(address: str, partner: PeerId) -> bytes | None:
    """Return the binary multiaddr without its final /p2p/<partner>; None if it is invalid or leads to another peer."""
    try:
        if read_address(address) not in (None, partner):
            return None
        return address_bytes(address.removesuffix(f"/p2p/{partner}"))
    except ValueError:
        return None


class AttachedP2P(P2P):  # type: ignore[misc]
    """hivemind's client of our p2pd. After `close`, its calls fail instead of waiting forever."""

    @classmethod
    async def attach(cls, socket: Path) -> Self:
        """Open the persistent connection to p2pd that carries the directory's calls. `socket` is p2pd's control socket."""
        self: Self = cls()
        self._alive = True
        self._daemon_listen_maddr = Multiaddr(f"/unix{socket}")
        self._client_listen_maddr = Multiaddr(f"/unix{socket}.unused")  # unused: tunnel.py handles streams
        self._client = await Client.create(self._daemon_listen_maddr, self._client_listen_maddr, persistent_conn_max_msg_size=MESSAGE_BYTES)
        self._client.control._pending_calls = _PendingCalls()
        await self._ping_daemon()
        return self

    @property
    def is_broken(self) -> bool:
        """Whether the connection to p2pd has ended."""
        return bool(self._client.control._read_task.done())

    def drop_finished_tasks(self) -> None:
        """Delete the finished tasks of inbound calls that their callers cancelled, which hivemind leaks. Call it periodically."""
        tasks = self._client.control._handler_tasks
        for call in [call for call, task in tasks.items() if task.done()]:
            del tasks[call]

    async def close(self) -> None:
        """End every pending call, hivemind's background tasks and the connection."""
        control = self._client.control
        control.call_unary_handler = _closed
        for waiting in list(control._pending_calls.values()):
            if not waiting.done():
                waiting.set_exception(P2PDaemonError("closed"))
        tasks = [control._read_task, control._write_task, *control._handler_tasks.values()]
        self._terminate()
        await cancel(*tasks)


class _PendingCalls(dict[Any, Any]):
    """Pending calls. It hides cancelled calls, because a reply to one of them crashes hivemind's reader task."""

    def __contains__(self, call: object) -> bool:
        future = self.get(call)
        return future is not None and not future.done()


async def _closed(*_: object) -> bytes:
    raise P2PDaemonError("closed")


KNOWN_SHA256 = {("Linux", "x86_64"): "42f8f48e62583b97cdba3c31439c08029fb2b9fc506b5bdd82c46b7cc1d279d8"}  # p2pd v0.5.0.hivemind1
MESSAGE_BYTES = 32 * 1024  # largest unary message: a directory reply has at most 14 kB, and p2pd's default would allow each caller 4 MiB
COLLECT_BYTES = 192 << 20  # memory above which p2pd's garbage collector works harder (GOMEMLIMIT); an idle p2pd uses 60 MB
MEMORY_BYTES = 768 << 20  # memory limit (RLIMIT_DATA), which includes reserved heap; p2pd ends above it and is restarted
RELAYED = 128  # connections of a peer that relays for others, which have no call of ours to be seen by
START_S = 15.0  # timeout of the start
END_S = 1.0  # time to exit after SIGTERM
SOCKET_PATH_CHARS = 100  # the kernel allows 108 bytes on Linux, 104 on macOS
RELAY_CAPS: dict[str, str | int] = {
    "relayMaxReservations": 64,  # peers that use us as their relay
    "relayMaxCircuits": 8,  # concurrent circuits per peer
    "relayDataLimit": 1 << 30,  # bytes per direction and circuit; afterwards the peers open a new circuit
    "relayTimeLimit": "30m",
    "relayBufferSize": 128 * 1024,  # per direction and circuit; p2pd's default of 16 MiB would take 2 GiB for 64 circuits
}
LONGEST_SOCKET_NAME = "call-ffffffff.sock"

# Runs before p2pd in its process, because a forked child cannot safely run Python beside gRPC's threads. It makes the kernel kill p2pd with
# its parent, and first if the machine runs out of memory; and it sets p2pd's memory limit.
_LEASH = """
import ctypes, os, resource, signal, sys
PR_SET_PDEATHSIG = 1
try:
    with open("/proc/self/oom_score_adj", "w") as adjustment:
        adjustment.write("1000")
except OSError:
    pass
resource.setrlimit(resource.RLIMIT_DATA, (int(sys.argv[2]), int(sys.argv[2])))
if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL) or os.getppid() != int(sys.argv[1]):
    sys.exit("p2pd was not started: its parent process has ended")
os.execv(sys.argv[3], sys.argv[3:])
"""


@dataclass(frozen=True, slots=True)
class DaemonSettings:
    """The network settings of p2pd. `folder` holds its sockets and is accessible only to this user (0700)."""

    identity_file: Path
    folder: Path
    host: str = "0.0.0.0"  # noqa: S104 (a peer must be reachable)
    port: int = 0  # 0: any free port
    announce: tuple[str, ...] = ()  # multiaddrs to announce instead of the listening ones (port forwarding)
    asks_router: bool = True  # map the port on the router (UPnP, NAT-PMP)
    relays: bool = False  # relay for peers that are not directly reachable; see `relay_trial.py`
    through: tuple[str, ...] = ()  # relays, with their ids, through which other peers reach us
    listens: bool = True  # accept connections at all
    max_connections: int = 32  # idle ones above it are closed, since a home router's table of connections is small; a relay has RELAYED

    @property
    def is_local(self) -> bool:
        """Whether p2pd listens on a loopback address only."""
        return _ip(self.host).is_loopback


class Daemon:
    """One p2pd process, as `async with`. Raises BadSettings if the operator can fix the cause, else TransportError."""

    def __init__(self, settings: DaemonSettings) -> None:
        self.settings = settings
        self.socket_path = settings.folder / "p2pd.sock"  # p2pd's control socket
        self._drain: asyncio.Task[None] | None = None
        self._last_lines: deque[str] = deque(maxlen=20)
        self.control = Control(self.socket_path)
        self.peer_id: PeerId
        self.addresses: tuple[str, ...] = ()

    @property
    def pid(self) -> int:
        """The process id, for tests and diagnosis."""
        return self._process.pid

    @property
    def port(self) -> int:
        """The TCP port on which p2pd listens; 0 if it does not listen."""
        return self.settings.port or next((port_of(address) for address in self.addresses if "/tcp/" in address), 0)

    async def __aenter__(self) -> Self:
        _prepare_folder(self.settings.folder)
        _check_port(self.settings.host, self.settings.port)
        self.socket_path.unlink(missing_ok=True)
        command = [sys.executable, "-I", "-S", "-c", _LEASH, str(os.getpid()), str(MEMORY_BYTES)] if sys.platform == "linux" else []
        self._process = await asyncio.create_subprocess_exec(
            *command,
            *self._command(),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env={
                "GOLOG_LOG_LEVEL": "error",
                "GOMEMLIMIT": str(COLLECT_BYTES),
                **({"GOMAXPROCS": "1"} if self.settings.relays else {}),  # see `_role`
            },
            start_new_session=True,  # Ctrl-C must not end p2pd before this peer has left the swarm
        )
        try:
            await self._wait_until_ready()
        except BaseException:
            await self._end()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._end()

    async def died(self) -> int:
        """Wait until p2pd has ended and return its exit code. Cancel-safe."""
        return await self._process.wait()

    def kill(self) -> None:
        """Send SIGKILL, for a hung p2pd and for tests."""
        self._signal(signal.SIGKILL)

    def _command(self) -> list[str]:
        settings, host = self.settings, _ip(self.settings.host)
        flags: dict[str, str | int] = {
            "id": str(settings.identity_file),
            "listen": f"/unix{self.socket_path}",
            "noListenAddrs": int(not settings.listens),
            "autonat": int(settings.relays or not host.is_loopback),
            "natPortMap": int(settings.asks_router and not host.is_loopback),
            "connManager": 1,
            "connLo": RELAYED // 2,
            "connHi": max(RELAYED, settings.max_connections),  # p2pd closes used ones too, so it comes second: see `Libp2pNode`
            "idleTimeout": "30s",  # p2pd ends after this long without a client
            "persistentConnMaxMsgSize": MESSAGE_BYTES,
        }
        if settings.listens:
            flags["hostAddrs"] = f"/ip{host.version}/{settings.host}/tcp/{settings.port}"  # no QUIC: its version has known vulnerabilities
        if settings.announce:
            flags["announceAddrs"] = ",".join(settings.announce)
        flags |= _role(settings)
        return [str(verified_binary()), *(f"-{name}={value}" for name, value in flags.items())]

    async def _wait_until_ready(self) -> None:
        try:
            async with asyncio.timeout(START_S):
                await self._read_until("Peer ID:")
                self._drain = asyncio.create_task(self._read_until(None), name="p2pd output")
                self.peer_id, self.addresses = await self.control.identify()
        except (TimeoutError, Unreachable) as error:
            raise TransportError(f"p2pd did not start: {error or 'too slow'}", hint="check whether the machine is overloaded") from error
        if not self.addresses and self.settings.listens:
            raise _port_in_use(self.settings.port)

    async def _read_until(self, start: str | None) -> None:
        """Read p2pd's output up to a line that starts with `start`, or to the end if `start` is None."""
        assert self._process.stdout is not None
        while line := await self._process.stdout.readline():
            text = line.decode(errors="replace").rstrip()
            self._last_lines.append(text)
            log.debug("p2pd: %s", text)
            if start is not None and text.startswith(start):
                return
        if start is not None:
            raise self._exit_error()

    def _exit_error(self) -> TransportError | BadSettings:
        output = " / ".join(self._last_lines) or "no output"
        if "address already in use" in output:
            return _port_in_use(self.settings.port)
        return TransportError(f"p2pd ended at once: {output}", hint="see the log; `make clean install` reinstalls p2pd")

    async def _end(self) -> None:
        self._signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(END_S):
                await self._process.wait()
        except TimeoutError:
            self._signal(signal.SIGKILL)
            await self._process.wait()
        if self._drain is not None:
            await self._drain
        self.socket_path.unlink(missing_ok=True)

    def _signal(self, number: signal.Signals) -> None:
        """Send a signal. Process.terminate would poll first, which may take the exit status away from asyncio's child watcher."""
        if self._process.returncode is None:
            with suppress(ProcessLookupError):
                os.kill(self._process.pid, number)


def _role(settings: DaemonSettings) -> dict[str, str | int]:
    """Return the flags of p2pd's role: a relay, a peer behind relays, or neither.

    p2pd installs two relay services, and the second one replaces the first. The default one cuts circuits after 128 KiB. With one thread
    (GOMAXPROCS=1), ours is the second. `relay=0` would also disable dialling through relays, so each reachable p2pd relays up to 128 KiB
    for any peer. libp2p's own DHT is off, because any caller could fill its memory; but p2pd uses relays only with the DHT, so a peer
    behind relays runs it as a client.
    """
    if settings.relays:
        return {"relayService": 1, "forceReachabilityPublic": 1, **RELAY_CAPS}
    if settings.through:
        trusted = ",".join(settings.through)
        place: dict[str, str | int] = {"autoRelay": 1, "relayDiscovery": 0, "trustedRelays": trusted}
        return {"relayService": 0, "dhtClient": 1, "forceReachabilityPrivate": 1, **place}
    return {"relayService": 0}


def _prepare_folder(folder: Path) -> None:
    """Create the folder, or check that only this user may enter it. Raises BadSettings."""
    if len(os.fsencode(folder / LONGEST_SOCKET_NAME)) > SOCKET_PATH_CHARS:
        raise BadSettings(
            f"the runtime folder's path is too long for sockets: {folder}", hint="choose a shorter path, for example under /tmp"
        )
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    need_private(folder, "the runtime folder")


def _check_port(host: str, port: int) -> None:
    """Raise BadSettings if the port is busy: p2pd sets SO_REUSEPORT, so two daemons of one user would share its connections."""
    family = socket.AF_INET6 if _ip(host).version == 6 else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise _port_in_use(port) from error
            raise BadSettings(
                f"cannot listen on {host} port {port}: {error.strerror}", hint="choose another with --listen or --port"
            ) from error


@cache
def verified_binary() -> Path:
    """Return the path of hivemind's p2pd after verifying its hash. Raises BadSettings."""
    path = Path(hivemind_cli.__path__[0]) / "p2pd"
    if not path.is_file():
        raise BadSettings(f"hivemind is installed without p2pd: {path} is missing", hint="install hivemind from its wheel")
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    machine = (platform.system(), platform.machine())
    known = KNOWN_SHA256.get(machine)
    if known is None:
        log.warning("p2pd for %s has SHA-256 %s, which this build cannot verify", "/".join(machine), digest)
    elif digest != known:
        raise BadSettings(f"{path} is not the p2pd that this build was tested with (SHA-256 {digest})", hint="reinstall hivemind==1.1.12")
    return path


def _ip(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        raise BadSettings(
            f"{host!r} is not an IP address to listen on", hint="use 0.0.0.0 for all interfaces, 127.0.0.1 for this machine only"
        ) from None


def _port_in_use(port: int) -> BadSettings:
    return BadSettings(f"port {port} is in use", hint=f"stop the program that listens on port {port}, or choose another with --port")
