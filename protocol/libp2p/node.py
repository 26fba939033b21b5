"""Transport and Directory of one peer over libp2p. It supervises p2pd and rebuilds it when it crashes, hangs or needs another role.

On a rebuild, open streams end with PeerGone and calls raise Unreachable; then the last record is announced again, on the same port if free.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field, replace
from typing import Self

from gossamer.protocol.addresses import Route, host_of, is_loopback, read_address, route, route_between, with_peer
from gossamer.protocol.errors import BadMessage, BadSettings, GossamerError, TransportError, Unreachable
from gossamer.protocol.identity import PeerId
from gossamer.protocol.libp2p.dial_back import DialBack
from gossamer.protocol.libp2p.dialer import Dialer
from gossamer.protocol.libp2p.directory import DhtDirectory
from gossamer.protocol.libp2p.hivemind_imports import P2PDaemonError
from gossamer.protocol.libp2p.kademlia import RecordProtocol
from gossamer.protocol.libp2p.outbound import Outbound
from gossamer.protocol.libp2p.p2pd import RELAYED, AttachedP2P, Control, Daemon, DaemonSettings
from gossamer.protocol.libp2p.reachability import Reachability
from gossamer.protocol.libp2p.record_store import RecordStore
from gossamer.protocol.libp2p.relay_trial import try_relay
from gossamer.protocol.libp2p.splice import CarriedBytes
from gossamer.protocol.libp2p.tunnel import tunnel_transport
from gossamer.protocol.messages.records import MemberRecord
from gossamer.protocol.nearby import seal
from gossamer.protocol.streams.admission import Admission
from gossamer.protocol.streams.transport import Purpose, Stream, StreamHandler
from gossamer.protocol.tasks import cancel

log = logging.getLogger(__name__)

PULSE_S = 5.0  # interval of health checks
PLACE_S = 0.5  # interval of health checks while we wait for a relay reservation
NUM_ACQUAINTANCES = 8  # known members that are dialled beside the bootstrap addresses
RESERVED_SHARE = 2  # of the places for connections: so much of them is for partners that were met
NEWCOMERS = 8  # strangers, connected since the last pulse, that may stay above the limit: they are about to call
BUILD_S = 30.0  # timeout of a rebuild
BACK_OFF_S = (0.5, 60.0)  # delay before a rebuild: the first, and the largest after repeated doubling
HEALTHY_S = 60.0  # uptime after which the back-off starts again
TRY_AGAIN_S = 30.0  # delay before a relay trial that could not be started is repeated
RELAY_TRIALS = 4  # after this many failed trials, this peer does not relay


@dataclass(frozen=True, slots=True)
class _Unit:
    """One p2pd and the objects that are closed with it."""

    daemon: Daemon
    dialer: Dialer
    directory: DhtDirectory
    p2p: AttachedP2P
    tunnel: Outbound
    admission: Admission
    stack: AsyncExitStack


@dataclass(eq=False)
class Libp2pNode:
    """Transport and Directory of one peer over libp2p. Use as `async with`, on the process's only event loop.

    Entering raises BadSettings (busy port, unusable folder) or TransportError. It does not wait for a bootstrap node.
    """

    settings: DaemonSettings
    record_store: RecordStore
    handler: StreamHandler
    bootstraps: Callable[[], Sequence[str]] = tuple  # multiaddrs with /p2p/<peer id>; called whenever no connection exists
    is_banned: Callable[[PeerId], bool] = lambda partner: False  # called for each peer that opens a stream to us
    has_met: Callable[[PeerId], bool] = lambda partner: False  # the same: whether it is no stranger
    # Signs, for our addresses, the record that other members see before our first announcement; None while we are not known as a member.
    bare_record: Callable[[tuple[str, ...]], MemberRecord | None] = lambda addresses: None
    acquaintances: Callable[[], Sequence[str]] = tuple  # like `bootstraps`, but claims of other peers: dialled if they are plausible
    last_port: int = 0  # of this peer in an earlier process: taken again if the settings name none and it is free
    peer_id: PeerId = field(init=False)  # this peer's id, as p2pd proves it to others; set on entering
    carried: CarriedBytes = field(default_factory=CarriedBytes)  # bytes that streams exchanged with p2pd, including HTTP/2 framing
    _unit: _Unit | None = None
    _addresses: tuple[str, ...] = ()
    _record: MemberRecord | None = None
    _relays: bool = False

    def __post_init__(self) -> None:
        self._connected: frozenset[PeerId] = frozenset()  # at the last pulse
        self._port = self.settings.port or self.last_port
        self._reachability = Reachability(self.settings.through)
        self._trials_left = RELAY_TRIALS if self.settings.relays else 0

    @property
    def addresses(self) -> tuple[str, ...]:
        """Multiaddrs of this peer with its id, widest reach first: internet, relays, local network (plain and sealed), loopback."""
        host = self._reachability.public_host
        local = [address for address in self._addresses if route(address) == "local" and not is_loopback(address)]
        sealed = seal(local, self.peer_id, host) if local and host else ""
        own = dict.fromkeys(filter(None, (self._reachability.open_at, *self._addresses, sealed)))
        return tuple(with_peer(address, self.peer_id) for address in sorted(own, key=_reachable))

    @property
    def through(self) -> tuple[str, ...]:
        """The relays through which other peers reach this one; empty if it is reachable directly, or not known to be unreachable."""
        return self._reachability.through

    @property
    def relays_at(self) -> str:
        """The multiaddr, with its id, at which this peer is a relay; empty if it is no relay or not reachable itself."""
        public = [address for address in self.addresses if route(address) == "direct"]
        return public[0] if public and self._relays and self._reachability.is_open is not False else ""

    @property
    def num_neighbours(self) -> int:
        """Number of members in the directory's routing table."""
        return self._unit.directory.num_neighbours if self._unit else 0

    @property
    def daemon_pid(self) -> int:
        """p2pd's process id, 0 while it is not running."""
        return self._unit.daemon.pid if self._unit else 0

    async def __aenter__(self) -> Self:
        self._unit = await self._build()
        self._supervisor = asyncio.create_task(self._supervise(self._unit), name="libp2p supervisor")
        return self

    async def __aexit__(self, *_: object) -> None:
        await cancel(self._supervisor)
        await self._tear_down()

    async def connect(self, partner: PeerId, addresses: Sequence[str], purpose: Purpose) -> Stream:
        """Open a stream to `partner`. `addresses` are multiaddrs to try and may be empty. Raises Unreachable."""
        stream = await self._up().tunnel.connect(partner, addresses, purpose)
        stream.route = self._route(partner, stream.observed)
        return stream

    async def announce(self, record: MemberRecord) -> None:
        """Publish this peer's own record, and again after each restart of p2pd. Raises TransportError or BadMessage."""
        self._record = record
        await self._up().directory.announce(record)

    async def members(self) -> list[MemberRecord]:
        """Return the verified, unexpired records that can be found now. Raises Unreachable if p2pd is down."""
        return await self._up().directory.members()

    async def connected(self) -> dict[PeerId, str]:
        """Return the connected peers, each with its remote multiaddr. Raises Unreachable if p2pd is down."""
        return await self._up().daemon.control.connected()

    async def routes(self) -> dict[PeerId, Route]:
        """Return the connected peers, each with the route of its connection. Raises Unreachable if p2pd is down."""
        return {partner: self._route(partner, end) for partner, end in (await self.connected()).items()}

    def _route(self, partner: PeerId, end: str) -> Route:
        known = self.record_store.latest(partner)
        return route_between(end, self.through, known.addresses if known is not None else ())

    async def _serve(self, purpose: Purpose, stream: Stream) -> None:
        stream.route = self._route(stream.partner, stream.observed)
        await self.handler(purpose, stream)

    def _up(self) -> _Unit:
        if self._unit is None:
            raise Unreachable("p2pd is restarting")
        return self._unit

    async def _build(self) -> _Unit:
        try:
            async with asyncio.timeout(BUILD_S), AsyncExitStack() as stack:
                daemon = await self._start_daemon(stack)
                p2p = await AttachedP2P.attach(daemon.socket_path)
                stack.push_async_callback(p2p.close)
                dialer = Dialer(daemon.control, lambda: self._addresses, lambda: self._reachability.public_host)
                calls = RecordProtocol(p2p, self.record_store, dialer, lambda: self.bare_record(self.addresses))
                calls.own = self._record  # a bare record would be newer, and show a peer that trains as paused
                directory = DhtDirectory(calls)
                await directory.open()
                admission = Admission(None, self.is_banned, self.has_met)
                opening = tunnel_transport(daemon.control, self.settings.folder, self._serve, admission, self.carried, dialer)
                tunnel = await stack.enter_async_context(opening)
                dial_back = DialBack(self.settings.folder / "reach.sock", lambda: self.relays_at)
                await stack.enter_async_context(dial_back.serving(daemon.control))
                return _Unit(daemon, dialer, directory, p2p, tunnel, admission, stack.pop_all())
        except (OSError, EOFError, P2PDaemonError) as error:  # TimeoutError is an OSError
            raise TransportError(f"p2pd ended or hung during its start: {error!r}", hint="see the log") from error

    async def _start_daemon(self, stack: AsyncExitStack) -> Daemon:
        """Start p2pd in its current role. A rebuild uses the same port if possible, because other peers know it."""
        through = self._reachability.through
        settings = replace(self.settings, through=through, relays=self._trials_left > 0 and not through)
        self._relays = False
        try:
            daemon = await stack.enter_async_context(Daemon(replace(settings, port=self._port)))
        except BadSettings:
            if self._port == self.settings.port:
                raise
            log.warning("another program took port %d while p2pd was down; using another port", self._port)
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
            log.warning("restarting p2pd: %s", await self._wait_for_failure(unit))
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
        except Exception as error:  # any error: without another attempt this peer would stay offline forever
            log.warning("p2pd restart failed: %s", error, exc_info=not isinstance(error, GossamerError))
            return None

    async def _wait_for_failure(self, unit: _Unit) -> str:
        """Maintain a unit until it fails or needs another role; return the reason to replace it."""
        checks = (_wait_for_exit(unit), self._check_health(unit), self._wait_for_role_change(unit))
        watches = [asyncio.create_task(check, name="p2pd watch") for check in checks]
        try:
            done, _ = await asyncio.wait(watches, return_when=asyncio.FIRST_COMPLETED)
            return done.pop().result()
        except Exception:  # a bug; without checks this peer would stay offline forever after the next failure of p2pd
            log.exception("a check of p2pd failed")
            return "a check of it failed"
        finally:
            await cancel(*watches)

    async def _wait_for_role_change(self, unit: _Unit) -> str:
        """Test whether p2pd works as a relay, and track our reachability; return the reason to restart p2pd in another role."""
        if unit.daemon.settings.relays and not await self._is_good_relay(unit):
            return "it failed the relay trial"
        try:
            if not self.settings.announce and not unit.daemon.settings.is_local:  # announced addresses are trusted
                return await self._reachability.until_role_changes(unit.daemon.control, unit.daemon.port, self._is_member)
        except Unreachable as error:
            log.debug("p2pd's role: %s", error)
        return await asyncio.Future()  # p2pd has ended: another check reports it

    def _is_member(self, peer: PeerId) -> bool:
        """Return whether a peer has shown that it is a member: by a record, or in a meeting."""
        return self.record_store.latest(peer) is not None or self.has_met(peer)

    async def _is_good_relay(self, unit: _Unit) -> bool:
        relay = with_peer(unit.daemon.addresses[0], unit.daemon.peer_id)
        while True:
            try:
                self._relays = await try_relay(relay, self.settings.folder)
                break
            except GossamerError as error:
                log.warning("the relay trial could not be started: %s", error)
                await asyncio.sleep(TRY_AGAIN_S)
        self._trials_left = RELAY_TRIALS if self._relays else self._trials_left - 1
        if not self._trials_left:
            log.warning("p2pd failed %d relay trials; this peer does not relay", RELAY_TRIALS)
        return self._relays

    async def _check_health(self, unit: _Unit) -> str:
        """Announce the last record again, then every PULSE_S query p2pd and keep the directory connected; return the failure."""
        with suppress(TransportError, BadMessage):
            await self._stay_connected(unit)
            if self._record is not None:
                await unit.directory.announce(self._record)
        while True:
            try:
                _, named = await unit.daemon.control.identify()
                self._addresses = without_sightings(named, unit.daemon.addresses)
                await self._stay_connected(unit)
                await self._close_idle(unit)
                await unit.directory.maintain()
            except Unreachable as error:
                unit.daemon.kill()
                return f"it does not respond: {error}"
            if unit.p2p.is_broken:
                return "the connection for directory calls broke"
            unit.p2p.drop_finished_tasks()
            has_place = not self.through or any(route(address) == "relayed" for address in self._addresses)
            await asyncio.sleep(PULSE_S if has_place else PLACE_S)

    async def _close_idle(self, unit: _Unit) -> None:
        """Close connections that carry no call where there are too many, but not to our own relays.

        A stranger's call that is slower than the least rate over its life counts as none. Half of the places stay with partners that were
        met, whatever strangers do. Inbound directory calls do not count as calls: hivemind's server does not list them, and a reply takes
        milliseconds.
        """
        connected, relays = frozenset(await unit.daemon.control.connected()), {read_address(relay) for relay in self.through}
        most = max(RELAYED if self._relays else 0, self.settings.max_connections)
        candidates = closing_order(connected, self._connected, self.has_met)
        excess, num_met = len(candidates) - most, sum(map(self.has_met, candidates))
        for partner in candidates:
            is_met = self.has_met(partner)
            if excess <= 0 or partner in relays or self._is_used(unit, partner) or (is_met and num_met <= most // RESERVED_SHARE):
                continue
            await unit.daemon.control.disconnect(partner)
            excess, num_met = excess - 1, num_met - is_met
        self._connected = connected

    def _is_used(self, unit: _Unit, partner: PeerId) -> bool:
        """Return whether a call uses the connection to a partner; a stranger's must carry something."""
        if unit.tunnel.is_calling(partner) or unit.directory.is_calling(partner):
            return True
        return unit.admission.is_calling(partner) and (self.has_met(partner) or not unit.admission.is_useless(partner))

    async def _stay_connected(self, unit: _Unit) -> None:
        """If the directory knows no member, dial the bootstrap addresses and known members, then ask the connected peers."""
        if not unit.directory.num_neighbours:
            claimed = dict.fromkeys((*self.acquaintances(), *self._known_addresses()), unit.dialer)
            await _dial(unit, claimed | dict.fromkeys(self.bootstraps(), unit.daemon.control))
        if not unit.directory.num_neighbours:
            await unit.directory.join(await unit.daemon.control.connected())

    def _known_addresses(self) -> list[str]:
        records = self.record_store.records()
        some = random.sample(records, min(len(records), NUM_ACQUAINTANCES))
        return [with_peer(address, record.peer_id) for record in some for address in record.addresses]


def without_sightings(named: Iterable[str], at_start: Iterable[str]) -> tuple[str, ...]:
    """Return p2pd's addresses without the public ones that only other peers observed: a router may drop what comes in at those."""
    hosts = {host_of(address) for address in at_start}
    return tuple(address for address in named if route(address) != "direct" or host_of(address) in hosts)


def closing_order(connected: Iterable[PeerId], before: Collection[PeerId], has_met: Callable[[PeerId], bool]) -> list[PeerId]:
    """Return the connected peers in the order in which to close them. `before`: those of the last pulse.

    Strangers come first, because their identities are free; of strangers and of met partners, those of the last pulse. NEWCOMERS new
    strangers are left out.
    """
    order = sorted(connected, key=lambda partner: (has_met(partner), partner not in before))
    newcomers = [partner for partner in order if partner not in before and not has_met(partner)][:NEWCOMERS]
    return [partner for partner in order if partner not in newcomers]


async def _wait_for_exit(unit: _Unit) -> str:
    return f"it ended with exit code {await unit.daemon.died()}"


async def _dial(unit: _Unit, through: Mapping[str, Control | Dialer]) -> None:
    async def dial(address: str) -> PeerId | None:
        try:
            partner = read_address(address)
            if partner is not None and partner != unit.daemon.peer_id:
                await through[address].connect(partner, [address])
                return partner
        except (ValueError, Unreachable) as error:
            log.info("bootstrap address %s failed: %s", address, error)
        return None

    await unit.directory.join({peer for peer in await asyncio.gather(*map(dial, through)) if peer is not None})


def _reachable(address: str) -> int:
    """Rank a multiaddr by its reach: 0 public, 1 through a relay, 2 local network, 3 loopback."""
    return {"direct": 0, "relayed": 1}.get(route(address), 3 if is_loopback(address) else 2)
