"""What a daemon has passed, over its lives, without what it said to us; where the system does not count, what our streams carried."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass, field

import psutil
import pytest

from gossamer.peer.machine.energy import cpu_s
from gossamer.peer.node.reports import NodeTime, NodeTraffic
from gossamer.protocol.libp2p.splice import CarriedBytes

WRITTEN = 1_000_000


@dataclass
class Network:
    """This very process as its daemon."""

    carried: CarriedBytes = field(default_factory=CarriedBytes)
    daemon_pid: int = 0


def write(num_bytes: int) -> None:
    with open(os.devnull, "wb", buffering=0) as nowhere:
        nowhere.write(bytes(num_bytes))


@pytest.mark.skipif(not hasattr(psutil.Process, "io_counters"), reason="the system does not count what a process writes")
def test_all_bytes_of_the_daemon_count_but_those_to_this_process() -> None:
    network = Network()
    traffic = NodeTraffic(network)
    traffic.look()
    network.daemon_pid = os.getpid()
    traffic.look()
    assert traffic.sent == 0, "what it did before we looked is its start"
    write(WRITTEN)
    traffic.look()
    assert WRITTEN <= traffic.sent < 1.01 * WRITTEN
    network.carried.received += WRITTEN
    write(WRITTEN)
    traffic.look()
    assert traffic.sent < 1.02 * WRITTEN


def test_a_daemon_that_is_gone_changes_nothing() -> None:
    network = Network()
    traffic = NodeTraffic(network)
    for pid in (os.getpid(), 0, 2**22 + 1):
        network.daemon_pid = pid
        traffic.look()
    assert (traffic.sent, traffic.received) == (0, 0)


def worker() -> subprocess.Popen[bytes]:
    """A process that has used some time of a processor, and waits for its end."""
    busy = subprocess.Popen(
        [sys.executable, "-S", "-c", "sum(range(20_000_000)); print(flush=True); input()"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert busy.stdout is not None and busy.stdout.readline()
    return busy


def test_the_time_of_a_daemon_counts_once_when_another_one_follows_it() -> None:
    network = Network()
    spent = NodeTime(network)
    before_s = spent.used_s()
    for num_lives in (1, 2):
        with worker() as busy:
            network.daemon_pid = busy.pid
            own_s, together_s = cpu_s(busy.pid), spent.used_s()  # in this order: the process may still run
            assert own_s > 0.1 and together_s >= before_s + own_s - 1e-6, "sums of floats are not exact"
            network.daemon_pid = 0
            assert spent.used_s() >= together_s, "while there is none"
            busy.kill()
        assert spent.used_s() == pytest.approx(together_s, abs=own_s / 2), num_lives
        before_s = spent.used_s()
