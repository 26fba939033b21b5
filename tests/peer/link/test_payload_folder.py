from __future__ import annotations

from pathlib import Path

import pytest
import torch

from gossamer.peer.link.messages import File, Writer, payload_name
from gossamer.peer.link.payload_folder import PayloadFolder


@pytest.fixture
def payloads(tmp_path: Path) -> PayloadFolder:
    return PayloadFolder(tmp_path / "payloads")


def test_the_folder_is_private(payloads: PayloadFolder, tmp_path: Path) -> None:
    payloads.write("a", b"x")
    assert (tmp_path / "payloads").stat().st_mode & 0o777 == 0o700
    assert payloads.path("a").stat().st_mode & 0o777 == 0o600


def test_what_is_written_is_read(payloads: PayloadFolder) -> None:
    data = bytes(range(256)) * 5000
    payloads.write("a", memoryview(data))
    assert bytes(payloads.read("a")) == data
    payloads.write("a", torch.arange(3, dtype=torch.int32).numpy().data)
    assert bytes(payloads.read("a")) == bytes([0, 0, 0, 0, 1, 0, 0, 0, 2, 0, 0, 0])


def test_a_file_grows(payloads: PayloadFolder) -> None:
    for part in (b"one", b"", b"two"):
        payloads.append("a", part)
    assert bytes(payloads.read("a")) == b"onetwo"


def test_what_is_not_there_is_empty(payloads: PayloadFolder) -> None:
    assert bytes(payloads.read("a")) == b""
    payloads.remove("a")
    payloads.write("a", b"")
    assert bytes(payloads.read("a")) == b""


def test_a_view_outlives_its_file(payloads: PayloadFolder) -> None:
    payloads.write("a", b"old")
    view = payloads.read("a")
    payloads.write("a", b"a longer and newer one")
    assert bytes(view) == b"old"
    payloads.remove("a")
    assert bytes(view) == b"old"


def test_writing_to_a_view_changes_no_file(payloads: PayloadFolder) -> None:
    payloads.write("a", b"\0\0")
    torch.frombuffer(payloads.read("a"), dtype=torch.uint8).fill_(9)
    assert bytes(payloads.read("a")) == b"\0\0"


def test_a_meeting_leaves_nothing(payloads: PayloadFolder, tmp_path: Path) -> None:
    for number in (1, 11):
        for file in File:
            payloads.write(payload_name(number, file), b"x")
    payloads.remove_meeting(1)
    assert sorted(path.name for path in (tmp_path / "payloads").iterdir()) == sorted(payload_name(11, file) for file in File)


def test_each_process_clears_away_its_own_files_only(payloads: PayloadFolder, tmp_path: Path) -> None:
    names = {
        Writer.TRAINER: {payload_name(3, File.OWN_SKETCH), payload_name(3, File.OWN_PAYLOAD), "copy-1"},
        Writer.NODE: {payload_name(3, File.PARTNER_SKETCH), payload_name(3, File.PARTNER_PAYLOAD)},
    }
    for name in names[Writer.TRAINER] | names[Writer.NODE]:
        payloads.write(name, b"x")
    payloads.clear(Writer.TRAINER)
    assert {path.name for path in (tmp_path / "payloads").iterdir()} == names[Writer.NODE]
    payloads.clear(Writer.NODE)
    assert not list((tmp_path / "payloads").iterdir())


def test_an_unwritable_folder_is_reported(payloads: PayloadFolder, tmp_path: Path) -> None:
    (tmp_path / "payloads").rmdir()
    with pytest.raises(OSError):
        payloads.write("a", b"x")
    with pytest.raises(OSError):
        payloads.append("a", b"x")
