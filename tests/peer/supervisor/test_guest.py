"""The supervisor's side of the pipes of a program that trains as its guest."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from gossamer.peer.machine.child import FAILED, STOP, ChildSettings
from gossamer.peer.machine.config import PeerConfig
from gossamer.peer.machine.events import RunKnown
from gossamer.peer.supervisor.children import Children
from gossamer.peer.supervisor.condition import Condition
from gossamer.peer.supervisor.guest import GuestProcess
from gossamer.protocol.tasks import cancel

LATE = FAILED + b' "late"}\n'


@contextlib.contextmanager
def piped_stdout() -> Iterator[int]:
    """Put a pipe in place of stdout; yield the end at which the program reads. pytest's own capture must be as it was afterwards."""
    stdout, (read_end, write_end) = os.dup(1), os.pipe()
    os.dup2(write_end, 1)
    os.close(write_end)
    os.set_blocking(read_end, False)
    try:
        yield read_end
    finally:
        os.dup2(stdout, 1)
        os.close(stdout)
        os.close(read_end)


def settings(number: int) -> bytes:
    return b'{"number": %d, "more": "%s"}\n' % (number, b"x" * 5000)


async def read_all(reader: int, last: bytes) -> list[bytes]:
    content = b""
    while not content.endswith(last):
        await asyncio.sleep(0)  # the loop sends what waits
        try:
            content += os.read(reader, 1 << 16)
        except BlockingIOError:
            continue
    return content.splitlines(keepends=True)


@pytest.mark.timeout(20)
def test_a_program_that_does_not_read_holds_nobody_up_and_reads_the_newest_settings_later() -> None:
    async def play(reader: int) -> list[bytes]:
        guest = GuestProcess()
        for number in range(100):
            guest.notify(settings(number))
        guest.notify(STOP)
        guest.notify(LATE)
        return await read_all(reader, LATE)

    with piped_stdout() as reader:
        *numbers, before_last, last = asyncio.run(play(reader))
    assert (before_last, last) == (STOP, LATE)
    assert numbers[-1] == settings(99) and len(numbers) < 20, "settings that newer ones replace are not kept"
    assert numbers[:-1] == [settings(number) for number in range(len(numbers) - 1)]


@pytest.mark.timeout(20)
def test_a_program_gets_its_first_settings_once_its_run_is_known_whatever_changes_before(tmp_path: Path) -> None:
    async def play(reader: int) -> None:
        guest, config = GuestProcess(), PeerConfig(home=tmp_path, alone=True)
        children = Children(config, "12D3KooX", Condition(config.children), lambda event: None, lambda: None, guest=guest)
        work = asyncio.create_task(children.keep(tmp_path))
        await asyncio.sleep(0.05)
        children.follow(config)  # a pause begins
        with pytest.raises(BlockingIOError):
            os.read(reader, 1)
        guest.on_event(RunKnown("ab", 9))
        [line] = await read_all(reader, b"\n")
        assert ChildSettings.model_validate_json(line).peer_id == "12D3KooX"
        await cancel(work)

    with piped_stdout() as reader:
        asyncio.run(play(reader))


def test_a_program_that_has_ended_is_not_written_to() -> None:
    async def play(reader: int) -> None:
        guest = GuestProcess()
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, reader)  # closes the only end that reads
        os.close(nothing)
        guest.notify(settings(1))
        guest.notify(STOP)

    with piped_stdout() as reader:
        asyncio.run(play(reader))
