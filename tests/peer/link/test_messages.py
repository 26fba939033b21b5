from __future__ import annotations

import dataclasses
import fnmatch
import json
import typing
from typing import Any

import pytest

from gossamer.peer.link import messages
from gossamer.peer.link.messages import ANSWERS, REQUESTS, File, HopFile, Writer, hop_file, payload_name
from gossamer.protocol.messages.messages import RunPhase
from gossamer.protocol.messages.terms import FragmentTerms, ModelPlan, StageTerms

SAMPLES = {
    "float": 2.5,
    "float | None": -0.5,
    "int": 7,
    "int | None": 9,
    "tuple[tuple[int, float], ...]": ((8, 2.5), (9, 2.25)),
    "str": 'quoted "text"\nand more',
    "bool": True,
    "RunPhase": RunPhase.FINISH,
    "tuple[tuple[str, ...], ...]": (("sync-1", "sync-2"), ("sync-3",)),
    "dict[str, float]": {"sync-1": 0.25},
    "tuple[int, ...]": (0, 2),
    "ModelPlan": ModelPlan(16, (FragmentTerms(1, 2, 3), FragmentTerms(0, 5, 0)), 800, StageTerms(1, 2, 516, 8448, 4)),
}
KINDS = typing.get_args(messages.Request | messages.Answer)


def sample(kind: type[messages.Request | messages.Answer]) -> Any:
    return kind(**{field.name: SAMPLES[str(field.type)] for field in dataclasses.fields(kind) if field.name != "record"})


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_every_record_survives_its_line_and_only_on_its_side(kind: type[messages.Request | messages.Answer]) -> None:
    record = sample(kind)
    own, other = (REQUESTS, ANSWERS) if issubclass(kind, messages.Request) else (ANSWERS, REQUESTS)
    line = own.write(record)
    assert line.endswith(b"\n")
    assert line.count(b"\n") == 1
    assert json.loads(line)["record"] == kind.__name__
    assert own.read(line) == record
    with pytest.raises(ValueError):
        other.read(line)


def test_a_reply_names_what_its_request_is_about() -> None:
    assert messages.subject(messages.Open(4, 0)) == messages.subject(messages.Unavailable(4, "busy")) == 4
    assert messages.subject(messages.Adopt("clone", 3)) == messages.subject(messages.Adopted("clone", True, "")) == "clone"
    assert messages.subject(messages.Forward(4, "ab")) == messages.subject(messages.Declined(4, "late")) == "hop-4"


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
        b'{"record":"Check","meeting":"1"}',
        b'{"record":"Due","fragment":1}',
        b'{"record":"Due","fragment":1,"phase":"lunch"}',
        b'{"record":["Check"],"meeting":1}',
        b"\xff\xfe",
    ],
)
def test_what_is_no_record_is_a_value_error(line: bytes) -> None:
    with pytest.raises(ValueError):
        REQUESTS.read(line)
    with pytest.raises(ValueError):
        ANSWERS.read(line)


def test_every_file_of_a_meeting_has_one_writer() -> None:
    for file in File:
        name = payload_name(12, file)
        writers = [writer for writer in Writer if any(fnmatch.fnmatch(name, pattern) for pattern in writer.value)]
        assert writers == [Writer.TRAINER if file.name.startswith("OWN") else Writer.NODE]


def test_every_file_of_a_hop_has_one_writer_and_a_name_of_its_own() -> None:
    for file in HopFile:
        name = hop_file(12, file)
        writers = [writer for writer in Writer if any(fnmatch.fnmatch(name, pattern) for pattern in writer.value)]
        assert writers == [Writer.TRAINER if file.name.startswith("OWN") else Writer.NODE]
    assert len({hop_file(hop, file) for hop in (1, 12) for file in HopFile}) == 2 * len(HopFile)
