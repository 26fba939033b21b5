from __future__ import annotations

import dataclasses
import fnmatch
import typing

import pytest

from peer.link import records as ask
from peer.link.records import File, Writer, from_line, payload_name, to_line
from protocol.messages.messages import RunPhase

SAMPLES = {"int": 7, "str": 'quoted "text"\nand more', "bool": True, "RunPhase": RunPhase.FINISH}
KINDS = typing.get_args(ask.Record)


def sample(kind: type[ask.Record]) -> ask.Record:
    return kind(**{field.name: SAMPLES[str(field.type)] for field in dataclasses.fields(kind)})


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_every_record_survives_its_line(kind: type[ask.Record]) -> None:
    record = sample(kind)
    line = to_line(record)
    assert line.endswith(b"\n")
    assert line.count(b"\n") == 1
    assert from_line(line) == record


def test_every_record_is_either_asked_or_answered_or_noticed() -> None:
    groups = [typing.get_args(union) for union in (ask.Request, ask.Reply, ask.Notice)]
    assert sorted(kind.__name__ for group in groups for kind in group) == sorted(kind.__name__ for kind in KINDS)
    assert set(typing.get_args(ask.MeetingRequest)) < set(groups[0])


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"nonsense",
        b"3",
        b"null",
        b"[1]",
        b"{}",
        b'{"record":"Burn"}',
        b'{"record":"Check"}',
        b'{"record":"Check","meeting":1,"more":2}',
        b'{"record":"Due","fragment":1,"stage":"lunch"}',
        b'{"record":["Check"],"meeting":1}',
        b"\xff\xfe",
    ],
)
def test_what_is_no_record_is_a_value_error(line: bytes) -> None:
    with pytest.raises(ValueError):
        from_line(line)


def test_every_file_of_a_meeting_has_one_writer() -> None:
    for file in File:
        name = payload_name(12, file)
        writers = [writer for writer in Writer if any(fnmatch.fnmatch(name, pattern) for pattern in writer.value)]
        assert writers == [Writer.TRAINER if file.name.startswith("OWN") else Writer.NODE]
