"""What the supervisor keeps of the whole run, and what it has its node publish about this peer's own part."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path

from gossamer.peer.machine.events import ClockSet, MemberSeen, MembersSeen, RunKnown
from gossamer.peer.machine.home import Home
from gossamer.peer.machine.run_view import kept_view
from gossamer.peer.machine.status import Status
from gossamer.peer.node.process import published
from gossamer.peer.supervisor.run_watch import PUBLISH_S, RunWatch, own_part
from tests.peer.supervised import peer, run
from tests.peer.waiting import eventually

NOW_S = 1_800_000_000.0
EARLIER = {"joined": NOW_S - 9000, "sent": 2_000_000, "received": 1_500_000}
STATUS = Status(state="training", own_steps=40, loss=2.5, earlier=EARLIER, bytes={"sent": 400_000, "received": 100_000})
SEEN = MemberSeen("12D3KooWa", "training", 1, NOW_S + 300, 10, 5120, 10, 2.0, int(NOW_S) - 60, 1, is_own=True)


def watching(home: Home) -> RunWatch:
    watch = RunWatch(home)
    watch.take(RunKnown("ab", 100, step_tokens=512))
    watch.take(MembersSeen((SEEN,), ts=NOW_S))
    return watch


def test_what_was_seen_is_read_by_the_next_start(tmp_path: Path) -> None:
    (home := Home(tmp_path)).create()
    watch = watching(home)
    watch.take(MembersSeen((SEEN, MemberSeen("12D3KooWb", "training", 1, NOW_S + 300, 10, 1)), ts=NOW_S + 9))
    home.run.write_text(json.dumps(watch.record()))
    assert set(kept_view(home).members) == {"12D3KooWa", "12D3KooWb"}
    assert kept_view(home).since == NOW_S


def test_a_clock_that_is_set_back_does_not_stop_the_own_part(tmp_path: Path) -> None:
    watch = watching(Home(tmp_path))
    watch.look(NOW_S, STATUS)
    watch.take(ClockSet(-7200.0, ts=NOW_S - 7200))
    assert watch.look(NOW_S - 7200 + PUBLISH_S, replace(STATUS, own_steps=41)) is not None


def test_the_own_part_is_published_over_all_starts_when_it_has_changed(tmp_path: Path) -> None:
    watch = watching(Home(tmp_path))
    part = watch.look(NOW_S, STATUS)
    assert part == own_part(STATUS) and part is not None
    figures = published(part)
    assert (figures.own_steps, figures.loss, figures.joined_s, figures.carried_mb) == (40, 2.5, NOW_S - 9000, 4)
    assert watch.look(NOW_S + PUBLISH_S, STATUS) is None, "nothing is new"
    assert own_part(Status(state="paused", loss=2.5)).loss is None, "a paused peer has no loss"


def test_a_running_peer_answers_for_the_run_and_its_node_gets_the_own_part(tmp_path: Path) -> None:
    async def test() -> None:
        async with peer(tmp_path) as (running, _):
            await eventually(lambda: running.status.state == "training", "training")
            supervisor = running.supervisor
            supervisor._take(RunKnown("ab", 100, step_tokens=512))
            supervisor._take(MembersSeen((replace(SEEN, expires=time.time() + 300),)))
            answer = supervisor._answer({"verb": "run"})
            assert (answer["run_id"], answer["live"], answer["members"][0]["is_own"]) == ("ab", 1, True)
            json.dumps(answer)
        assert kept_view(running.home).run_id == "ab"

    run(test())
