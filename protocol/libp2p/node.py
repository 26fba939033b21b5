"""A peer on libp2p: p2pd, directory and tunnel as one unit, which is rebuilt whole when p2pd dies or hangs, or needs another role.

Above it nothing changes when that happens: streams in flight end with PeerGone, calls fail at once with Unreachable while it is
down, and afterwards the same handler serves, on the same port if it can be had, and the last record is announced again. Meetings,
records and partners are the business of the layer above.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Iterable, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, replace
from typing import Self

from gossamer.protocol.addresses import Route, host_of, is_loopback, read_address, route, route_between, with_peer
from gossamer.protocol.errors import BadMessage, BadSettings, GossamerError, TransportError, Unreachable
from gossamer.protocol.identity import PeerId
from gossamer.protocol.libp2p.attached import AttachedP2P
from gossamer.protocol.libp2p.dial_back import DialBack
from gossamer.protocol.libp2p.dialling import Dialling
from gossamer.protocol.libp2p.directory import DhtDirectory
from gossamer.protocol.libp2p.hivemind_imports import P2PDaemonError
from gossamer.protocol.libp2p.p2pd import Daemon, DaemonSettings
from gossamer.protocol.libp2p.reachability import Reachability
from gossamer.protocol.libp2p.record_store import RecordShelf
from gossamer.protocol.libp2p.relay_trial import carries
from gossamer.protocol.libp2p.splice import CarriedBytes
from gossamer.protocol.libp2p.tunnel import TunnelTransport
from gossamer.protocol.messages.records import MemberRecord
from gossamer.protocol.nearby import seal
from gossamer.protocol.streams.admission import Admission
from gossamer.protocol.streams.transport import Purpose, Stream, StreamHandler
from gossamer.protocol.tasks import cancel

log = logging.getLogger(__name__)

PULSE_S = 5.0
PLACE_S = 0.5  # while we wait for a place at a relay
NUM_ACQUAINTANCES = 8
BUILD_S = 30.0
BACK_OFF_S = (0.5, 60.0)
HEALTHY_S = 60.0  # a p2pd that lived so long may be restarted without waiting
TRY_AGAIN_S = 30.0
RELAY_TRIALS = 4  # a relay that fails so often serves without that role


@dataclass(frozen=True, slots=True)
class _Unit:
    """What lives and dies together with one p2pd."""

    daemon: Daemon
    directory: DhtDirectory
    p2p: AttachedP2P
    tunnel: TunnelTransport
    stack: AsyncExitStack


class Libp2pNode:
    """Transport and Directory of one peer over libp2p. Use as `async with`, on the process's only event loop.

    `bootstraps` is asked for multiaddrs with /p2p/<peer id> (invite, address book) whenever no connection exists, `is_banned` about
    everybody who opens a stream to us. `bare_record` signs, for our addresses, the record that other members see before we announce
    ourselves; None while we are not known to be a member. Entering raises BadSettings (busy port, unusable folder) or TransportError; it
    does not wait for any bootstrap.
    """

    peer_id: PeerId
    """Who this peer is, as p2pd proves it to others, once it has been entered."""

    def __init__(
        self,
        settings: DaemonSettings,
        shelf: RecordShelf,
        handler: StreamHandler,
        bootstraps: Callable[[], Sequence[str]] = tuple,
        is_banned: Callable[[PeerId], bool] = lambda partner: False,
        bare_record: Callable[[tuple[str, ...]], MemberRecord | None] = lambda addresses: None,
    ) -> None:
        self._settings = settings
        self._shelf = shelf
        self._handler = handler
        self._bootstraps = bootstraps
        self._is_banned = is_banned
        self._bare_record = bare_record
        self.carried = CarriedBytes()
        """Bytes given to and taken from p2pd by streams, HTTP/2 framing included."""
        self._unit: _Unit | None = None
        self._addresses: tuple[str, ...] = ()
        self._port = settings.port
        self._record: MemberRecord | None = None
        self._reachability = Reachability(settings.through)
        self._trials_left = RELAY_TRIALS if settings.relays else 0
        self._relays = False

    @property
    def addresses(self) -> tuple[str, ...]:
        """Multiaddrs of this peer with its id, the widest reach first: internet, relays, local network (sealed too), this machine."""
        seen, host = (self._reachability.open_at,) if self._reachability.open_at else (), self._reachability.public_host
        local = [address for address in self._addresses if route(address) == "local" and not is_loopback(address)]
        sealed = (seal(local, self.peer_id, host),) if local and host else ()
        own = dict.fromkeys((*seen, *self._addresses, *sealed))
        return tuple(with_peer(address, self.peer_id) for address in sorted(own, key=_reach))

    @property
    def through(self) -> tuple[str, ...]:
        """The relays through which others reach this peer; none where they call it directly, as far as is known."""
        return self._reachability.through

    @property
    def relays_at(self) -> str:
        """Where this peer relays for others, with its id; empty while it does not, or cannot be called itself."""
        public = [address for address in self.addresses if route(address) == "direct"]
        return public[0] if public and self._relays and self._reachability.is_open is not False else ""

    @property
    def num_neighbours(self) -> int:
        """How many members of the directory are known to be alive."""
        return self._unit.directory.num_neighbours if self._unit else 0

    @property
    def daemon_pid(self) -> int:
        """p2pd's process id, 0 while there is none."""
        return self._unit.daemon.pid if self._unit else 0

    async def __aenter__(self) -> Self:
        self._unit = await self._build()
        self._supervisor = asyncio.create_task(self._supervise(self._unit), name="libp2p supervisor")
        return self

    async def __aexit__(self, *_: object) -> None:
        await cancel(self._supervisor)
        await self._tear_down()

    async def connect(self, partner: PeerId, addresses: Sequence[str], purpose: Purpose) -> Stream:
        """Open a stream to `partner`; `addresses` are hints (multiaddrs) and may be empty. Raises Unreachable."""
        stream = await self._up().tunnel.connect(partner, addresses, purpose)
        stream.route = self._route(partner, stream.observed)
        return stream

    async def announce(self, record: MemberRecord) -> None:
        """Publish this peer's own record, again too when p2pd is restarted. Raises TransportError, BadMessage."""
        self._record = record
        await self._up().directory.announce(record)

    async def members(self) -> list[MemberRecord]:
        """Return the verified, unexpired records that can be found now. Raises Unreachable while p2pd is down."""
        return await self._up().directory.members()

    async def connected(self) -> dict[PeerId, str]:
        """Return the peers to which a connection is open, each with the address at its other end. Raises Unreachable while p2pd is down."""
        return await self._up().daemon.control.connected()

    async def routes(self) -> dict[PeerId, Route]:
        """Return how those are reached to whom a connection is open. Raises Unreachable while p2pd is down."""
        return {partner: self._route(partner, end) for partner, end in (await self.connected()).items()}

    def _route(self, partner: PeerId, end: str) -> Route:
        known = self._shelf.latest(partner)
        return route_between(end, self.through, known.addresses if known is not None else ())

    async def _serve(self, purpose: Purpose, stream: Stream) -> None:
        stream.route = self._route(stream.partner, stream.observed)
        await self._handler(purpose, stream)

    def _up(self) -> _Unit:
        if self._unit is None:
            raise Unreachable("the network part of this peer is restarting")
        return self._unit

    # ---- life and death ----

    async def _build(self) -> _Unit:
        try:
            async with asyncio.timeout(BUILD_S), AsyncExitStack() as stack:
                daemon = await self._start_daemon(stack)
                p2p = await AttachedP2P.attach(daemon.socket_path)
                stack.push_async_callback(p2p.close)
                dialling = Dialling(daemon.control, lambda: self._addresses, lambda: self._reachability.public_host)
                directory = DhtDirectory(p2p, self._shelf, dialling, lambda: self._bare_record(self.addresses))
                await directory.open()
                admission = Admission(is_banned=self._is_banned)
                tunnel = TunnelTransport(daemon.control, self._settings.folder, self._serve, admission, self.carried, dialling)
                await stack.enter_async_context(tunnel)
                dial_back = DialBack(self._settings.folder / "reach.sock", lambda: self.relays_at)
                await dial_back.open(daemon.control)
                stack.push_async_callback(dial_back.close)
                return _Unit(daemon, directory, p2p, tunnel, stack.pop_all())
        except (OSError, EOFError, P2PDaemonError) as error:  # OSError: the time-out too
            raise TransportError(f"p2pd ended or hung while it was set up: {error!r}", hint="see the log") from error

    async def _start_daemon(self, stack: AsyncExitStack) -> Daemon:
        """Start p2pd in the role that it should have, on the port it had before if it is a rebuild: others know us there."""
        through = self._reachability.through
        settings = replace(self._settings, through=through, relays=self._trials_left > 0 and not through)
        self._relays = False
        try:
            daemon = await stack.enter_async_context(Daemon(replace(settings, port=self._port)))
        except BadSettings:
            if self._port == self._settings.port:
                raise
            log.warning("port %d was taken while p2pd was down; listening on another", self._port)
            daemon = await stack.enter_async_context(Daemon(settings))
        self.peer_id, self._addresses, self._port = daemon.peer_id, daemon.addresses, daemon.port
        return daemon

    async def _tear_down(self) -> None:
        unit, self._unit = self._unit, None
        if unit is not None:
            await unit.stack.aclose()

    async def _supervise(self, unit: _Unit) -> None:
        loop = asyncio.get_running_loop()
        delay_s = BACK_OFF_S[0]
        while True:
            began_s = loop.time()
            log.warning("p2pd is restarted: %s", await self._illness(unit))
            if loop.time() - began_s > HEALTHY_S:
                delay_s = BACK_OFF_S[0]
            rebuilt = None
            while rebuilt is None:
                rebuilt = await self._rebuild(delay_s)
                delay_s = min(2 * delay_s, BACK_OFF_S[1])
            self._unit = unit = rebuilt

    async def _rebuild(self, delay_s: float) -> _Unit | None:
        try:
            await self._tear_down()
            await asyncio.sleep(delay_s)
            return await self._build()
        except Exception as error:  # whatever it is: without a next try this peer would be alone for good
            log.warning("p2pd could not be restarted: %s", error, exc_info=not isinstance(error, GossamerError))
            return None

    async def _illness(self, unit: _Unit) -> str:
        """Look after a unit until it is ill, or needs another role; return why it must go."""
        watches = [asyncio.create_task(watch, name="p2pd watch") for watch in (_death(unit), self._beat(unit), self._role(unit))]
        try:
            done, _ = await asyncio.wait(watches, return_when=asyncio.FIRST_COMPLETED)
            return done.pop().result()
        finally:
            await cancel(*watches)

    async def _role(self, unit: _Unit) -> str:
        """Try whether we relay, and watch how others reach us; return why p2pd must be started in another role."""
        if unit.daemon.settings.relays and not await self._is_good_relay(unit):
            return "it did not relay as it should"
        try:
            if not self._settings.announce and not unit.daemon.settings.is_local:  # what the operator announces is believed
                return await self._reachability.until_role_changes(unit.daemon.control, unit.daemon.port)
        except Unreachable as error:
            log.debug("p2pd's role: %s", error)
        return await asyncio.Future()  # the pulse sees it too

    async def _is_good_relay(self, unit: _Unit) -> bool:
        relay = with_peer(unit.daemon.addresses[0], unit.daemon.peer_id)
        while True:
            try:
                self._relays = await carries(relay, self._settings.folder)
                break
            except GossamerError as error:
                log.warning("whether p2pd relays could not be tried: %s", error)
                await asyncio.sleep(TRY_AGAIN_S)
        self._trials_left = RELAY_TRIALS if self._relays else self._trials_left - 1
        if not self._trials_left:
            log.warning("p2pd failed %d times to relay as it should; this peer does not relay", RELAY_TRIALS)
        return self._relays

    async def _beat(self, unit: _Unit) -> str:
        """Every PULSE_S, ask p2pd whether it lives, and see that we are connected; return how it failed."""
        await self._introduce(unit)
        while True:
            try:
                _, named = await unit.daemon.control.identify()
                self._addresses = without_sightings(named, unit.daemon.addresses)
                await self._stay_connected(unit)
                await unit.directory.tend()
            except Unreachable as error:
                unit.daemon.kill()
                return f"it does not answer: {error}"
            if unit.p2p.is_broken:
                return "its connection for directory messages broke"
            unit.p2p.tidy()
            has_place = not self.through or any(route(address) == "relayed" for address in self._addresses)
            await asyncio.sleep(PULSE_S if has_place else PLACE_S)

    async def _introduce(self, unit: _Unit) -> None:
        """Connect, and announce again what was announced before p2pd was restarted."""
        with suppress(TransportError, BadMessage):
            await self._stay_connected(unit)
            if self._record is not None:
                await unit.directory.announce(self._record)

    async def _stay_connected(self, unit: _Unit) -> None:
        """Look for company while the directory knows nobody alive: at the bootstraps and old acquaintances, and who dialled us."""
        if not unit.directory.num_neighbours:
            await _dial(unit, [*self._bootstraps(), *self._acquaintances()])
        if not unit.directory.num_neighbours:
            await unit.directory.join(await unit.daemon.control.connected())

    def _acquaintances(self) -> list[str]:
        records = self._shelf.records()
        some = random.sample(records, min(len(records), NUM_ACQUAINTANCES))
        return [with_peer(address, record.peer_id) for record in some for address in record.addresses]


def without_sightings(named: Iterable[str], at_start: Iterable[str]) -> tuple[str, ...]:
    """Return what p2pd names without public addresses at which others have only seen it: who calls there waits at the router's door.

    What it named `at_start` is an interface's, or its operator's word; a place at a relay is its own.
    """
    hosts = {host_of(address) for address in at_start}
    return tuple(address for address in named if route(address) != "direct" or host_of(address) in hosts)


async def _death(unit: _Unit) -> str:
    return f"it died with exit code {await unit.daemon.died()}"


async def _dial(unit: _Unit, addresses: Iterable[str]) -> None:
    """Connect to these multiaddrs, all at once, and join the directory through those that answer."""

    async def dial(address: str) -> PeerId | None:
        try:
            partner = read_address(address)
            if partner is not None and partner != unit.daemon.peer_id:
                await unit.daemon.control.connect(partner, [address])
                return partner
        except (ValueError, Unreachable) as error:
            log.info("bootstrap %s: %s", address, error)
        return None

    await unit.directory.join({peer for peer in await asyncio.gather(*map(dial, addresses)) if peer is not None})


def _reach(address: str) -> int:
    """Rank a multiaddr by who can dial it: 0 anybody, 1 anybody through a relay, 2 the local network, 3 this machine."""
    way = route(address)
    if way == "local":
        return 3 if is_loopback(address) else 2
    return 0 if way == "direct" else 1
