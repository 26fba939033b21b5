"""The trainer's end of the link, against a node that the test plays on a bare socket."""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from gossamer.peer.link import messages
from gossamer.peer.link import socket as link
from gossamer.peer.link.socket import SOCKET_NAME, TrainerEnd
from gossamer.protocol.messages.messages import RunPhase

PROGRESS = messages.Progress(5, RunPhase.TRAIN, True)


def raw_node(folder: Path) -> socket.socket:
    node = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    node.connect(str(folder / SOCKET_NAME))
    return node


@pytest.fixture
def trainer(folder: Path) -> Iterator[TrainerEnd]:
    trainer = TrainerEnd(folder)
    yield trainer
    trainer.close()


@pytest.fixture
def node(folder: Path, trainer: TrainerEnd) -> Iterator[socket.socket]:
    with raw_node(folder) as node:
        yield node


def test_a_socket_left_by_a_killed_trainer_is_taken_over(folder: Path) -> None:
    dead = TrainerEnd(folder)
    TrainerEnd(folder).close()
    dead.close()


def test_each_node_is_a_session_of_its_own(folder: Path, trainer: TrainerEnd) -> None:
    assert trainer.poll() == []
    assert trainer.session == 0
    first = raw_node(folder)
    first.sendall(messages.REQUESTS.write(messages.Open(1, 0)))
    assert trainer.poll() == [messages.Open(1, 0)]
    assert trainer.session == 1
    first.close()
    second = raw_node(folder)  # before the trainer looks again
    second.sendall(messages.REQUESTS.write(messages.Open(1, 1)))
    trainer.send(PROGRESS, trainer.session)  # goes nowhere, and nobody may take the newcomer for the dead one
    assert trainer.poll() == []
    assert trainer.session == 0
    assert trainer.poll() == [messages.Open(1, 1)]
    assert trainer.session == 2
    second.close()


@pytest.mark.parametrize("trainer_writes", [False, True])
def test_messages_of_a_dead_node_are_read(trainer: TrainerEnd, node: socket.socket, trainer_writes: bool) -> None:
    """Its partner may hold the Commit that goes with this Apply."""
    trainer.poll()
    apply = messages.Apply(1, "ab" * 16, "")
    node.sendall(messages.REQUESTS.write(apply) + b'{"record":"Op')
    node.close()
    if trainer_writes:
        for _ in range(3):
            trainer.send(PROGRESS, trainer.session)
    assert trainer.poll() == [apply]
    assert trainer.session == 1, "what it had begun must not be dropped before"
    trainer.send(PROGRESS, trainer.session)
    assert trainer.poll() == []
    assert trainer.session == 0


def test_a_line_may_come_in_pieces(trainer: TrainerEnd, node: socket.socket) -> None:
    line = messages.REQUESTS.write(messages.Apply(3, "ab" * 16, "")) + messages.REQUESTS.write(messages.Drop(4))
    for index in range(len(line) - 1):
        node.sendall(line[index : index + 1])
        assert trainer.poll() == ([messages.Apply(3, "ab" * 16, "")] if line[index : index + 1] == b"\n" else [])
    node.sendall(line[-1:])
    assert trainer.poll() == [messages.Drop(4)]


@pytest.mark.parametrize("line", [b"not json\n", b"[]\n", b'{"record":"Fire"}\n', b'{"record":"Open"}\n', messages.ANSWERS.write(PROGRESS)])
def test_the_trainer_hangs_up_on_nonsense(trainer: TrainerEnd, node: socket.socket, line: bytes) -> None:
    node.sendall(line)
    assert trainer.poll() == []
    assert trainer.session == 0
    assert node.recv(10) == b""


def test_a_line_without_end_is_not_collected(trainer: TrainerEnd, node: socket.socket) -> None:
    node.setblocking(False)
    trainer.poll()
    sent = 0
    while trainer.session:
        with contextlib.suppress(BlockingIOError):
            sent += node.send(b"x" * 65536)
        assert trainer.poll() == []
        assert sent < 4 * link.LINE_BYTES


def test_a_node_that_never_reads_costs_bounded_memory_and_no_time(trainer: TrainerEnd, node: socket.socket) -> None:
    trainer.poll()
    sent, long = 0, messages.Unavailable(1, "x" * 1000)
    while trainer.session:
        for _ in range(1000):
            trainer.send(long, trainer.session)  # returns at once, or this test never ends
            sent += len(messages.ANSWERS.write(long))
        trainer.poll()
        assert sent < 8 * link.UNSENT_BYTES
    assert sent > link.UNSENT_BYTES


def test_what_the_socket_does_not_take_is_sent_later_and_whole(trainer: TrainerEnd, node: socket.socket) -> None:
    trainer.poll()
    records = [messages.Unavailable(number, "x" * 1000) for number in range(600)]  # more than the socket holds
    for record in records:
        trainer.send(record, trainer.session)
    assert trainer.session
    node.settimeout(0.0)
    received = b""
    while received.count(b"\n") < len(records):
        trainer.poll()
        with contextlib.suppress(BlockingIOError):
            received += node.recv(1 << 20)
    assert [messages.ANSWERS.read(line) for line in received.splitlines()] == records


def test_waiting_ends_at_a_message_of_the_node(folder: Path, trainer: TrainerEnd) -> None:
    trainer.wait(0.0)
    node = raw_node(folder)
    trainer.wait(60.0)  # returns at once: somebody knocks
    trainer.poll()
    node.sendall(messages.REQUESTS.write(messages.Start()))
    trainer.wait(60.0)
    assert trainer.poll() == [messages.Start()]
    node.close()
    trainer.wait(60.0)
    trainer.poll()
    assert trainer.session == 0


def test_a_node_that_connects_while_no_descriptor_is_left_is_answered_later(trainer: TrainerEnd, node: socket.socket) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.open(os.devnull, os.O_RDONLY)
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, hard))
    try:
        assert trainer.poll() == [] and trainer.session == 0
        began_s = time.monotonic()
        trainer.wait(0.02)
        assert time.monotonic() - began_s >= 0.015, "the wait would take a processor"
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    node.sendall(messages.REQUESTS.write(messages.Open(1, 0)))
    assert trainer.poll() == [messages.Open(1, 0)]
    assert trainer.session == 1
