"""One run: a network, the peers of a system on it, a fault half-way, and the counts from readiness to the end.

The fault hits the last peer: `kill` ends all its processes, `cut` cuts its line, both in the middle of its schedule; `slow` limits it to an
eighth of a processor from the start. The run does not wait for a peer that was killed or cut off.
"""

from __future__ import annotations

import datetime
import os
import subprocess
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path

import torch

from benchmarks.side_by_side.job import Job
from benchmarks.side_by_side.network import network
from benchmarks.side_by_side.peers import RunningPeer, running
from benchmarks.side_by_side.results import Point, Run, Setting
from benchmarks.side_by_side.systems import ROOT, SYSTEMS
from gossamer.peer.machine.home import Home
from gossamer.peer.model.evaluation import held_out_loss, measured_size, open_corpus
from gossamer.peer.model.model import build_model
from gossamer.peer.model.weights import fast_weights, load_trained, mean_weights, set_weights
from gossamer.protocol.errors import BadSettings
from gossamer.protocol.run.manifest import need_text

LOOK_S = 0.1
CURVE_S, CURVE_GROWTH = 2.0, 1.04  # a point of the curve is so much later than the one before: both are drawn on logarithmic axes
HANG_S = 180.0  # without a step of anybody: nothing will come any more; torchft gives up an exchange after 120
SLOW_SHARE = 0.125  # of one processor


def perform(setting: Setting, folder: Path, limit_s: float, data: Path | None = None) -> Run:
    """Run once in an empty folder, for at most `limit_s`, on a text for tasks without one.

    Raises BadSettings for a system that cannot be started.
    """
    text = str(data) if data else ""
    job = Job(setting.num_peers, setting.total_steps, setting.seed, setting.every_steps, setting.gossamer_every, setting.task, text)
    started = time.time()
    with (
        network(setting.num_peers, setting.mbit_per_s) as lines,
        running(SYSTEMS[setting.system], job, lines, folder) as peers,
    ):
        watch = Watch(setting, peers, time.time() - started)
        for peer in peers:
            peer.send(b"go\n")
        run = watch.until_over(limit_s)
    if run.outcome == "stopped":
        return run  # in the middle of its schedule: no loss to be compared
    healthy = [peer.home for peer in peers if peer not in watch.lost]
    torch.set_num_threads(1)  # several small models at a time are measured faster than each of them on all processors
    average = held_out(healthy, data)  # first, alone: several threads must not import transformers at the same time
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        losses = list(pool.map(partial(held_out, data=data), [[peer.home] for peer in peers]))
    return replace(run, losses=losses, loss_average=average)


@dataclass(frozen=True, slots=True)
class Counted:
    """The counters of one peer's line and processes."""

    sent_bytes: int
    cpu_s: float


class Watch:
    """Follows the peers of one run from readiness on, and injects the fault."""

    def __init__(self, setting: Setting, peers: Sequence[RunningPeer], ready_s: float) -> None:
        self.lost: list[RunningPeer] = []  # not waited for
        self._setting = setting
        self._peers = peers
        self._ready_s = ready_s
        self._before = self._count()
        self._began = min((peer.follower.began for peer in peers if peer.follower.began), default=time.time())
        self._faulted = 0.0
        self._curve: list[Point] = []
        self._drawn = [0] * len(peers)  # reports that are in the curve
        if setting.fault == "slow":
            peers[-1].group.limit(SLOW_SHARE)

    def until_over(self, limit_s: float) -> Run:
        """Wait until all peers have ended that should, or until the limit; return the run without losses."""
        while self._waited_for():
            if (silent_s := time.time() - self._last_step()) > HANG_S:
                return self._run(f"hangs: no step for {silent_s:.0f} s", time.time())
            if time.time() - self._began > limit_s:
                return self._run("stopped", time.time())
            time.sleep(LOOK_S)
            for peer in self._peers:
                peer.refresh()
            self._do_fault()
            if time.time() - self._began > self._next_point_s():
                self._draw()
        self._draw()
        failed = next((peer for peer in self._peers if peer.follower.state != "done" and peer not in self.lost), None)
        outcome = f"failed: {failed.follower.reason}" if failed else "finished"
        return self._run(outcome, max(peer.follower.over for peer in self._peers if peer not in self.lost))

    def _waited_for(self) -> list[RunningPeer]:
        return [peer for peer in self._peers if not peer.follower.is_over and peer not in self.lost]

    def _next_point_s(self) -> float:
        return (self._curve[-1].wall_s if self._curve else 0.0) * CURVE_GROWTH + CURVE_S

    def _last_step(self) -> float:
        return max((peer.follower.reports[-1].ts for peer in self._waited_for() if peer.follower.reports), default=self._began)

    def _do_fault(self) -> None:
        victim = self._peers[-1]
        if self._faulted or self._setting.fault not in ("kill", "cut") or victim.follower.global_step < self._setting.total_steps / 2:
            return
        self._faulted = time.time()
        self.lost.append(victim)
        if self._setting.fault == "kill":
            victim.group.kill()
        else:
            victim.line.cut()

    def _count(self) -> list[Counted]:
        return [Counted(peer.line.sent_bytes(), peer.group.cpu_s()) for peer in self._peers]

    def _draw(self) -> None:
        """Add a point to the curve."""
        new = [peer.follower.reports[drawn:] for peer, drawn in zip(self._peers, self._drawn, strict=True)]
        losses = [sum(report.loss for report in reports) / len(reports) for reports in new if reports]
        if not losses:
            return
        self._drawn = [len(peer.follower.reports) for peer in self._peers]
        num_peers = len(self._peers)
        own_steps = sum(peer.follower.own_steps for peer in self._peers) / num_peers
        sent = sum(now.sent_bytes - before.sent_bytes for now, before in zip(self._count(), self._before, strict=True))
        self._curve.append(Point(time.time() - self._began, own_steps, sum(losses) / len(losses), sent / num_peers / 1e6))

    def _run(self, outcome: str, ended: float) -> Run:
        follower = [peer.follower for peer in self._peers]
        counted = list(zip(self._count(), self._before, strict=True))
        last = [one.reports[-1] if one.reports else None for one in follower]
        return Run(
            setting=self._setting,
            outcome=outcome,
            commit=commit(),
            date=datetime.date.today().isoformat(),
            ready_s=self._ready_s,
            wall_s=ended - self._began,
            all_training_s=max((one.began - self._began for one in follower), default=0.0),
            own_steps=[one.own_steps for one in follower],
            trained_s=[report.ts - self._began if report else 0.0 for report in last],
            done_s=[one.over - self._began if one.over else 0.0 for one in follower],
            train_s=[report.train_s if report else 0.0 for report in last],
            blocked_s=[report.blocked_s if report else 0.0 for report in last],
            sent_mb=[(now.sent_bytes - before.sent_bytes) / 1e6 for now, before in counted],
            cpu_s=[now.cpu_s - before.cpu_s for now, before in counted],
            pause_s=self._pauses(),
            losses=[None] * len(follower),
            loss_average=None,
            meetings=dict(sum((one.meetings for one in follower), Counter())),
            reasons=dict(sum((one.reasons for one in follower), Counter())),
            transfers=sum(one.transfers for one in follower),
            curve=self._curve,
        )

    def _pauses(self) -> tuple[float, float]:
        """Return the longest time between two reports of the peers without a fault, before and after it."""
        healthy = [peer.follower.reports for peer in self._peers if peer not in self.lost]
        until = self._faulted or float("inf")
        gaps = [(later.ts, later.ts - earlier.ts) for reports in healthy for earlier, later in pairwise(reports)]
        return max((gap for at, gap in gaps if at <= until), default=0.0), max((gap for at, gap in gaps if at > until), default=0.0)


def held_out(homes: Sequence[Home], data: Path | None) -> float | None:
    """Return the held-out loss of the mean of these peers' weights, as `peer eval` measures it; None where one has saved nothing."""
    try:
        trained = [load_trained(home) for home in homes]
    except BadSettings:
        return None
    manifest = need_text(trained[0].manifest)
    model = build_model(manifest.model, manifest.run.seed)
    set_weights(model, mean_weights([fast_weights(one.checkpoint) for one in trained]))
    corpus = open_corpus(manifest, homes[0], data)
    return held_out_loss(model, corpus, measured_size(manifest, corpus).num_batches)


def commit() -> str:
    """Return the commit of the measured tree."""
    try:
        follower = subprocess.run(["git", "describe", "--always", "--dirty=+"], cwd=ROOT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return ""
    return follower.stdout.strip()
