"""A swarm's network without training: how long an exchange takes, how long peers wait for each other, what is left to compute.

Three models in virtual time. Links: a message takes a log-normal latency, drawn anew each time (NoLoCo, arXiv
2506.10911, section 5.3), plus its bytes over the bandwidth. Waiting: inner steps take log-normal times and communication is free (its
Figure 5B, which comes out with log-variance 0.5). Utilization: the simulator of Streaming DiLoCo (arXiv 2501.18512, section 3.1), as far
as its text and Table 4 describe.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from gossamer.optim.codecs import codec
from gossamer.optim.fragments import MEETING_INTERVAL
from gossamer.protocol.errors import BadSettings
from gossamer.protocol.run.manifest import Manifest

Floats = npt.NDArray[np.float64]
CHUNK_DRAWS: Final = 1 << 22  # 32 MiB at a time
EXACT_RING_PEERS: Final = 1024  # beyond, the time per hop is taken from a ring of this size: it is constant by then
NUM_HANDSHAKES: Final = 4  # sends one after the other in a meeting: both Hellos, Commit, Committed
NUM_SWAPS: Final = 4  # sends both ways at once: sketch, commitment, payload, verdict

STEP_LOG_VARIANCE: Final = 0.5
TOTAL_DRAWS: Final = 1 << 25  # of a round's slowest peer: a million peers take seconds
MAX_PAIR_PEERS: Final = 4096  # how pairs wait hardly depends on how many there are
MIN_PAIR_PEERS: Final = 64

NUM_PERIODS: Final = 6
LAYERS_PER_FRAGMENT: Final = 3  # of Streaming DiLoCo
WARM_PERIODS: Final = 2  # left out of the measurement

TRIAL_DRAWS: Final = 1 << 22  # of a tree, over all trials
NUM_ROUNDS: Final = 100  # of waiting
MAX_TRIALS: Final = 64
MAX_RING_TRIALS: Final = 4
LARGE: Final = 1 << 20  # values after which a codec's bits per value are constant
HINT: Final = "`peer simulate --help` says what each option takes"
MEGA: Final = 1e6
SMALLEST, GREATEST = 1e-9, 1e18  # of a size: no time that follows from them is infinite
MAX_PEERS: Final = 10_000_000  # 0.6 GB
MAX_INNER_STEPS: Final = 10_000
MAX_LAYERS: Final = 1000
MAX_ROUND: Final = 500_000_000  # inner steps of all peers in one round: half a minute


@dataclass(frozen=True, slots=True)
class Links:
    """Links between any two peers: one-way latency with its mean and relative spread, and bandwidth in bits per second."""

    latency_s: float = 0.05
    variation: float = 0.5  # standard deviation of the latency over its mean
    bandwidth: float = 1e8

    def draw(self, random: np.random.Generator, shape: tuple[int, ...], num_bytes: float = 0.0) -> Floats:
        """Draw the time that messages of this size take."""
        sigma_squared = math.log1p(self.variation**2)
        times: Floats = random.normal(-sigma_squared / 2, math.sqrt(sigma_squared), shape)
        np.exp(times, out=times)
        times *= self.latency_s
        times += 8.0 * num_bytes / self.bandwidth
        return times


def meeting_seconds(links: Links, num_bytes: float, num_pairs: int, random: np.random.Generator) -> float:
    """Return the mean time of a whole meeting, handshake and verdicts included; `num_bytes` is the payload of each side."""

    def meetings(count: int) -> Floats:
        handshakes: Floats = links.draw(random, (count, NUM_HANDSHAKES)).sum(1)
        swaps: Floats = links.draw(random, (count, NUM_SWAPS, 2)).max(2).sum(1)
        return handshakes + swaps + 8.0 * num_bytes / links.bandwidth

    return _mean(meetings(count) for count in _chunks(num_pairs, NUM_HANDSHAKES + 2 * NUM_SWAPS))


def tree_seconds(links: Links, num_bytes: float, num_peers: int, num_trials: int, random: np.random.Generator) -> float:
    """Return the mean time of a binary tree all-reduce: up, each parent waiting for both children, and down to the last leaf."""
    return _mean(_tree(links, num_bytes, num_peers, count, random) for count in _chunks(num_trials, 2 * num_peers))


def _tree(links: Links, num_bytes: float, num_peers: int, num_trials: int, random: np.random.Generator) -> Floats:
    depth = math.ceil(math.log2(num_peers))
    ready = np.zeros((num_trials, 2**depth))
    for _ in range(depth):
        ready = (ready + links.draw(random, ready.shape, num_bytes)).reshape(num_trials, -1, 2).max(2)
    for _ in range(depth):
        ready = np.repeat(ready, 2, axis=1)
        ready += links.draw(random, ready.shape, num_bytes)
    last: Floats = ready.max(1)
    return last


def ring_seconds(links: Links, num_bytes: float, num_peers: int, num_trials: int, random: np.random.Generator) -> float:
    """Return the mean time of a ring all-reduce: 2(N - 1) hops, each peer passing on 1/N of the message when it has it."""
    if num_peers < 2:
        return 0.0
    simulated = min(num_peers, EXACT_RING_PEERS)
    hops, piece = 2 * (num_peers - 1), num_bytes / num_peers
    times = []
    for _ in range(num_trials):
        ready = np.zeros(simulated)
        for _ in range(2 * (simulated - 1)):
            # A peer sends its next piece once it has received the one before; the send begins when both ends are there.
            ready = np.maximum(np.roll(ready, 1) + links.draw(random, ready.shape, piece), ready)
        times.append(ready.max())
    return float(np.mean(times)) * hops / (2 * (simulated - 1))


def _chunks(total: int, draws_each: int) -> Iterator[int]:
    most = max(1, CHUNK_DRAWS // draws_each)
    for start in range(0, total, most):
        yield min(most, total - start)


def _mean(parts: Iterator[Floats]) -> float:
    total, count = 0.0, 0
    for part in parts:
        total, count = total + float(part.sum()), count + len(part)
    return total / count


def waiting(num_peers: int, inner_steps: int, num_rounds: int, random: np.random.Generator) -> dict[str, float]:
    """Return the time of a run over that of its inner steps, for a `group` that waits for its slowest and for `pairs`.

    Simulates `num_rounds` outer steps, or as many as there are draws for. Rounds of a group do not depend on each other, so a large group
    takes fewer. Delays of pairs spread from round to round, so pairs are left out first, and rounds only where that is not enough.
    """
    most = min(num_peers, MAX_PAIR_PEERS)
    num_paired = min(most, max(MIN_PAIR_PEERS, TOTAL_DRAWS // (inner_steps * num_rounds)))
    return {
        "group": group_slowdown(num_peers, inner_steps, _affordable_rounds(num_peers, inner_steps, num_rounds), random),
        "pairs": pair_slowdown(num_paired, inner_steps, _affordable_rounds(num_paired, inner_steps, num_rounds), random),
    }


def _affordable_rounds(num_peers: int, inner_steps: int, num_rounds: int) -> int:
    return max(2, min(num_rounds, TOTAL_DRAWS // (num_peers * inner_steps)))


def group_slowdown(num_peers: int, inner_steps: int, num_rounds: int, random: np.random.Generator) -> float:
    """Return how much longer a run takes when all wait for the slowest at each outer step."""
    slowest = worked = 0.0
    for _ in range(num_rounds):
        times = _round(num_peers, inner_steps, random)
        slowest, worked = slowest + float(times.max()), worked + float(times.mean())
    return slowest / worked


def pair_slowdown(num_peers: int, inner_steps: int, num_rounds: int, random: np.random.Generator) -> float:
    """Return how much longer a run takes when random pairs go on together; with an odd number one peer sits out each time."""
    clocks, worked = np.zeros(num_peers), 0.0
    for _ in range(num_rounds):
        times = _round(num_peers, inner_steps, random)
        clocks, worked = clocks + times, worked + float(times.mean())
        order, half = random.permutation(num_peers), num_peers // 2
        one, two = order[:half], order[half : 2 * half]
        clocks[one] = clocks[two] = np.maximum(clocks[one], clocks[two])
    return float(clocks.mean()) / worked


def _round(num_peers: int, inner_steps: int, random: np.random.Generator) -> Floats:
    total, sigma = np.zeros(num_peers), math.sqrt(STEP_LOG_VARIANCE)
    most = max(1, CHUNK_DRAWS // num_peers)
    for start in range(0, inner_steps, most):
        times = random.normal(0.0, sigma, (min(most, inner_steps - start), num_peers))
        total += np.exp(times, out=times).sum(0)
    return total


@dataclass(frozen=True, slots=True)
class Workload:
    """What is trained: a model of so many layers, all alike, and how long an inner step computes."""

    num_params: float
    num_layers: int
    step_seconds: float


@dataclass(frozen=True, slots=True)
class Sending:
    """What crosses the link, and when: one of `num_fragments` strided fragments in turn, each time after `interval` inner steps."""

    num_fragments: int
    interval: int
    bits_per_param: float
    overlap_steps: int = 0  # how many steps later than the next one it may arrive

    @property
    def period_steps(self) -> int:
        """Return the inner steps after which everything repeats."""
        return self.interval * self.num_fragments

    def layers_at(self, step: int, num_layers: int) -> range:
        """Return the layers (from 0) that are sent in the backward pass of a step."""
        if step % self.interval:
            return range(0)
        return range(step // self.interval % self.num_fragments, num_layers, self.num_fragments)


def streaming(workload: Workload, bits_per_param: float, inner_steps: int = 100, overlap_steps: int = 0) -> Sending:
    """Send one strided fragment at a time, each every `inner_steps` or so."""
    num_fragments = max(1, round(workload.num_layers / LAYERS_PER_FRAGMENT))
    return Sending(num_fragments, max(1, round(inner_steps / num_fragments)), bits_per_param, overlap_steps)


def gossip_utilization(workload: Workload, bits_per_param: float, inner_steps: int, bandwidths: Floats) -> Floats:
    """Return the share of time spent computing if every meeting had to end before its fragment meets again.

    Meetings on demand, in the background: the whole model every MEETING_INTERVAL * `inner_steps`. Only a link that cannot carry them at
    all costs time. (A real peer does not wait even then: it meets less often.)
    """
    interval_seconds = MEETING_INTERVAL * inner_steps * workload.step_seconds
    return np.minimum(1.0, interval_seconds * bandwidths / (workload.num_params * bits_per_param))


def compute_utilization(workload: Workload, sending: Sending, bandwidths: Floats) -> Floats:
    """Return the share of time spent computing at each bandwidth (bits per second)."""
    num_layers, step_s = workload.num_layers, workload.step_seconds
    forward_s, backward_s = step_s / (3 * num_layers), 2 * step_s / 3 / (2 * num_layers - 1)
    layer_s = sending.bits_per_param * workload.num_params / num_layers / np.asarray(bandwidths, dtype=np.float64)
    now, link_free_at, started = np.zeros_like(layer_s), np.zeros_like(layer_s), np.zeros_like(layer_s)
    coming: list[list[tuple[int, Floats]]] = [[] for _ in range(num_layers)]  # per layer: needed at step, arrives at
    period = max(sending.period_steps, 8)
    warm, total = WARM_PERIODS * period, NUM_PERIODS * period
    for step in range(total):
        if step == warm:
            started = now
        sent = sending.layers_at(step, num_layers)
        if not sent and not any(needed <= step for layer in coming for needed, _ in layer):
            now = now + step_s
            continue
        for layer in coming:
            while layer and layer[0][0] <= step:
                now = np.maximum(now, layer.pop(0)[1])
            now = now + forward_s
        for number in reversed(range(num_layers)):
            now = now + backward_s * (2 if number else 1)
            if number in sent:
                link_free_at = np.maximum(link_free_at, now) + layer_s
                coming[number].append((step + 1 + sending.overlap_steps, link_free_at))
    return (total - warm) * step_s / (now - started)


@dataclass(frozen=True, slots=True)
class Network:
    """What is simulated. Raises BadSettings for values that make no sense, or would take hours or all of the memory."""

    num_peers: int = 8
    codec: str = Manifest().codec.name
    inner_steps: int = 25
    links: Links = Links()
    workload: Workload = Workload(1.25e8, 12, 1.0)
    seed: int = 0

    def __post_init__(self) -> None:
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
    def round_bytes(self) -> int:
        """Return what is sent one way when everything meets once."""
        return int(self.bits_per_param * self.workload.num_params / 8)

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
    shares = _utilization(network)
    return {
        "peers": network.num_peers,
        "sync_seconds": _sync_seconds(network),
        "compute_utilization": shares["gossip"],
        "compute_utilization_by_method": shares,
        "barrier_slowdown": waiting(network.num_peers, network.inner_steps, NUM_ROUNDS, np.random.default_rng(network.seed)),
        "codec": network.codec,
        "bits_per_param": network.bits_per_param,
        "params": network.workload.num_params,
        "inner_steps": network.inner_steps,
    }


def _sync_seconds(network: Network) -> dict[str, float]:
    """Simulate one exchange of the whole model, in the codec's bits, three ways."""
    links, random = network.links, np.random.default_rng(network.seed)
    num_bytes = network.round_bytes
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
        "ddp": Sending(1, 1, bits),
        "diloco": Sending(1, inner_steps, bits),
        "streaming": streaming(work, bits, inner_steps, overlap_steps=1),
    }
    shares = {name: float(compute_utilization(work, sending, bandwidth)[0]) for name, sending in sendings.items()}
    return {**shares, "gossip": float(gossip_utilization(work, bits, inner_steps, bandwidth)[0])}
