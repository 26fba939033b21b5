from __future__ import annotations

import dataclasses
import itertools
import json
import math
from pathlib import Path
from typing import Any, get_args

import pytest

from gossamer.peer.machine.event_log import EventLog
from gossamer.peer.machine.events import (
    KINDS,
    CheckpointSaved,
    EvalDone,
    Event,
    EventsLost,
    FragmentSynced,
    LaneSeen,
    MeetingDone,
    MemberSeen,
    NodeSpent,
    ResultTaken,
    SoloStep,
    StateChanged,
    StateTransferred,
    StepDone,
    TrainerRestarted,
    from_line,
    older,
    read_events,
    to_line,
)
from gossamer.peer.machine.history import History
from gossamer.peer.machine.status import Status, apply, of_events
from tests.full_disk import room_for

STATE = StateChanged("training", "joined")
MEETING = MeetingDone("12D3KooX", 1, "completed", "", "tunnel", 10, 20, 0.5)


def events(path: Path) -> list[object]:
    return list(read_events(path))


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    log = EventLog(path)
    for event in (STATE, MEETING, CheckpointSaved(8, "step-00000008", 100, 0.1)):
        log.append(event)
    assert events(path) == [STATE, MEETING, CheckpointSaved(8, "step-00000008", 100, 0.1)]
    assert [event.ts for event in read_events(path)][:2] == [STATE.ts, MEETING.ts]
    assert path.stat().st_mode & 0o777 == 0o600


def counted(second: int, loss: float = math.nan) -> StepDone:
    return StepDone(second, second, second, loss, math.nan if math.isnan(loss) else 0.1, 1.0, 1.0, 0.0, 1.0, 0.0, ts=1000.0 + second)


def test_hours_of_counts_are_few_lines_and_the_status_at_their_end_is_whole(tmp_path: Path) -> None:
    log, status = EventLog(tmp_path / "events.jsonl"), Status()
    for second in range(1, 7200):
        happened: list[Event] = [counted(second, 2.0 + second % 2), NodeSpent(second / 100, ts=1000.0 + second)]
        happened += [dataclasses.replace(MEETING, ts=1000.0 + second)] * (second % 60 == 0)
        for event in happened:
            log.append(event)
            status = apply(status, event)
    log.append(end := StateChanged("left", "gone", ts=8200.0))
    found = events(tmp_path / "events.jsonl")
    steps = [event for event in found if isinstance(event, StepDone)]
    assert [event.step for event in steps[:100]] == list(range(1, 101)) and len(steps) < 700, "the beginning is whole"
    assert all(0.0 < later.ts - step.ts <= 30.0 for step, later in itertools.pairwise(steps))
    folded, shown = (dataclasses.replace(apply(one, end), history=History()) for one in (of_events(found[:-1]), status))
    assert dataclasses.replace(folded, loss=None) == dataclasses.replace(shown, loss=None)


def test_the_loss_of_a_count_in_the_file_is_that_of_all_steps_since_the_one_before(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events.jsonl")
    log.append(counted(0, 1.0))
    log.append(counted(600, 1.0))
    for event in (counted(601, 2.0), counted(602, 4.0), counted(603), MEETING, TrainerRestarted("killed", 1, ts=1604.0)):
        log.append(event)
    *_, meeting, count, restarted = events(tmp_path / "events.jsonl")
    assert meeting == MEETING and isinstance(restarted, TrainerRestarted), "a restarted trainer counts from what is written before"
    assert isinstance(count, StepDone) and (count.step, count.loss, count.learning_rate) == (603, 3.0, 0.1)


def test_a_line_is_plain_json() -> None:
    line = to_line(SoloStep(2, "alone", ts=1.5))
    assert line == b'{"ts":1.5,"event":"SoloStep","fragment":2,"reason":"alone"}\n'
    assert json.loads(to_line(MEETING))["bytes_sent"] == 10


def test_a_loss_that_is_not_finite_stays_valid_json() -> None:
    line = to_line(EvalDone(5, math.inf, 1))
    assert json.loads(line)["loss"] is None
    event = from_line(line)
    assert isinstance(event, EvalDone)
    assert math.isnan(event.loss)


def test_torn_and_unknown_lines_are_skipped(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    whole = to_line(STATE)
    path.write_bytes(whole + b'{"ts":1,"event":"FromTheFuture","x":1}\n[1]\n{}\n\xff\n' + whole + whole[:-9])
    assert events(path) == [STATE, STATE]


def test_appending_after_a_torn_line_loses_only_that_line(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_bytes(to_line(STATE)[:-5])
    log = EventLog(path)
    log.append(MEETING)
    assert events(path) == [MEETING]


def test_a_missing_log_is_empty(tmp_path: Path) -> None:
    assert events(tmp_path / "events.jsonl") == []


def test_a_full_log_is_moved_aside_once(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    log = EventLog(path, max_bytes=2000)
    for number in range(200):
        log.append(SoloStep(number, "alone"))
    assert sorted(file.name for file in tmp_path.iterdir()) == ["events.jsonl", "events.jsonl.1"]
    assert path.stat().st_size + older(path).stat().st_size < 2 * 2100
    numbers = [event.fragment for event in events(path) if isinstance(event, SoloStep)]
    assert numbers == list(range(numbers[0], 200))
    assert len(numbers) > 20


@pytest.mark.parametrize("kind", get_args(KINDS), ids=lambda kind: kind.__name__)
def test_every_event_comes_back_as_it_was(kind: type[Any]) -> None:
    values = {
        "int": 7, "str": "x", "Figure": 0.5, "float": 0.5, "bool": True, "tuple[str, ...]": ("x", "y"),
        "dict[str, str]": {"x": "y"}, "dict[str, float]": {"x": 0.5}, "dict[str, int]": {"x": 7}, "float | None": 0.5,
        "tuple[tuple[float | None, float | None], ...]": ((0.5, None), (1.5, 2.5)),
        "tuple[tuple[float | None, ...], ...]": ((0.5, None, 3.0),),
        "tuple[int, ...]": (1, 2), "tuple[LaneSeen, ...]": (LaneSeen("x", 1, 2, 3, 4, None), LaneSeen("y", 1, 2, 3, 4, 0.5)),
        "tuple[MemberSeen, ...]": (MemberSeen("x", "training", 1, 2.5, 3, 4, loss=0.5), MemberSeen("y", "paused", 1, 2.5, 3, 4)),
    }  # fmt: skip
    given = [values[str(field.type)] for field in dataclasses.fields(kind) if field.name not in ("ts", "event")]
    event = kind(*given, ts=1.25)
    line = to_line(event)
    assert list(json.loads(line))[:2] == ["ts", "event"]
    assert from_line(line) == event
    assert getattr(from_line(line), "ts") == 1.25  # noqa: B009


def test_a_full_disk_costs_events_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.symlink_to("/dev/full")
    log = EventLog(path)
    log.append(STATE)
    log.append(STATE)
    path.unlink()  # as if there were room again
    log.append(MEETING)
    assert events(path) == [EventsLost(2, "No space left on device"), MEETING]


def test_a_line_that_a_full_disk_cut_short_is_lost_alone(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    log = EventLog(path)
    log.append(STATE)
    with room_for(path.stat().st_size + 20):
        log.append(MEETING)
        log.append(MEETING)
    assert path.read_bytes().endswith(to_line(MEETING)[:20])
    log.append(STATE)
    assert events(path) == [STATE, EventsLost(2, "File too large"), STATE]


@pytest.mark.parametrize(("line", "event"), [
    (
        b'{"ts":1.0,"event":"StateCloned","donors":["12D3KooX"],"clock_steps":40,"num_bytes":8,"fetched_bytes":8,"seconds":1.5}',
        StateTransferred(("12D3KooX",), 40, 8, 8, 1.5),
    ),
    (
        b'{"ts":1.0,"event":"FragmentPulled","donor":"12D3KooX","fragment":2,"clock_steps":40,"num_bytes":8,"seconds":1.5,"reason":""}',
        FragmentSynced("12D3KooX", 2, 40, 8, 1.5, ""),
    ),
    (
        b'{"ts":1.0,"event":"MeetingDone","partner":"12D3KooX","fragment":1,"outcome":"completed","reason":"","lane":"direct",'
        b'"bytes_sent":10,"bytes_received":20,"seconds":0.5,"round_trip_s":null}',
        MeetingDone("12D3KooX", 1, "completed", "", "direct", 10, 20, 0.5),
    ),
    (
        b'{"ts":1.0,"event":"StepDone","step":7,"clock_steps":9,"tokens":64,"loss":2.5,"learning_rate":0.1,"tokens_per_second":3.0,'
        b'"train_s":1.0,"blocked_s":0.5,"training_cpu_s":1.0,"coding_cpu_s":0.1,"checkpoint_s":0.0,"evaluation_s":0.0}',
        StepDone(7, 9, 64, 2.5, 0.1, 3.0, 1.0, 0.5, 1.0, 0.1),
    ),
    (
        b'{"ts":1.0,"event":"ResultTaken","name":"ab","donors":["12D3KooX"],"num_bytes":8,"seconds":1.5}',
        ResultTaken("ab", ("12D3KooX",), 8, 1.5),
    ),
    (
        b'{"ts":1.0,"event":"StateChanged","state":"seeding","reason":"showing newcomers the way","way_out":"ends with `peer leave`"}',
        StateChanged("serving", "showing newcomers the way", "ends with `peer leave`"),
    ),
])  # fmt: skip
def test_a_log_of_before_the_renames_is_read(line: bytes, event: Event) -> None:
    read = from_line(line)
    assert read is not None and to_line(read) == to_line(dataclasses.replace(event, ts=1.0))
