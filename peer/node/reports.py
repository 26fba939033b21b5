"""What a node process reports while it runs (traffic, connections, processor time), and what it saves for its next start."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable
from dataclasses import dataclass

import psutil

from gossamer.peer.link import messages
from gossamer.peer.machine.energy import cpu_s
from gossamer.peer.machine.events import ConnectionsChanged, Event, NodeSpent, TrafficCounted
from gossamer.peer.machine.home import Home, write_whole
from gossamer.peer.meeting.driver import OwnSide
from gossamer.peer.node.peer import NodePeer
from gossamer.peer.swarm.member_report import MemberReporter
from gossamer.protocol.errors import Unreachable
from gossamer.protocol.libp2p.node import Libp2pNode
from gossamer.protocol.tasks import loop_s

SAVE_S = 2.0  # between two saves of the addresses: a peer that is killed early must still find its way back
REPORT_S = 2.0  # between two reports


class NodeReports:
    """Reports on one node's network to the supervisor (`emit`) and to the trainer, which decides how often to meet."""

    def __init__(self, network: Libp2pNode, peer: NodePeer, trainer: OwnSide | None, home: Home, emit: Callable[[Event], None]) -> None:
        self._network, self._peer, self._trainer, self._home, self._emit = network, peer, trainer, home, emit
        self._traffic = NodeTraffic(network)
        self._time = NodeTime(network)
        self._members: MemberReporter | None = None  # once the run is known
        self._reported = 0, 0
        self._routes: dict[str, str] = {}
        self._start_s = self._time.used_s()
        self._daemon_pid = 0

    async def run(self) -> None:
        """Report and save until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._report_for_ever())
            tasks.create_task(self._save_for_ever())

    async def _report_for_ever(self) -> None:
        while True:
            self._report_traffic()
            await self._report_connections()
            self._forgive_failures()
            self._report_members()
            if self._trainer is not None:
                self._report_cost(self._trainer)
            await asyncio.sleep(REPORT_S)

    def _report_traffic(self) -> None:
        """Report the bytes that have passed; streams pay for those that passed outside of streams."""
        traffic, throttle = self._traffic, self._peer.throttle
        traffic.look()
        for bucket, passed in ((throttle.up, traffic.sent), (throttle.down, traffic.received)):
            bucket.owe(max(0, passed - bucket.num_bytes))
        if (traffic.sent, traffic.received) != self._reported:
            self._reported = traffic.sent, traffic.received
            self._emit(TrafficCounted(*self._reported))

    def _report_members(self) -> None:
        """Report the members of the run, if a record is new."""
        if self._members is None and self._peer.member is not None:
            self._members = MemberReporter(self._emit, self._peer.member.gossip)
        if self._members is not None:
            self._members.report()

    def _forgive_failures(self) -> None:
        """Call everybody again once p2pd was replaced: what failed while there was none was no failure of theirs."""
        if (pid := self._network.daemon_pid) not in (0, self._daemon_pid):
            if self._daemon_pid:
                self._peer.book.forget_failures()
            self._daemon_pid = pid

    async def _report_connections(self) -> None:
        """Report the open connections and their routes, if they have changed."""
        routes: dict[str, str] = {}
        with contextlib.suppress(Unreachable):  # p2pd is restarting
            routes = {str(partner): route for partner, route in (await self._network.routes()).items()}
        if routes != self._routes:
            self._routes = routes
            self._emit(ConnectionsChanged(routes))

    def _report_cost(self, trainer: OwnSide) -> None:
        """Report the line's rate and the processor time of this process and p2pd."""
        used_s = self._time.used_s()
        trainer.link.notify(messages.NodeReport(trainer.line.slower_bytes_per_s, used_s, trainer.line.feeding_bytes_per_s))
        self._emit(NodeSpent(used_s - self._start_s))

    async def _save_for_ever(self) -> None:
        through: tuple[str, ...] | None = None
        awake_s = self._peer.book.saved_s or self._peer.time.local_s()
        while True:
            await asyncio.sleep(SAVE_S)
            awake_s = awake_s if self._peer.lifecycle.is_paused else self._peer.time.local_s()  # a pause is an absence too
            with contextlib.suppress(OSError):  # a full disk; all is written again soon
                await asyncio.to_thread(write_whole, self._home.peers, self._peer.book.to_bytes(loop_s(), awake_s))
                self._peer.partner_file.save()
                if (now := self._network.through) != through:
                    write_whole(self._home.relays, "".join(f"{relay}\n" for relay in now).encode())
                    through = now


@dataclass(frozen=True, slots=True)
class _Reading:
    pid: int
    sent: int
    received: int


class NodeTraffic:
    """Counts what has passed since this process began, over all lives of the daemon.

    Only p2pd uses the network. On Linux the count is what the system has read and written for p2pd, less what passed between p2pd and this
    process; elsewhere it is what the streams have carried.
    """

    def __init__(self, network: Libp2pNode) -> None:
        self._network = network
        self._last = _Reading(0, 0, 0)
        self.sent = 0
        self.received = 0

    def look(self) -> None:
        """Bring the counts up to date."""
        last, now = self._last, self._read()
        self._last = now
        if last.pid == now.pid:
            self.sent += max(0, now.sent - last.sent)
            self.received += max(0, now.received - last.received)

    def _read(self) -> _Reading:
        carried, pid = self._network.carried, self._network.daemon_pid
        try:
            counters = psutil.Process(pid).io_counters() if pid else None
            return _Reading(pid, counters.write_chars - carried.received, counters.read_chars - carried.sent) if counters else self._last
        except psutil.Error:
            return self._last
        except AttributeError:  # a system that does not count them
            return _Reading(-1, carried.sent, carried.received)


class NodeTime:
    """The processor time of this process and of the daemon, over all lives of the daemon: it never falls."""

    def __init__(self, network: Libp2pNode) -> None:
        self._network = network
        self._used_s = 0.0

    def used_s(self) -> float:
        """Return it, in seconds. That of a daemon that has ended counts as a child's, from when the system has told its exit code."""
        self._used_s = max(self._used_s, cpu_s(os.getpid()) + cpu_s(self._network.daemon_pid))
        return self._used_s
