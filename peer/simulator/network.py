"""A swarm's network without training: how long it takes to exchange the model once, and what part of the time is left to compute."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from optim.codecs import CODECS, codec
from peer.simulator import utilization as use
from peer.simulator.barrier import waiting
from peer.simulator.links import Links, meeting_seconds, ring_seconds, tree_seconds
from peer.simulator.names import known
from protocol.errors import BadSettings
from protocol.run.manifest import Manifest

TRIAL_DRAWS: Final = 1 << 22  # of a tree, over all trials
NUM_ROUNDS: Final = 100  # of the barrier model
MAX_TRIALS: Final = 64
MAX_RING_TRIALS: Final = 4
LARGE: Final = 1 << 20  # values after which a codec's bits per value have settled
HINT: Final = "`peer simulate --help` says what each option takes"
MEGA: Final = 1e6
SMALLEST, GREATEST = 1e-9, 1e18  # of a size: no time that follows from them is infinite
MAX_PEERS: Final = 10_000_000  # 0.6 GB
MAX_INNER_STEPS: Final = 10_000
MAX_LAYERS: Final = 1000
MAX_ROUND: Final = 500_000_000  # inner steps of all peers in one round: half a minute


@dataclass(frozen=True, slots=True)
class Network:
    """What is simulated. Raises BadSettings for values that make no sense, or would take hours or all of the memory."""

    num_peers: int = 8
    codec: str = Manifest().codec.name
    inner_steps: int = 25
    links: Links = Links()
    workload: use.Workload = use.Workload(1.25e8, 12, 1.0)
    seed: int = 0

    def __post_init__(self) -> None:
        known(self.codec, CODECS, "codec")
        _need_count("--peers", self.num_peers, 2, MAX_PEERS)
        _need_count("--inner-steps", self.inner_steps, 1, MAX_INNER_STEPS)
        _need_count("--layers", self.workload.num_layers, 1, MAX_LAYERS)
        if self.num_peers * self.inner_steps > MAX_ROUND:
            raise BadSettings(
                f"{self.num_peers} peers of {self.inner_steps} inner steps each are too many to simulate",
                hint=f"--peers {MAX_ROUND // self.inner_steps} would do, or lower --inner-steps",
            )
        _need_size("--latency", self.links.latency_s)
        _need_size("--bandwidth", self.links.bandwidth / MEGA)
        _need_size("--params", self.workload.num_params)
        _need_size("--step-seconds", self.workload.step_seconds)
        if not 0.0 <= self.links.variation < 100.0:  # NaN too
            raise BadSettings(f"--variation must satisfy 0 <= variation < 100, and is {self.links.variation:g}", hint=HINT)

    @property
    def bits_per_param(self) -> float:
        """Return what the codec sends per value of a large tensor, one way."""
        chosen = codec(self.codec)
        return 8.0 * (chosen.sketch_bytes(LARGE) + chosen.payload_bytes(LARGE)) / LARGE


def _need_count(option: str, count: int, least: int, most: int) -> None:
    if not least <= count <= most:
        hint = f"{'raise' if count < least else 'lower'} {option}"
        raise BadSettings(f"{option} must lie between {least} and {most} with --network, and is {count}", hint=hint)


def _need_size(option: str, size: float) -> None:
    if not SMALLEST <= size <= GREATEST:  # NaN lies nowhere
        raise BadSettings(f"{option} must be a number between {SMALLEST:g} and {GREATEST:g}, and is {size:g}", hint=HINT)


def report(network: Network) -> dict[str, Any]:
    """Simulate the network and return the object that `peer simulate --network --json` prints."""
    waits = waiting(network.num_peers, network.inner_steps, NUM_ROUNDS, np.random.default_rng(network.seed))
    shares = _utilization(network)
    return {
        "peers": network.num_peers,
        "sync_seconds": _sync_seconds(network),
        "compute_utilization": shares["gossip"],
        "compute_utilization_by_method": shares,
        "barrier_slowdown": {"group": waits.group, "pairs": waits.pairs},
        "codec": network.codec,
        "bits_per_param": network.bits_per_param,
        "params": network.workload.num_params,
        "inner_steps": network.inner_steps,
    }


def _sync_seconds(network: Network) -> dict[str, float]:
    """Simulate one exchange of the whole model, in the codec's bits, three ways."""
    links, random = network.links, np.random.default_rng(network.seed)
    num_bytes = network.workload.num_params * network.bits_per_param / 8.0
    trials = min(MAX_TRIALS, max(1, TRIAL_DRAWS // network.num_peers))
    return {
        "gossip": meeting_seconds(links, num_bytes, max(1000, network.num_peers // 2), random),
        "ring": ring_seconds(links, num_bytes, network.num_peers, min(MAX_RING_TRIALS, trials), random),
        "tree": tree_seconds(links, num_bytes, network.num_peers, trials, random),
    }


def _utilization(network: Network) -> dict[str, float]:
    """Return each method's share of time, all in the codec's bits, so that methods are compared and not widths."""
    work, bits, inner_steps = network.workload, network.bits_per_param, network.inner_steps
    bandwidth = np.array([network.links.bandwidth])
    sendings = {
        "ddp": use.data_parallel(work, bits),
        "diloco": use.diloco(work, bits, inner_steps),
        "streaming": use.streaming(work, bits, inner_steps, overlap_steps=1),
    }
    shares = {name: float(use.compute_utilization(work, sending, bandwidth)[0]) for name, sending in sendings.items()}
    return {**shares, "gossip": float(use.gossip_utilization(work, bits, inner_steps, bandwidth)[0])}
