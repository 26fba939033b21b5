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
from protocol.manifest import Manifest

BF16_BITS: Final = 16.0  # what data-parallel training and DiLoCo send per value, for comparison
E3M0_BITS: Final = 4.0
TRIAL_DRAWS: Final = 1 << 22  # of a tree, over all trials
NUM_ROUNDS: Final = 100  # of the barrier model
MAX_TRIALS: Final = 64
MAX_RING_TRIALS: Final = 4
LARGE: Final = 1 << 20  # values after which a codec's bits per value have settled


@dataclass(frozen=True, slots=True)
class Network:
    """What is simulated. Raises BadSettings for values that make no sense."""

    num_peers: int = 8
    codec: str = Manifest().codec.name
    inner_steps: int = 25
    links: Links = Links()
    workload: use.Workload = use.Workload(1.25e8, 12, 1.0)
    seed: int = 0

    def __post_init__(self) -> None:
        known(self.codec, CODECS, "codec")
        if self.num_peers < 2:
            raise BadSettings("a network needs at least 2 peers", hint="raise --peers")
        sizes = (self.links.latency_s, self.links.bandwidth, self.workload.num_params, self.workload.step_seconds)
        if not (min(sizes) > 0 and max(sizes) < float("inf") and 0 <= self.links.variation < 100):
            raise BadSettings("latency, bandwidth, parameters and step time must be above 0", hint="see `peer simulate --help`")

    @property
    def bits_per_param(self) -> float:
        """Return what the codec sends per value of a large tensor, one way."""
        chosen = codec(self.codec)
        return 8.0 * (chosen.sketch_bytes(LARGE) + chosen.payload_bytes(LARGE)) / LARGE


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
    work, bits, inner_steps = network.workload, network.bits_per_param, network.inner_steps
    bandwidth = np.array([network.links.bandwidth])
    sendings = {
        "ddp": use.data_parallel(work, BF16_BITS),
        "diloco": use.diloco(work, BF16_BITS, inner_steps),
        "streaming": use.streaming(work, E3M0_BITS, inner_steps, overlap_steps=1),
    }
    shares = {name: float(use.compute_utilization(work, sending, bandwidth)[0]) for name, sending in sendings.items()}
    return {**shares, "gossip": float(use.gossip_utilization(work, bits, inner_steps, bandwidth)[0])}
