from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import torch

from benchmarks.side_by_side.job import Job, Seat
from benchmarks.side_by_side.rivals.alone import Alone
from benchmarks.side_by_side.training import Training
from gossamer.peer.machine.home import Home
from gossamer.peer.model.weights import fast_weights, load_trained

JOB = Job(total_steps=3)
PEER = 2


def test_a_rival_trains_as_gossamer_does(tmp_path: Path) -> None:
    """The same weights, but for the rounding of Gossamer's last outer step: so the same model, batches, optimizer, rate and clipping."""
    own, rivals = Home(tmp_path / "gossamer"), Home(tmp_path / "rival")
    for home in (own, rivals):
        JOB.furnish(home, PEER)
    manifest = tmp_path / "manifest.toml"
    manifest.write_text(JOB.manifest().manifest().to_toml())
    words = ["host", str(manifest), "--alone", "--home", str(own.path), "--threads", "1", "--devices", "cpu"]
    subprocess.run([sys.executable, "-m", "gossamer.cli.main", *words], check=True, capture_output=True, timeout=50)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        training = Training(Seat("floor", PEER, rivals.path, tmp_path, ("127.0.0.1",) * JOB.num_peers, JOB))
        training.run(Alone(training))
    finally:
        torch.set_num_threads(threads)
    expected, got = (fast_weights(load_trained(home).checkpoint) for home in (own, rivals))
    assert expected.keys() == got.keys()
    for name in expected:
        torch.testing.assert_close(got[name], expected[name], rtol=1e-5, atol=1e-7)


def test_peers_read_different_batches(tmp_path: Path) -> None:
    first, second = (JOB.corpus(number, tmp_path) for number in (1, 2))
    assert not torch.equal(first.batch(0), second.batch(0))
    assert torch.equal(first.batch(1), JOB.corpus(1, tmp_path).batch(1))


def test_a_seat_survives_the_command_line(tmp_path: Path) -> None:
    seat = Seat("ddp", 3, tmp_path / "home", tmp_path, ("10.0.0.1", "10.0.0.2", "10.0.0.3"), Job(num_peers=3, gossamer_every="auto"))
    assert Seat.from_text(seat.to_text()) == seat
    assert seat.address == "10.0.0.3"


def test_gossamer_may_be_given_its_interval() -> None:
    assert Job(gossamer_every="5").manifest(Job(gossamer_every="5").gossamer_outer()).manifest().outer.inner_steps == 5
    assert Job().gossamer_outer() == {}
