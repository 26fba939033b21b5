"""Our own p2pd process: started with our flags, watched, questioned over its control socket, and never outliving us.

hivemind can start p2pd by itself, but then a dead bootstrap kills it, it relays for the whole world, and its control socket lies in a
shared folder; so we start hivemind's binary (checked by hash) and only attach to it. Its client leaks connections on a time-out and
waits for ever on a hung daemon; so ours opens one a call, with a time-out, and closes it however the call ends. Restarting is the
caller's business (`node.py`).
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
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Self

from gossamer.protocol.addresses import CIRCUIT, address_bytes, port_of, read_address, route
from gossamer.protocol.errors import BadMessage, BadSettings, TransportError, Unreachable
from gossamer.protocol.identity import PeerId
from gossamer.protocol.libp2p.hivemind_imports import Multiaddr, hivemind_cli, p2pd_pb2, read_pbmsg_safe, write_pbmsg
from gossamer.protocol.libp2p.splice import Pair
from gossamer.protocol.private_folder import need_private

log = logging.getLogger(__name__)

ASK_S = 2.0  # a question that p2pd answers from memory
DIAL_S = 5.0  # one that makes it dial
HEAD_START_S = 2.0  # of direct addresses: p2pd dials all at once, and a circuit through a near relay wins often enough
BUFFER_BYTES = 256 * 1024
ERROR_CHARS = 300  # of p2pd's explanation, which lists every address that it tried


class Control:
    """Questions to one p2pd. Stateless: safe to use from several tasks, useless after that p2pd has died.

    Every method raises Unreachable when p2pd is gone or silent.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    async def identify(self) -> tuple[PeerId, tuple[str, ...]]:
        """Return p2pd's peer id and the multiaddrs it listens on, without /p2p."""
        response = await self._ask(p2pd_pb2.Request(type=p2pd_pb2.Request.IDENTIFY), ASK_S)
        addresses = tuple(str(Multiaddr(raw)) for raw in response.identify.addrs)
        return PeerId(response.identify.id), addresses

    async def connected(self) -> dict[PeerId, str]:
        """Return the peers to which a connection is open, each with the multiaddr at its other end, and of several not a relayed one.

        Empty where p2pd does not say.
        """
        response = await self._ask(p2pd_pb2.Request(type=p2pd_pb2.Request.LIST_PEERS), ASK_S)
        found: dict[PeerId, str] = {}
        for peer in response.peers:  # one for each connection
            address = str(Multiaddr(peer.addrs[0])) if peer.addrs else ""
            with suppress(BadMessage):  # hosts of other kinds of key are none of ours
                if route(found.get(PeerId(peer.id), CIRCUIT)) == "relayed":
                    found[PeerId(peer.id)] = address
        return found

    async def connect(self, partner: PeerId, addresses: Sequence[str]) -> None:
        """Dial `partner` unless connected, through a relay only when no direct address answers. Raises Unreachable.

        Unreadable addresses are passed over.
        """
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
        """End every connection to a partner, and what passes on it. Raises Unreachable."""
        request = p2pd_pb2.DisconnectRequest(peer=partner.raw)
        await self._ask(p2pd_pb2.Request(type=p2pd_pb2.Request.DISCONNECT, disconnect=request), ASK_S)

    async def open_stream(self, partner: PeerId, protocol: str) -> tuple[Pair, str]:
        """Open a raw byte stream to `partner`, at which multiaddr is told too; the caller closes the writer. Raises Unreachable."""
        request = p2pd_pb2.StreamOpenRequest(peer=partner.raw, proto=[protocol])
        response, reader, writer = await self._send(p2pd_pb2.Request(type=p2pd_pb2.Request.STREAM_OPEN, streamOpen=request), DIAL_S)
        return (reader, writer), str(Multiaddr(response.streamInfo.addr))

    async def receive_streams(self, protocol: str, listener: Path) -> None:
        """Have inbound streams of `protocol` connect to the Unix socket `listener`, where `stream_opener` tells whose they are."""
        request = p2pd_pb2.StreamHandlerRequest(addr=Multiaddr(f"/unix{listener}").to_bytes(), proto=[protocol], balanced=False)
        await self._ask(p2pd_pb2.Request(type=p2pd_pb2.Request.STREAM_HANDLER, streamHandler=request), ASK_S)

    async def _ask(self, request: Any, timeout_s: float) -> Any:
        response, _, writer = await self._send(request, timeout_s)
        writer.transport.abort()
        return response

    async def _send(self, request: Any, timeout_s: float) -> tuple[Any, asyncio.StreamReader, asyncio.StreamWriter]:
        """Open a connection and return p2pd's answer with it. Raises Unreachable."""
        try:
            async with asyncio.timeout(timeout_s):
                reader, writer = await asyncio.open_unix_connection(self._path, limit=BUFFER_BYTES)
                try:
                    await write_pbmsg(writer, request)
                    return await _answer(reader), reader, writer
                except BaseException:
                    writer.transport.abort()
                    raise
        except TimeoutError:
            raise Unreachable(f"no answer from p2pd within {timeout_s:g} s") from None
        except (OSError, EOFError) as error:
            raise Unreachable(f"p2pd has gone: {error}") from error


async def _answer(reader: asyncio.StreamReader) -> Any:
    response = p2pd_pb2.Response()
    await read_pbmsg_safe(reader, response)
    if response.type == p2pd_pb2.Response.ERROR:
        raise Unreachable(f"p2pd: {' '.join(response.error.msg.split())[:ERROR_CHARS]}")
    return response


async def stream_opener(reader: asyncio.StreamReader) -> tuple[PeerId, str]:
    """Read who opened the inbound stream that p2pd has just connected, and the multiaddr from where.

    Raises BadMessage for a key that is not Ed25519.
    """
    info = p2pd_pb2.StreamInfo()
    await read_pbmsg_safe(reader, info)
    try:
        observed = str(Multiaddr(info.addr))
    except ValueError:
        observed = ""
    return PeerId(info.peer), observed


def _transport_part(address: str, partner: PeerId) -> bytes | None:
    """Return the binary multiaddr without its end /p2p/<partner>; None when it is illegal or leads to somebody else."""
    try:
        if read_address(address) not in (None, partner):
            return None
        return address_bytes(address.removesuffix(f"/p2p/{partner}"))
    except ValueError:
        return None


KNOWN_SHA256 = {("Linux", "x86_64"): "42f8f48e62583b97cdba3c31439c08029fb2b9fc506b5bdd82c46b7cc1d279d8"}  # p2pd v0.5.0.hivemind1
MESSAGE_BYTES = 32 * 1024
"""Largest unary message: an answer of the directory has 14 kB at most. p2pd's 4 MiB would be that much memory for every caller."""
COLLECT_BYTES = 192 << 20
"""Where p2pd begins to look hard for memory to free; quiet, it takes 60 MB."""
MEMORY_BYTES = 768 << 20
"""Where it ends, and we start another: its heap, and what it has set aside for one."""
START_S = 15.0
END_S = 1.0
SOCKET_PATH_CHARS = 100  # the kernel takes 108 bytes on Linux, 104 on macOS
RELAY_CAPS: dict[str, str | int] = {
    "relayMaxReservations": 64,  # peers that are reached through us
    "relayMaxCircuits": 8,  # at once to or from one peer
    "relayDataLimit": 1 << 30,  # bytes each way in one circuit; then a new one is made
    "relayTimeLimit": "30m",
    "relayBufferSize": 128 * 1024,  # each way, of one circuit; p2pd's own 16 MiB would be 2 GiB for 64 circuits
}
LONGEST_SOCKET_NAME = "call-ffffffff.sock"

# What p2pd inherits: the wish to be killed with its parent, and before anything else where the machine runs out of memory; and a limit of
# its own. A child of a fork could not safely run Python beside gRPC's threads.
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
    sys.exit("p2pd was not started: its parent has gone")
os.execv(sys.argv[3], sys.argv[3:])
"""


@dataclass(frozen=True, slots=True)
class DaemonSettings:
    """How p2pd listens and is reached. `folder` is ours alone (0700) and holds its sockets."""

    identity_file: Path
    folder: Path
    host: str = "0.0.0.0"  # noqa: S104 (a peer is there to be reached)
    port: int = 0  # 0: any free one
    announce: tuple[str, ...] = ()  # multiaddrs to name instead of the ones listened on (port forwarding)
    asks_router: bool = True  # to open the port, where the router can be asked
    relays: bool = False  # carry the streams of peers that cannot be called directly; see `relay_trial.py`
    through: tuple[str, ...] = ()  # relays, with their ids, over which others reach us, who cannot call us directly
    listens: bool = True  # can be called at all

    @property
    def is_local(self) -> bool:
        """Whether nobody outside this machine can call it, or shall."""
        return _ip(self.host).is_loopback


class Daemon:
    """One run of p2pd, from `async with` to its death.

    Entering raises BadSettings when the operator can mend it (busy port, unusable folder or key), TransportError otherwise.
    Leaving ends the process, gently for a second, then by force.
    """

    def __init__(self, settings: DaemonSettings) -> None:
        self.settings = settings
        self.socket_path = settings.folder / "p2pd.sock"
        """Where p2pd is controlled."""
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
        """Where p2pd listens."""
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
            start_new_session=True,  # Ctrl-C is for us: p2pd stays until we have said goodbye
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
        """Return p2pd's exit code once it has died. Safe to cancel."""
        return await self._process.wait()

    def kill(self) -> None:
        """End the process at once, for tests and for one that hangs."""
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
            "connLo": 64,
            "connHi": 128,
            "idleTimeout": "30s",  # without us it ends
            "persistentConnMaxMsgSize": MESSAGE_BYTES,
        }
        if settings.listens:
            flags["hostAddrs"] = f"/ip{host.version}/{settings.host}/tcp/{settings.port}"  # no QUIC: this one has known holes
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
            raise TransportError(f"p2pd did not start: {error or 'too slow'}", hint="is the machine overloaded?") from error
        if not self.addresses and self.settings.listens:
            raise _port_in_use(self.settings.port)

    async def _read_until(self, start: str | None) -> None:
        """Read p2pd's output up to a line that starts so, or to its end."""
        assert self._process.stdout is not None
        while line := await self._process.stdout.readline():
            text = line.decode(errors="replace").rstrip()
            self._last_lines.append(text)
            log.debug("p2pd: %s", text)
            if start is not None and text.startswith(start):
                return
        if start is not None:
            raise self._why_it_ended()

    def _why_it_ended(self) -> TransportError | BadSettings:
        said = " / ".join(self._last_lines) or "nothing"
        if "address already in use" in said:
            return _port_in_use(self.settings.port)
        return TransportError(f"p2pd ended at once and said: {said}", hint="see the log; `make clean install` installs it anew")

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
        """Send a signal. Not by Process.terminate: that polls first, and may take the exit status away from asyncio's watcher."""
        if self._process.returncode is None:
            with suppress(ProcessLookupError):
                os.kill(self._process.pid, number)


def _role(settings: DaemonSettings) -> dict[str, str | int]:
    """Return what makes p2pd a relay, one that is reached through relays, or neither.

    A relay has two relay services inside, of which the one installed last stays: the other cuts what it carries after 128 KiB. On one
    thread (GOMAXPROCS=1) the right one is last. Neither role switches relaying off: `relay=0` would, and dialling through relays too,
    so every p2pd that is reachable carries up to 128 KiB and two minutes for a stranger.

    libp2p's own DHT is off: addresses come from records, and whoever calls it can fill its memory with providers. p2pd takes no relay
    without it, though, so there it is a client, which answers nobody and finds no server to ask.
    """
    if settings.relays:
        return {"relayService": 1, "forceReachabilityPublic": 1, **RELAY_CAPS}
    if settings.through:
        trusted = ",".join(settings.through)
        place: dict[str, str | int] = {"autoRelay": 1, "relayDiscovery": 0, "trustedRelays": trusted}
        return {"relayService": 0, "dhtClient": 1, "forceReachabilityPrivate": 1, **place}
    return {"relayService": 0}


def _prepare_folder(folder: Path) -> None:
    """Make the folder, or check that it is ours alone. Raises BadSettings."""
    if len(os.fsencode(folder / LONGEST_SOCKET_NAME)) > SOCKET_PATH_CHARS:
        raise BadSettings(
            f"the runtime folder's path is too long for sockets: {folder}", hint="choose a shorter one, for example under /tmp"
        )
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    need_private(folder, "the runtime folder")


def _check_port(host: str, port: int) -> None:
    """Raise BadSettings unless we can listen there.

    p2pd would not notice: it sets SO_REUSEPORT, with which two daemons of one user share a port and each gets half the callers.
    """
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
    """Return hivemind's p2pd after checking that it is the one we know. Raises BadSettings."""
    path = Path(hivemind_cli.__path__[0]) / "p2pd"
    if not path.is_file():
        raise BadSettings(f"hivemind came without p2pd: {path} is missing", hint="install hivemind from its wheel")
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    machine = (platform.system(), platform.machine())
    known = KNOWN_SHA256.get(machine)
    if known is None:
        log.warning("p2pd of %s has sha256 %s, which this build cannot check", "/".join(machine), digest)
    elif digest != known:
        raise BadSettings(f"{path} is not the p2pd this build was tested with (sha256 {digest})", hint="reinstall hivemind==1.1.12")
    return path


def _ip(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        raise BadSettings(f"{host!r} is not an IP address to listen on", hint="0.0.0.0 for everybody, 127.0.0.1 for this machine") from None


def _port_in_use(port: int) -> BadSettings:
    return BadSettings(f"port {port} is in use", hint=f"stop the program that listens on port {port}, or choose another with --port")
