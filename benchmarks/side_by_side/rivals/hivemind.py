"""hivemind: its DecentralizedAverager every n steps, and its Optimizer with local updates, which averages in the background.

Both in fp16. Without a target of as many peers as there are, and a short time for matchmaking, each round lasts the whole of that time.
"""

from __future__ import annotations

import time
from pathlib import Path

import hivemind
from hivemind.compression import Float16Compression

from benchmarks.side_by_side.job import Seat
from benchmarks.side_by_side.rivals.periodic import PeriodicAveraging
from benchmarks.side_by_side.training import Training

PORT = 7_000
AVERAGER_MATCHMAKING_S = 5.0
OPTIMIZER_MATCHMAKING_S, REQUEST_S = 2.0, 1.0  # a request must take less than the matchmaking
ROUND_S = 60.0
MEET_S = 120.0


def join_dht(seat: Seat) -> hivemind.DHT:
    """Start a DHT node that joins at peer 1; returns when all peers have joined."""
    address_file = seat.meeting_place / "address"
    initial = None if seat.number == 1 else wait_for(address_file).split()
    dht = hivemind.DHT(initial_peers=initial, host_maddrs=[f"/ip4/{seat.address}/tcp/{PORT}"], start=True)
    if seat.number == 1:
        publish(address_file, " ".join(map(str, dht.get_visible_maddrs())))
    publish(seat.meeting_place / f"in-{seat.number}", "in")
    for number in range(1, seat.job.num_peers + 1):
        wait_for(seat.meeting_place / f"in-{number}")
    return dht


def publish(file: Path, text: str) -> None:
    """Write a file for other peers atomically."""
    beside = file.with_suffix(".new")
    beside.write_text(text)
    beside.rename(file)


def wait_for(file: Path) -> str:
    """Wait for a file and read it."""
    until_s = time.monotonic() + MEET_S
    while not file.exists():
        if time.monotonic() > until_s:
            raise TimeoutError(f"no {file.name} in {MEET_S:.0f} s")
        time.sleep(0.1)
    return file.read_text()


class Averager(PeriodicAveraging):
    """All-reduce of the weights every `every_steps`, in a group formed through the DHT."""

    def __init__(self, training: Training) -> None:
        super().__init__(training)
        self._dht = join_dht(training.seat)
        self._averager = hivemind.DecentralizedAverager(
            [parameter.clone() for parameter in self.parameters],
            self._dht,
            start=True,
            prefix="side-by-side",
            target_group_size=training.seat.job.num_peers,
            min_matchmaking_time=AVERAGER_MATCHMAKING_S,
            compression=Float16Compression(),
        )

    def average(self) -> None:
        """Take part in a round."""
        with self._averager.get_tensors() as averaged:
            for tensor, parameter in zip(averaged, self.parameters, strict=True):
                tensor.copy_(parameter)
        self._averager.step(timeout=ROUND_S)
        with self._averager.get_tensors() as averaged:
            for tensor, parameter in zip(averaged, self.parameters, strict=True):
                parameter.copy_(tensor)

    def close(self) -> None:
        """Stop averager and DHT."""
        self._averager.shutdown()
        self._dht.shutdown()


class LocalUpdates:
    """hivemind.Optimizer around the inner one: an epoch ends after `every_steps` batches per peer, over all peers."""

    def __init__(self, training: Training) -> None:
        job, batch_size = training.seat.job, training.manifest.inner.batch_size
        self._dht = join_dht(training.seat)
        self._optimizer = training.optimizer = hivemind.Optimizer(
            dht=self._dht,
            run_id="side-by-side",
            optimizer=training.inner,
            use_local_updates=True,
            target_batch_size=job.num_peers * job.every_steps * batch_size,
            batch_size_per_step=batch_size,
            matchmaking_time=OPTIMIZER_MATCHMAKING_S,
            averaging_timeout=ROUND_S,
            state_averaging_compression=Float16Compression(),
            averager_opts={"target_group_size": job.num_peers, "request_timeout": REQUEST_S, "initialize_optimizer": False},
        )

    def after_step(self, own_steps: int) -> None:
        """Do nothing: the optimizer's step averages."""

    def finish(self) -> None:
        """Do nothing: it has no last round."""

    def close(self) -> None:
        """Stop optimizer and DHT."""
        self._optimizer.shutdown()
        self._dht.shutdown()
