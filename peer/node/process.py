"""The node process: the supervisor's pipes at one end of a `NodePeer`, libp2p and the home folder at the other.

If p2pd dies, `Libp2pNode` rebuilds the network below the node; if this process dies, the trainer goes on training.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from dataclasses import replace

from gossamer.peer.link.messages import Writer
from gossamer.peer.link.payload_folder import PayloadFolder
from gossamer.peer.link.socket import NodeEnd
from gossamer.peer.machine.child import Child, ChildSettings, OwnPart
from gossamer.peer.machine.events import QUIET, ProcessReported
from gossamer.peer.machine.home import Home
from gossamer.peer.machine.units import UNLIMITED, rate_bytes_per_s
from gossamer.peer.meeting.driver import OwnSide
from gossamer.peer.meeting.journal import Journal
from gossamer.peer.meeting.line import Direction, Line
from gossamer.peer.node.peer import HeldRun, NodePeer, PeerNetwork
from gossamer.peer.node.reports import NodeReports
from gossamer.protocol import limits
from gossamer.protocol.addresses import read_address
from gossamer.protocol.identity import Identity
from gossamer.protocol.libp2p.node import Libp2pNode
from gossamer.protocol.libp2p.p2pd import DaemonSettings
from gossamer.protocol.messages.figures import MemberFigures, loss_milli


class NodeProcess:
    """A `NodePeer` on this machine's home, trainer and network, by the supervisor's settings."""

    def __init__(self, child: Child) -> None:
        config, runtime = child.settings.config, child.settings.runtime
        self._child = child
        self._home = home = Home(config.home)
        identity = Identity.load_or_create(home.identity)
        run = HeldRun.in_home(home, identity.peer_id)
        self._line = Line()
        payloads = PayloadFolder(runtime / "payloads")
        payloads.clear(Writer.NODE)
        self._trainer = OwnSide(NodeEnd(runtime), payloads, Journal(home.journal), self._line) if config.trains else None
        self._peer = NodePeer(
            home, run, identity, self._trainer, time.time, random.SystemRandom(), child.emit,
            wait_for_peers=config.wait_for_peers,
            has_weights=config.model is not None,
        )  # fmt: skip
        self._daemon_settings = _daemon_settings(child.settings, home, shows_the_way=run.is_founder or not config.trains)
        self._paused = asyncio.Event()
        self.take_settings(child.settings)

    def take_settings(self, settings: ChildSettings) -> None:
        """Apply settings that have changed: rates, and whether the peer is paused."""
        rates = {Direction.UP: settings.config.max_upload, Direction.DOWN: settings.config.max_download}
        self._line.limits = {way: rate_bytes_per_s(text) for way, text in rates.items()}
        throttle = self._peer.throttle
        throttle.up.bytes_per_s, throttle.down.bytes_per_s = (self._line.limits[way] for way in (Direction.UP, Direction.DOWN))
        if settings.part is not None:
            lifecycle = self._peer.lifecycle
            lifecycle.figures, lifecycle.tokens = published(settings.part), max(lifecycle.tokens, settings.part.tokens)
        if settings.paused:
            self._peer.lifecycle.pause()
            self._paused.set()
        else:
            self._peer.lifecycle.resume()

    def read_settings(self) -> bool:
        """Apply what the supervisor has sent; return whether it asks for a stop."""
        is_stopping = self._child.stop_requested()  # reads all that has come
        self.take_settings(self._child.settings)
        return is_stopping

    def stop(self) -> None:
        """Have `run` end in order."""
        self._peer.stop()

    async def run(self) -> None:
        """Run until `stop`, or until the run is over. Raises GossamerError when the run cannot be found or refuses this peer."""
        peer = self._peer
        libp2p = Libp2pNode(
            self._daemon_settings,
            peer.record_store,
            peer.answer,
            peer.bootstraps,
            peer.is_banned,
            peer.has_met,
            peer.bare_record,
            peer.acquaintances,
            self._child.settings.last_port,
        )
        async with libp2p as network, asyncio.TaskGroup() as tasks:
            reports = NodeReports(network, peer, self._trainer, self._home, self._child.emit)
            aside = [tasks.create_task(work) for work in (reports.run(), self._report_pauses())]
            await peer.run(PeerNetwork(network, network, lambda: network.addresses, network.connected))
            for task in aside:
                task.cancel()

    async def _report_pauses(self) -> None:
        """Report, whenever the supervisor pauses this peer, that its last meeting has ended: the trainer may stop then."""
        while True:
            await self._paused.wait()
            self._paused.clear()
            if self._peer.node is not None:
                await self._peer.node.meetings.until_quiet()
            self._child.emit(ProcessReported(QUIET, ""))


def published(part: OwnPart) -> MemberFigures:
    """Return the figures that a peer publishes about its own part, within what a record may hold."""
    most = limits.FIGURE
    return MemberFigures(
        own_steps=min(part.own_steps, most),
        loss_milli=loss_milli(part.loss),
        joined_s=min(max(0, int(part.joined)), most),
        carried_mb=min(round(part.carried_bytes / 1e6), most),
    )


def _daemon_settings(settings: ChildSettings, home: Home, *, shows_the_way: bool) -> DaemonSettings:
    """Return p2pd's settings. `shows_the_way`: newcomers are sent to this peer, so it relays by default."""
    config = settings.config
    daemon = DaemonSettings(
        identity_file=home.identity,
        folder=settings.runtime / "net",
        host=config.listen,
        port=config.port,
        announce=config.announce,
        max_connections=config.max_connections,
    )
    if daemon.is_local:  # no other machine can use it as a relay, nor does it need one
        return daemon
    is_limited = (config.max_upload, config.max_download) != (UNLIMITED, UNLIMITED)  # relayed bytes pass no throttle
    relays = shows_the_way and not is_limited if config.relay is None else config.relay
    return replace(daemon, relays=relays, through=_relays_of_last_time(home))


def _relays_of_last_time(home: Home) -> tuple[str, ...]:
    with contextlib.suppress(OSError, ValueError):
        lines = home.relays.read_text().split()
        return tuple(line for line in lines if read_address(line) is not None)
    return ()


async def run_node(child: Child) -> None:
    """Run the node with the supervisor's settings until its pipe ends."""
    loop = asyncio.get_running_loop()
    process = NodeProcess(child)

    def read_settings() -> None:
        if process.read_settings():
            loop.remove_reader(0)  # an ended pipe stays readable: the loop would call this again and again
            process.stop()

    loop.add_reader(0, read_settings)
    try:
        await process.run()
    finally:
        loop.remove_reader(0)
