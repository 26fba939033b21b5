from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

from peer.machine.events import (
    CheckpointSaved,
    Entry,
    EvalDone,
    EventLog,
    EventsLost,
    MeetingDone,
    SoloStep,
    StateChanged,
    from_line,
    older,
    read_events,
    to_line,
)

STATE = StateChanged("training", "joined")
MEETING = MeetingDone("12D3KooX", 1, "completed", "", "tunnel", 10, 20, 0.5)

APPEND = """
import sys
from pathlib import Path
from peer.machine.events import EventLog, SoloStep
log = EventLog(Path(sys.argv[1]), max_bytes=int(sys.argv[3]))
for number in range(int(sys.argv[4])):
    log.append(SoloStep(number, sys.argv[2] * 50))
"""


def events(path: Path) -> list[object]:
    return [entry.event for entry in read_events(path)]


def write_from_several_processes(path: Path, max_bytes: int, num_events: int) -> None:
    writers = [subprocess.Popen([sys.executable, "-c", APPEND, str(path), name, str(max_bytes), str(num_events)]) for name in "abc"]
    assert [writer.wait() for writer in writers] == [0, 0, 0]


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    log = EventLog(path)
    for event in (STATE, MEETING, CheckpointSaved(8, "step-00000008", 100, 0.1)):
        log.append(event)
    log.close()
    entries = list(read_events(path))
    assert [entry.event for entry in entries] == [STATE, MEETING, CheckpointSaved(8, "step-00000008", 100, 0.1)]
    assert entries[0].ts <= entries[-1].ts
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_line_is_plain_json() -> None:
    record = json.loads(to_line(Entry(1.5, MEETING)))
    assert record["ts"] == 1.5
    assert record["event"] == "MeetingDone"
    assert record["bytes_sent"] == 10


def test_a_loss_that_is_not_finite_stays_valid_json() -> None:
    line = to_line(Entry(1.0, EvalDone(5, math.inf, 1)))
    assert json.loads(line)["loss"] is None
    entry = from_line(line)
    assert entry is not None
    assert isinstance(entry.event, EvalDone)
    assert math.isnan(entry.event.loss)


def test_torn_and_unknown_lines_are_skipped(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    whole = to_line(Entry(1.0, STATE))
    path.write_bytes(whole + b'{"ts":1,"event":"FromTheFuture","x":1}\n[1]\n{}\n\xff\n' + whole + whole[:-9])
    assert events(path) == [STATE, STATE]


def test_appending_after_a_torn_line_loses_only_that_line(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_bytes(to_line(Entry(1.0, STATE))[:-5])
    log = EventLog(path)
    log.append(MEETING)
    log.close()
    assert events(path) == [MEETING]


def test_a_missing_log_is_empty(tmp_path: Path) -> None:
    assert events(tmp_path / "events.jsonl") == []


def test_a_full_log_is_moved_aside_once(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    log = EventLog(path, max_bytes=2000)
    for number in range(200):
        log.append(SoloStep(number, "alone"))
    log.close()
    assert sorted(file.name for file in tmp_path.iterdir()) == ["events.jsonl", "events.jsonl.1"]
    assert path.stat().st_size + older(path).stat().st_size < 2 * 2100
    numbers = [event.fragment for event in events(path) if isinstance(event, SoloStep)]
    assert numbers == list(range(numbers[0], 200))
    assert len(numbers) > 20


def test_processes_do_not_mix_their_lines(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    write_from_several_processes(path, max_bytes=1 << 30, num_events=300)
    written = events(path)
    for name in "abc":
        own = [event.fragment for event in written if isinstance(event, SoloStep) and event.reason == name * 50]
        assert own == list(range(300))


def test_processes_rotate_together(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    write_from_several_processes(path, max_bytes=20_000, num_events=300)
    files = [older(path), path]
    assert all(file.stat().st_size < 20_000 + 3 * 300 for file in files)
    assert all(from_line(line) is not None for file in files for line in file.read_bytes().splitlines())


def test_a_full_disk_costs_events_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.symlink_to("/dev/full")
    log = EventLog(path)
    log.append(STATE)
    log.append(STATE)
    path.unlink()  # as if there were room again
    log.append(MEETING)
    log.close()
    assert events(path) == [EventsLost(2, "No space left on device"), MEETING]
