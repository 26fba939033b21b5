"""A day of a peer in virtual time, and what its operator reads: every sentence holds at that moment, and says since when.

`python -m pytest -s tests/swarm/test_day.py` prints all of them.
"""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import psutil
import pytest

from gossamer.cli.peers import described, with_records
from gossamer.cli.status import description
from gossamer.peer.machine import events
from gossamer.peer.machine.log_lines import Log
from gossamer.peer.machine.run_view import RunView
from gossamer.peer.machine.schedule import Schedule
from gossamer.peer.machine.status import Status, apply
from gossamer.peer.swarm.member_report import MemberReporter
from gossamer.peer.swarm.partner_records import PartnerRecords
from gossamer.protocol.memory.conversation import Link as Wire
from tests.swarm.supervised import SwarmSupervisor, WallClock, prepare
from tests.swarm.tiny import tiny_manifest
from tests.swarm.world import Peer, Swarm, play

STEP_S = 12.0
MANIFEST = tiny_manifest(
    run={"total_steps": 900, "name": "a day"}, outer={"inner_steps": 20, "deadline_s": 120.0, "max_clock_gap_steps": 120}
)
EIGHT_O_CLOCK = "DAY-9:46:40"  # the time zone in which virtual time begins then
NEVER = (" 0 s left", "0.0 MB", " 1 peers", "nan", "None", "True", "-0.", " : ")  # in no sentence
ENDED = ("left", "done", "failed")


class Machine:
    """The battery and the sensor of the machine."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_plugged, self.degrees = True, 50.0
        monkeypatch.setattr(psutil, "sensors_battery", lambda: SimpleNamespace(power_plugged=self.is_plugged))
        monkeypatch.setattr(psutil, "sensors_temperatures", lambda: {"coretemp": [SimpleNamespace(current=self.degrees)]})


class Day:
    """The peer, its supervisor, and what its operator reads."""

    def __init__(self, peer: Peer, clock: WallClock) -> None:
        self.peer, self.clock = peer, clock
        self.supervisor = SwarmSupervisor(peer, self.check)
        self._log = Log(peer.home)
        self._state, self._began_s = "", 0.0

    @property
    def state(self) -> str:
        return self.supervisor.status.state

    def set(self, key: str, value: str) -> None:
        self.supervisor.ask(verb="set", key=key, value=value)

    def check(self, status: Status) -> None:
        """See that nothing in a status contradicts the rest of it."""
        if status.state != self._state:
            self._state, self._began_s = status.state, self.clock.loop_s()
        assert not any(words in f"{status.reason}; {status.way_out};" for words in NEVER), status.reason
        if status.state != "training":
            shown = status.to_json()
            assert (status.tokens_per_second, shown["ends"], shown["loss_trend"]) == (0.0, None, None)
        assert status.progress is None or status.state in ("starting", "joining")
        assert status.reason != "no other peer in sight" or not status.peers_seen
        assert status.reason != "meeting others" or status.peers_seen

    def read(self, title: str) -> str:
        """Read, print and return all that there is to read."""
        now_s, held_s = self.clock.now_s(), self.clock.loop_s() - self._began_s
        status: Any = self.supervisor.ask(verb="status")
        peers: Any = self.supervisor.ask(verb="peers")
        history: Any = self.supervisor.ask(verb="history")
        records = PartnerRecords()
        if self.peer.home.partners.exists():
            records.load(self.peer.home.partners.read_bytes())
        whole = description(status, now_s) + "\n\n" + described(with_records(peers["peers"], records, now_s), now_s)
        news = [str(line) for line in self._log.lines() if line.level != "debug"]
        page = f"\n===== {title}, {time.strftime('%H:%M:%S', time.localtime(now_s))}\n{whole}\n\n" + "\n".join(news)
        sys.stdout.write(page + "\n")
        assert not any(words in whole for words in NEVER), whole
        assert abs(now_s - status["since"] - held_s) < 0.1, "since when is not when the state began"
        assert all(row["seen"] <= now_s for row in peers["peers"])
        times = history["points"]["ts"]
        assert times == sorted(times) and all(ts <= now_s for ts in times)
        assert status["peers_seen"] or "% of what the peers in sight report" not in whole
        return whole


@pytest.mark.timeout(300)
def test_every_sentence_of_a_day_holds_when_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = WallClock()

    async def story(swarm: Swarm) -> None:
        clock.loop_s = asyncio.get_running_loop().time
        swarm.kills_nodes_only = True
        first, second = swarm.start(2, step_s=STEP_S)
        await asyncio.sleep(600.0)
        day = Day(newcomer(swarm, first, clock), clock)
        work = asyncio.create_task(day.supervisor.run(tmp_path))
        await joins_and_trains(swarm, day)
        await pauses(swarm, day, machine)
        await is_alone(swarm, day, [first, second])
        await has_its_clock_set(day, clock)
        await loses_its_node(day)
        await reaches_a_limit(day)
        await follows_a_schedule(swarm, day)
        await swarm.until(lambda: day.state in ("finishing", "done"), 10_000.0)
        assert day.read("the last averaging").startswith("finishing for 0 s: all steps of the run are made: averaging with the others; ")
        await swarm.until(work.done, 3000.0)
        assert "step 900 of 900 (100.0 %)\n" in day.read("the end")
        assert day.state == "done"

    with monkeypatch.context() as patch:
        patch.setenv("TZ", EIGHT_O_CLOCK)
        time.tzset()
        machine = Machine(patch)
        prepare(patch, clock)
        play(Swarm(tmp_path, manifest=MANIFEST), story)
    time.tzset()


@pytest.mark.timeout(300)
def test_others_read_that_a_peer_starts_once_its_pause_is_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, seen = WallClock(), list[str]()

    async def watch(swarm: Swarm, host: Peer, peer: Peer) -> None:
        """Note each state in which another member shows the peer."""
        view = RunView()
        view.begin(swarm.manifest.run_id.hex(), swarm.manifest.run.total_steps, 0)
        reporter = MemberReporter(lambda event: view.take(cast(events.MembersSeen, event)), host.member.gossip)
        while True:
            reporter.report()
            if (member := view.members.get(str(peer.peer_id))) is not None and [member.state(clock.now_s())] != seen[-1:]:
                seen.append(member.state(clock.now_s()))
            await asyncio.sleep(1.0)

    async def story(swarm: Swarm) -> None:
        clock.loop_s = asyncio.get_running_loop().time
        swarm.kills_nodes_only = True
        first, _ = swarm.start(2, step_s=STEP_S)
        await asyncio.sleep(600.0)
        peer = newcomer(swarm, first, clock)
        supervisor = SwarmSupervisor(peer, lambda status: None)
        supervisor.children.build_s = 90.0
        work = [asyncio.create_task(one) for one in (supervisor.run(tmp_path), watch(swarm, first, peer))]
        await swarm.until(lambda: seen[-1:] == ["training"], 900.0)
        await asyncio.sleep(60.0)
        supervisor.ask(verb="pause", seconds=600)
        await swarm.until(lambda: seen[-1] == "paused", 60.0)
        await swarm.until(lambda: seen[-1] == "training", 900.0)
        supervisor.leave("the story is over")
        await swarm.until(work[0].done, 60.0)
        work[1].cancel()

    with monkeypatch.context() as patch:
        prepare(patch, clock)
        play(Swarm(tmp_path, manifest=MANIFEST), story)
    assert seen[-4:] == ["training", "paused", "starting", "training"], seen


def newcomer(swarm: Swarm, host: Peer, clock: WallClock) -> Peer:
    """Make a peer with an invite, on a slow line."""
    bootstraps = (f"/ip4/192.0.2.1/tcp/4001/p2p/{host.peer_id}",)
    peer = swarm.add(
        step_s=STEP_S, waits_for_start=True, is_founder=False, bootstraps=bootstraps, wire=Wire(latency_s=0.02, bytes_per_s=4000.0)
    )
    peer.local_s = clock.now_s
    peer.home.path.chmod(0o700)
    peer.home.create()
    peer.home.invite.write_text("an invite")
    return peer


async def joins_and_trains(swarm: Swarm, day: Day) -> None:
    await asyncio.sleep(20.0)
    assert day.read("a download").startswith("joining for 20 s: downloading weights: 0 % of 41.5 kB; ")
    await swarm.until(lambda: day.state == "training", 600.0)
    text = day.read("the first second of training")
    assert text.startswith("training for 0 s: meeting others; ") and "step 0 of" not in text
    await asyncio.sleep(1500.0)
    text = day.read("25 minutes later")
    assert text.startswith("training for 25 min: meeting others; ") and ", ends in about 2 h " in text


async def pauses(swarm: Swarm, day: Day, machine: Machine) -> None:
    day.supervisor.ask(verb="pause", seconds=1200)
    await asyncio.sleep(120.0)
    text = day.read("a pause")
    assert text.startswith("paused for 2 min: paused by the operator until ") and "nats per token when it last trained" in text
    await swarm.until(lambda: day.state != "paused", 1200.0)
    assert day.read("its end").startswith(("starting for 0 s: ", "training for 0 s: ")), "not what the node said when it joined"
    await asyncio.sleep(60.0)
    assert ", ends in about" not in day.read("a minute later"), "no pace is known yet"
    day.set("not_on_battery", "true")
    machine.is_plugged = False
    await asyncio.sleep(180.0)
    text = day.read("on battery")
    assert ": the machine runs on battery; ends when the machine is plugged in; " in text and "\nlimits     not on battery\n" in text
    machine.is_plugged = True
    await asyncio.sleep(120.0)
    day.set("pause_above_temperature", "80")
    machine.degrees = 93.0
    await asyncio.sleep(90.0)
    assert ": the machine has 93 C, more than 80 C; ends when it has cooled to 75 C; " in day.read("too hot")
    machine.degrees = 50.0
    await swarm.until(lambda: day.state == "training", 60.0)


async def is_alone(swarm: Swarm, day: Day, partners: list[Peer]) -> None:
    for partner in partners:
        partner.save()
        partner.kill()
        partner.kill_trainer()
    await swarm.until(lambda: not day.supervisor.status.peers_seen, 2000.0)
    await asyncio.sleep(120.0)
    text = day.read("alone")
    assert ": no other peer in sight; " in text and "\npartners   0 in sight\n" in text
    partners[0].start()
    await swarm.until(lambda: day.supervisor.status.peers_seen, 300.0)
    await asyncio.sleep(300.0)
    assert ": meeting others; " in day.read("one is back")


async def has_its_clock_set(day: Day, clock: WallClock) -> None:
    for set_by_s in (-2400.0, 0.0):
        clock.set_by_s = set_by_s
        await asyncio.sleep(60.0)
        text = day.read(f"the clock is {set_by_s:.0f} s off")
        assert ("this machine's clock is about 2400 s behind" in text) == (set_by_s < 0)


async def loses_its_node(day: Day) -> None:
    day.supervisor.child("node").kill()
    await asyncio.sleep(0.5)
    text = day.read("the node was killed")
    assert "it is started again after 1 s, training goes on without it; ends by itself as soon as it runs again" in text
    assert "\npartners   0 in sight\n" in text
    await asyncio.sleep(120.0)
    assert ": meeting others; " in day.read("the node is back")


async def reaches_a_limit(day: Day) -> None:
    day.set("monthly_traffic", "1 MB")
    await asyncio.sleep(300.0)
    text = day.read("the traffic is used up")
    assert ": the traffic of this month, 1 MB, is used up until Fri 01 Dec, 00:00; ends by itself then; " in text
    assert "\npartners   0 in sight\n" in text and "direct" not in text, "it is offline"
    day.set("monthly_traffic", "1 GB")
    await asyncio.sleep(300.0)
    assert ": meeting others; " in day.read("the limit is lifted")


async def follows_a_schedule(swarm: Swarm, day: Day) -> None:
    noon_s = day.clock.now_s() + 60.0
    noon, later = (time.strftime("%H:%M", time.localtime(noon_s + more_s)) for more_s in (0.0, 1800.0))
    windows = f"00:00-{noon}, {later}-24:00"
    assert Schedule.from_text(windows).allows(day.clock.now_s())
    day.set("schedule", windows)
    await swarm.until(lambda: day.state == "paused", 120.0)
    await asyncio.sleep(600.0)
    assert f": outside the hours of the schedule {windows} until {later}; ends by itself then; " in day.read("outside of its hours")
    await swarm.until(lambda: day.state == "training", 1900.0)


def test_an_event_that_the_clock_was_set_moves_every_time_of_a_status() -> None:
    status = Status(state="training", since=1000.0, started=900.0, earlier={"joined": 500.0})
    moved = apply(status, events.ClockSet(-300.0))
    assert (moved.since, moved.started, moved.lifetime["joined"]) == (700.0, 600.0, 200.0)
