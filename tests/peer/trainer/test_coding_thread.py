"""The trainer's second thread, over the real link, against a node that the test plays on a bare socket. The test is the trainer."""

from __future__ import annotations

import socket
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from gossamer.optim.fragment_codec import FragmentCodec, FragmentEncoded
from gossamer.optim.fragments import gather
from gossamer.peer.link import records as ask
from gossamer.peer.link.payload_folder import PayloadFolder
from gossamer.peer.link.records import File, payload_name
from gossamer.peer.link.socket import SOCKET_NAME, TrainerEnd
from gossamer.peer.trainer.coding_thread import Batch, CodingThread
from gossamer.peer.trainer.replica import Replica
from gossamer.protocol.messages.messages import RunPhase
from tests.peer.exchange import Side, Terms, exchange, meet, replica_side
from tests.peer.small import small_manifest, small_replica

NAME = "ab" * 16


class Gate(FragmentCodec):
    """A codec that waits at the door before it encodes."""

    def __init__(self, inner: FragmentCodec) -> None:
        super().__init__(inner.fragment, inner.codec)
        self.entered, self.door = threading.Event(), threading.Event()
        self.bug: RuntimeError | None = None

    def encode(self, message: Tensor, seed: int, own_sketch: Tensor, partner_sketch: Tensor) -> FragmentEncoded:
        self.entered.set()
        assert self.door.wait(20)
        if self.bug is not None:
            raise self.bug
        return super().encode(message, seed, own_sketch, partner_sketch)


class Trainer:
    """A replica and its coding thread, with a node at the other end."""

    def __init__(self, runtime: Path, codec: str = "int8") -> None:
        self.payloads = PayloadFolder(runtime / "payloads")
        self.replica = small_replica(runtime / "payloads", small_manifest(codec={"name": codec}))
        self.link = TrainerEnd(runtime)
        self.reports = list[ask.NodeReport]()
        self.thread = CodingThread(self.link, self.replica.outer, self.replica.answer_beside, self.reports.append)
        self.thread.start()
        self.runtime = runtime
        self.node = self.come()

    def come(self) -> socket.socket:
        node = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        node.settimeout(20)
        node.connect(str(self.runtime / SOCKET_NAME))
        return node

    def ask(self, *requests: ask.Request) -> None:
        self.node.sendall(b"".join(map(ask.REQUESTS.write, requests)))

    def reply(self) -> ask.Answer:
        line = b""
        while not line.endswith(b"\n"):
            line += self.node.recv(1)
        return ask.ANSWERS.read(line)

    def taken(self) -> Batch:
        """What the next step boundary finds, one batch at a time."""
        while not (batches := self.thread.take()):
            self.thread.wait(20)
        (batch,) = batches
        return batch

    def kept(self, count: int) -> list[ask.Request]:
        """The `count` requests that wait for a boundary: the answer to a later one may be there before they are kept."""
        kept = list[ask.Request]()
        while len(kept) < count:
            self.thread.wait(20)
            kept += [request for batch in self.thread.take() for request in batch.requests]
        return kept

    def gate(self, fragment: int = 0) -> Gate:
        state = self.replica.outer.fragments[fragment]
        state.codec = gate = Gate(state.codec)
        return gate

    def prepare(self, gate: Gate) -> None:
        """Open a meeting, and have its message encoded up to the door."""
        self.ask(ask.Open(1, 0))
        self.boundary()
        self.reply()
        self.ask(ask.Prepare(1, 100, 0, 7, RunPhase.TRAIN))
        assert gate.entered.wait(20)

    def boundary(self) -> list[ask.Request]:
        """Do as the trainer does between two inner steps."""
        batch = self.taken()
        for request in batch.requests:
            if (reply := self.replica.handle(request)) is not None:
                self.link.send(reply, batch.session)
        return list(batch.requests)


@pytest.fixture
def trainer() -> Iterator[Trainer]:
    with tempfile.TemporaryDirectory(prefix="coding-") as runtime:
        one = Trainer(Path(runtime))
        assert one.taken() == Batch(1, ())
        yield one
        one.node.close()
        one.thread.close()


def test_a_whole_meeting_needs_two_boundaries_and_ends_as_one_between_steps(trainer: Trainer, tmp_path: Path) -> None:
    manifest = trainer.replica.manifest
    twin, partner = (small_replica(tmp_path / name, manifest, peer) for name, peer in (("twin", b"me"), ("partner", b"you")))
    for replica in (trainer.replica, twin, partner):
        replica.inner_step()
    alone = replica_side(partner, tmp_path / "partner")

    trainer.ask(ask.Open(1, 0))
    assert trainer.boundary() == [ask.Open(1, 0)]
    mine = trainer.reply()
    assert isinstance(mine, ask.Opened)

    def answer(request: ask.MeetingRequest) -> ask.Reply:
        if isinstance(request, ask.Open):
            return mine
        trainer.ask(request)
        reply = trainer.reply()  # and no boundary came
        assert isinstance(reply, ask.PayloadReady | ask.Checked)
        return reply

    exchange((Side(answer, trainer.payloads), alone), Terms())
    assert answer(ask.Check(1)) == alone.answer(ask.Check(1))
    trainer.ask(ask.Apply(1, NAME, ""))
    assert trainer.boundary() == [ask.Apply(1, NAME, "")]
    assert trainer.reply() == ask.Applied(1)

    other = small_replica(tmp_path / "other", manifest, b"you")
    other.inner_step()
    meet((replica_side(twin, tmp_path / "twin"), replica_side(other, tmp_path / "other")), Terms())
    for name, tensor in twin.tensors().items():
        assert torch.equal(tensor, trainer.replica.tensors()[name]), name


def test_what_needs_a_boundary_waits_for_one_in_its_order(trainer: Trainer) -> None:
    asked: list[ask.Request] = [ask.Open(1, 0), ask.Open(2, 1), ask.Drop(1), ask.Apply(9, NAME, "zz"), ask.Solo(2), ask.Start()]
    trainer.ask(*asked, ask.Check(77))
    assert trainer.reply() == ask.Unavailable(77, "no such meeting here: the trainer or the link was restarted")  # the last, answered first
    assert trainer.kept(len(asked)) == asked
    assert all(state.meeting is None for state in trainer.replica.outer.fragments)


def test_a_call_in_the_middle_of_a_step_is_answered_there_with_the_weights_before_it(trainer: Trainer, tmp_path: Path) -> None:
    replica, twin, replies = trainer.replica, small_replica(tmp_path, trainer.replica.manifest), list[ask.Answer]()
    prepare, report = ask.Prepare(1, 100, 0, 7, RunPhase.TRAIN), ask.NodeReport(1e6, 0.5)
    assert twin.handle(ask.Open(1, 0)) == ask.Opened(1, 0, 0, RunPhase.TRAIN)
    expected = twin.handle(prepare)

    def call(*_: object) -> None:
        trainer.ask(report, ask.Open(1, 0))  # it comes every other second: a long step has always heard one
        replies.append(trainer.reply())

    hook = replica.model.register_forward_hook(call)
    replica.inner_step()
    hook.remove()
    assert replies == [ask.Opened(1, 0, 0, RunPhase.TRAIN)], "no token of the step that is under way counts"
    assert replica.own_steps == 1 and trainer.reports == [report] and not trainer.thread.take()
    trainer.ask(prepare)
    assert trainer.reply() == expected, "the hash of what is sent"


def test_a_call_in_the_middle_of_a_step_waits_behind_what_came_before_it(trainer: Trainer) -> None:
    trainer.ask(ask.Drop(7), ask.Check(77))
    trainer.reply()

    def call(*_: object) -> None:
        trainer.ask(ask.Open(2, 1), ask.Check(78))
        assert trainer.reply() == ask.Unavailable(78, "no such meeting here: the trainer or the link was restarted")

    hook = trainer.replica.model.register_forward_hook(call)
    trainer.replica.inner_step()
    hook.remove()
    assert trainer.kept(2) == [ask.Drop(7), ask.Open(2, 1)]


def test_what_comes_to_nothing_in_the_middle_of_a_step_ends_there_and_keeps_no_call_waiting(trainer: Trainer, tmp_path: Path) -> None:
    replica, twin, replies = trainer.replica, small_replica(tmp_path, trainer.replica.manifest), list[ask.Answer]()
    for one in (replica, twin):
        while not (due := one.countdown.tick()):
            pass
        one.inner_step()
    twin.handle(ask.Solo(due[0]))

    def call(*_: object) -> None:
        trainer.ask(ask.Open(1, due[0]))
        replies.append(trainer.reply())
        trainer.ask(ask.Drop(1), ask.Solo(due[0]))
        trainer.ask(ask.Open(2, due[0]))
        replies.append(trainer.reply())

    hook = replica.model.register_forward_hook(call)
    replica.inner_step()
    hook.remove()
    tokens = replica.tokens // 2  # of a step
    assert replies == [ask.Opened(1, tokens, 1, RunPhase.TRAIN), ask.Opened(2, 0, 1, RunPhase.TRAIN)] and not trainer.thread.take()
    state = replica.outer.fragments[due[0]]
    assert state.since.steps == 1 and due[0] not in replica.countdown.due()
    assert torch.equal(state.slow, twin.outer.fragments[due[0]].slow), "the step alone is not that of the weights before"


def test_the_node_is_answered_while_weights_are_read_and_what_it_decides_moves_them_afterwards(tmp_path: Path) -> None:
    replica, partner = small_replica(tmp_path / "me", small_manifest()), small_replica(tmp_path / "you", small_manifest(), b"you")
    for one in (replica, partner):
        one.inner_step()
    assert replica.answer_beside(ask.Open(9, 1)) is None, "the trainer's own thread may be changing them"
    exchange((replica_side(replica, tmp_path / "me"), replica_side(partner, tmp_path / "you")), Terms())
    replica.handle(ask.Check(1))
    before = replica.outer.fragments[0].fast()
    with replica.reading():
        assert replica.answer_beside(ask.Open(9, 1)) == (ask.Opened(9, replica.tokens, 1, RunPhase.TRAIN),)
        assert replica.answer_beside(ask.Apply(1, NAME, "")) == (ask.Applied(1),)
        assert torch.equal(gather(replica.outer.fragments[0].codec.fragment, replica.parameters), before)
    assert not torch.equal(gather(replica.outer.fragments[0].codec.fragment, replica.parameters), before)


def test_a_meeting_decided_in_the_middle_of_a_step_counts_there_and_moves_the_model_behind_it(trainer: Trainer, tmp_path: Path) -> None:
    def met(replica: Replica, folder: Path) -> Replica:
        partner = small_replica(folder / "partner", replica.manifest, b"you")
        for one in (replica, partner):
            one.inner_step()
        exchange((replica_side(replica, folder / "payloads"), replica_side(partner, folder / "partner")), Terms())
        replica.handle(ask.Check(1))
        return replica

    replica, replies = trainer.replica, list[ask.Answer]()
    later, sooner = (met(small_replica(tmp_path / name / "payloads", replica.manifest), tmp_path / name) for name in ("later", "sooner"))
    met(replica, trainer.runtime)

    def decide(*_: object) -> None:
        trainer.ask(ask.Apply(1, NAME, ""))
        replies.append(trainer.reply())
        trainer.ask(ask.Open(2, 0))
        replies.append(trainer.reply())

    hook = replica.model.register_forward_hook(decide)
    replica.inner_step()
    hook.remove()
    assert isinstance(replies[1], ask.Opened) and replies[0] == ask.Applied(1) and not trainer.thread.take()

    later.inner_step()
    later.handle(ask.Apply(1, NAME, ""))
    for name, tensor in later.tensors().items():
        assert torch.equal(tensor, replica.tensors()[name]), f"{name}: the gradient was not that of the weights before"
    sooner.handle(ask.Apply(1, NAME, ""))
    sooner.handle(ask.Open(2, 0))
    prepare = ask.Prepare(2, 100, 0, 7, RunPhase.TRAIN)
    trainer.ask(prepare)
    assert trainer.reply() == sooner.handle(prepare), "the next meeting's snapshot is not that of the meeting before"


def test_a_partners_clock_that_ends_the_schedule_in_the_middle_of_a_step_ends_it_there(trainer: Trainer, tmp_path: Path) -> None:
    replica, total_steps = trainer.replica, trainer.replica.manifest.run.total_steps
    partner = small_replica(tmp_path, replica.manifest, b"you")
    replica.clock_steps, replica.own_steps, partner.clock_steps = total_steps - 1, total_steps - 1, total_steps
    for one in (replica, partner):
        one.outer.count(100)
    exchange((replica_side(replica, trainer.runtime / "payloads"), replica_side(partner, tmp_path)), Terms())
    replica.handle(ask.Check(1))

    def decide(*_: object) -> None:
        trainer.ask(ask.Apply(1, NAME, ""))
        assert trainer.reply() == ask.Applied(1)
        assert replica.clock_steps == total_steps

    hook = replica.model.register_forward_hook(decide)
    replica.inner_step()
    hook.remove()
    assert replica.clock_steps == total_steps and replica.phase is RunPhase.FINISH


def test_an_impossible_apply_is_answered_at_the_boundary(trainer: Trainer, tmp_path: Path) -> None:
    partner = replica_side(small_replica(tmp_path, trainer.replica.manifest, b"you"), tmp_path)
    exchange((replica_side(trainer.replica, trainer.runtime / "payloads"), partner), Terms())
    trainer.replica.handle(ask.Check(1))
    trainer.ask(ask.Apply(1, NAME, "ff" * 99))  # a bitmap of another size
    trainer.boundary()
    assert isinstance(trainer.reply(), ask.Unavailable)
    trainer.ask(ask.Apply(1, NAME, ""))
    trainer.boundary()
    assert trainer.reply() == ask.Applied(1)


def test_the_trainer_steps_while_a_message_is_coded(trainer: Trainer) -> None:
    gate = trainer.gate()
    trainer.prepare(gate)
    for _ in range(3):
        trainer.replica.inner_step()
        assert trainer.thread.take() == []
    gate.door.set()
    assert isinstance(trainer.reply(), ask.PayloadReady)


def test_adopting_a_donors_state_waits_for_the_coding_and_leaves_nothing_of_it(trainer: Trainer) -> None:
    gate = trainer.gate()
    trainer.prepare(gate)
    dropping = threading.Thread(target=trainer.replica.lose_node)  # as adopting does first
    dropping.start()
    dropping.join(0.1)
    assert dropping.is_alive(), "it was dropped under the coding thread's hands"
    gate.door.set()
    dropping.join(20)
    assert isinstance(trainer.reply(), ask.PayloadReady)
    assert not trainer.payloads.read(payload_name(1, File.OWN_PAYLOAD))
    assert trainer.replica.outer.fragments[0].meeting is None
    trainer.ask(ask.Check(1))
    assert isinstance(trainer.reply(), ask.Unavailable)


def test_a_node_that_dies_is_heard_out_and_its_successor_gets_no_reply_of_its(trainer: Trainer) -> None:
    trainer.ask(ask.Open(1, 0))
    trainer.node.close()
    trainer.node = trainer.come()
    batches: list[Batch] = []
    while sum(1 for batch in batches if batch.session == 2) == 0:
        trainer.thread.wait(20)
        batches += trainer.thread.take()
    assert batches == [Batch(1, (ask.Open(1, 0),)), Batch(0, ()), Batch(2, ())]
    reply = trainer.replica.handle(ask.Open(1, 0))
    assert isinstance(reply, ask.Opened)
    trainer.link.send(reply, 1)
    trainer.link.send(ask.Due(2, RunPhase.TRAIN), 2)
    assert trainer.reply() == ask.Due(2, RunPhase.TRAIN)


def test_a_bug_in_the_thread_is_raised_in_the_trainer(trainer: Trainer) -> None:
    gate = trainer.gate()
    gate.bug = RuntimeError("ours")
    gate.door.set()
    trainer.ask(ask.Open(1, 0))
    trainer.boundary()
    trainer.ask(ask.Prepare(1, 100, 0, 7, RunPhase.TRAIN))
    with pytest.raises(RuntimeError, match="ours"):
        trainer.taken()


def test_closing_ends_the_thread_and_frees_the_socket(trainer: Trainer) -> None:
    trainer.thread.close()
    assert all(thread.name != "coding" for thread in threading.enumerate())
    assert not (trainer.runtime / SOCKET_NAME).exists()
    assert trainer.node.recv(1) == b""


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU here")
def test_beside_a_gpu_that_is_behind_its_host_a_meeting_begins_with_the_weights_behind_the_step(tmp_path: Path) -> None:
    def sketch(name: str, is_behind: bool) -> ask.Reply | None:
        replica = small_replica(tmp_path / name, small_manifest(codec={"name": "modulo4"}), device="cuda")
        square = torch.ones((8192, 8192), device="cuda")
        for _ in range(20 if is_behind else 0):  # a tenth of a second and more
            square = (square @ square).clamp_(max=1.0)
        with torch.no_grad():
            for parameter in replica.parameters.values():
                parameter.add_(square[0, 0])
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        with replica.reading():
            assert isinstance((replica.answer_beside(ask.Open(1, 0), stream) or ())[0], ask.Opened)
        torch.cuda.synchronize()
        return replica.handle(ask.Prepare(1, 100, 0, 7, RunPhase.TRAIN))

    behind = sketch("behind", is_behind=True)
    assert isinstance(behind, ask.SketchReady) and behind == sketch("waited", is_behind=False)
