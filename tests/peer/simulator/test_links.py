from __future__ import annotations

import math

import numpy as np
import pytest

from peer.simulator.links import NUM_HANDSHAKES, NUM_SWAPS, Links, meeting_seconds, ring_seconds, swap_seconds, tree_seconds

EVEN = Links(latency_s=1.0, variation=0.0, bandwidth=8.0)


def random() -> np.random.Generator:
    return np.random.default_rng(1)


def test_latencies_have_the_mean_and_spread_that_were_asked_for() -> None:
    times = Links(0.2, 0.5).draw(random(), (400_000,))
    assert times.mean() == pytest.approx(0.2, rel=0.01)
    assert times.std() / times.mean() == pytest.approx(0.5, rel=0.02)


def test_bytes_take_their_time() -> None:
    assert EVEN.draw(random(), (3,), num_bytes=5.0) == pytest.approx([6.0, 6.0, 6.0])


def test_a_swap_is_the_longer_of_two_sends() -> None:
    """Of log-normal times with log-variance s^2: (1 + erf(s / 2)) means (NoLoCo, section 5.3)."""
    sigma = math.sqrt(math.log1p(1.0))
    assert swap_seconds(Links(1.0, 1.0), 0.0, 400_000, random()) == pytest.approx(1 + math.erf(sigma / 2), rel=0.01)


def test_a_meeting_is_a_handshake_and_some_swaps() -> None:
    assert meeting_seconds(EVEN, 3.0, 10, random()) == pytest.approx(NUM_HANDSHAKES + NUM_SWAPS + 3.0)


@pytest.mark.parametrize("num_peers", [4, 16, 64, 1024])
def test_on_even_links_a_tree_takes_two_sends_per_level(num_peers: int) -> None:
    assert tree_seconds(EVEN, 0.0, num_peers, 2, random()) == pytest.approx(2 * math.log2(num_peers))


@pytest.mark.parametrize(("num_peers", "variation", "ratio"), [(4, 0.5, 2.1), (16, 1.0, 5.2), (64, 1.5, 10.4), (256, 0.5, 9.7)])
def test_a_tree_over_a_local_pair_is_as_in_the_paper(num_peers: int, variation: float, ratio: float) -> None:
    links = Links(1.0, variation)
    pair = 2 * swap_seconds(links, 0.0, 200_000, random())  # to the root and back
    assert tree_seconds(links, 0.0, num_peers, 200_000 // num_peers, random()) / pair == pytest.approx(ratio, rel=0.03)


def test_a_ring_takes_two_rounds_of_pieces() -> None:
    assert ring_seconds(EVEN, 8.0, 8, 1, random()) == pytest.approx(14 * (1.0 + 1.0))
    assert ring_seconds(EVEN, 8.0, 1, 1, random()) == 0.0


def test_a_large_ring_goes_on_at_its_pace() -> None:
    links = Links(1.0, 0.5)
    small, large = ring_seconds(links, 0.0, 1024, 1, random()), ring_seconds(links, 0.0, 1_000_000, 1, random())
    assert large / small == pytest.approx(1_000_000 / 1024, rel=0.01)


def test_a_million_peers_meet() -> None:
    few, many = (meeting_seconds(Links(0.05, 0.5), 1e6, num_pairs, random()) for num_pairs in (10_000, 500_000))
    assert many == pytest.approx(few, rel=0.02)  # flat in the swarm's size
