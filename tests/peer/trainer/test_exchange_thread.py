"""The exchange's thread, over the real link, against a node that the test plays on a bare socket. The test is the training loop."""

from __future__ import annotations

import contextlib
import random
import select
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from gossamer.optim.fragment_codec import FragmentCodec, FragmentEncoded
from gossamer.optim.fragments import gather
from gossamer.peer.link import messages
from gossamer.peer.link.messages import File, payload_name
from gossamer.peer.link.payload_folder import PayloadFolder
from gossamer.peer.link.socket import SOCKET_NAME, TrainerEnd
from gossamer.peer.trainer.exchange import TrainerExchange
from gossamer.protocol.messages.messages import RunPhase
from tests.peer.exchange import Side, Terms, exchange, meet, replica_side
from tests.peer.small import DEVICE, AskedReplica, ignored, small_manifest, small_replica

NAME = "ab" * 16
NO_MEETING = "no such meeting here: the trainer or the link was restarted"


class Gate(FragmentCodec):
    """A codec that waits for the release before it encodes."""

    def __init__(self, inner: FragmentCodec) -> None:
        super().__init__(inner.fragment, inner.codec)
        self.entered, self.released = threading.Event(), threading.Event()
        self.bug: RuntimeError | None = None

    def encode(self, message: Tensor, seed: int, own_sketch: Tensor, partner_sketch: Tensor) -> FragmentEncoded:
        self.entered.set()
        assert self.released.wait(20)
        if self.bug is not None:
            raise self.bug
        return super().encode(message, seed, own_sketch, partner_sketch)


class Trainer:
    """A replica and its exchange, with a node at the other end."""

    def __init__(self, runtime: Path, codec: str = "int8", device: str = DEVICE) -> None:
        self.payloads = PayloadFolder(runtime / "payloads")
        self.replica = small_replica(runtime / "payloads", small_manifest(codec={"name": codec}), device=device)
        self.exchange = TrainerExchange(TrainerEnd(runtime), self.payloads, self.replica, ignored, random.Random(0))
        self.replica.exchange = self.exchange
        self.exchange.start()
        self.runtime = runtime
        self.node = self.come()

    def come(self) -> socket.socket:
        node = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        node.settimeout(20)
        node.connect(str(self.runtime / SOCKET_NAME))
        return node

    def greet(self) -> None:
        """Read what a new node is told first."""
        assert isinstance(self.reply(), messages.Built) and isinstance(self.reply(), messages.Progress)

    def ask(self, *requests: messages.Request) -> None:
        self.node.sendall(b"".join(map(messages.REQUESTS.write, requests)))

    def reply(self) -> messages.Answer:
        line = b""
        while not line.endswith(b"\n"):
            line += self.node.recv(1)
        return messages.ANSWERS.read(line)

    def write_result(self) -> None:
        """Wait until the thread has read all that was asked, and see that it has answered nothing: the next reply is that of the last."""
        self.ask(messages.Check(77))
        assert self.reply() == messages.Unavailable(77, NO_MEETING)

    def boundary(self) -> list[object]:
        """Do as the training loop does between two inner steps."""
        self.exchange.has_news.wait(20)
        return list(self.exchange.at_boundary())

    def step(self, call: Callable[[], None]) -> None:
        """Make an inner step in which something is asked while its gradient is computed."""
        hook = self.replica.program.model.register_forward_hook(lambda *_: call())
        self.replica.inner_step(self.exchange.while_weights_are_read())
        hook.remove()

    def gate(self, fragment: int = 0) -> Gate:
        state = self.replica.fragments[fragment]
        state.codec = gate = Gate(state.codec)
        return gate

    def prepare(self, gate: Gate) -> None:
        """Open a meeting, and have its message encoded up to the release."""
        self.ask(messages.Open(1, 0))
        self.boundary()
        self.reply()
        self.ask(messages.Prepare(1, 100, 0, 7, RunPhase.TRAIN))
        assert gate.entered.wait(20)

    def close(self) -> None:
        self.node.close()
        self.exchange.close()


@contextlib.contextmanager
def linked(*special: str) -> Iterator[Trainer]:
    with tempfile.TemporaryDirectory(prefix="exchange-") as runtime:
        one = Trainer(Path(runtime), *special)
        assert one.boundary() == []
        one.greet()
        yield one
        one.close()


@pytest.fixture
def trainer() -> Iterator[Trainer]:
    with linked() as one:
        yield one


def test_a_whole_meeting_needs_two_boundaries_and_ends_as_one_between_steps(trainer: Trainer, tmp_path: Path) -> None:
    manifest, state = trainer.replica.manifest, trainer.replica.fragments[0]
    twin, partner = (small_replica(tmp_path / name, manifest, peer) for name, peer in (("twin", b"me"), ("partner", b"you")))
    for replica in (trainer.replica, twin, partner):
        replica.inner_step()
    alone = replica_side(partner, tmp_path / "partner")

    trainer.ask(messages.Open(1, 0))
    trainer.write_result()
    assert state.meeting is None
    trainer.boundary()
    own = trainer.reply()
    assert isinstance(own, messages.Opened) and state.meeting == 1

    def answer(request: messages.MeetingRequest) -> messages.Reply:
        if isinstance(request, messages.Open):
            return own
        window = trainer.exchange.while_weights_are_read() if isinstance(request, messages.Check) else contextlib.nullcontext()
        with window:
            trainer.ask(request)
            reply = trainer.reply()  # and no boundary came
        assert isinstance(reply, messages.PayloadReady | messages.Checked)
        return reply

    exchange((Side(answer, trainer.payloads), alone), Terms())
    mine, theirs = answer(messages.Check(1)), alone.answer(messages.Check(1))
    assert isinstance(mine, messages.Checked) and isinstance(theirs, messages.Checked) and mine.accepted and theirs.accepted
    assert mine.gain is not None and theirs.gain is not None and mine.failed_blocks == theirs.failed_blocks
    trainer.ask(messages.Apply(1, NAME, ""))
    trainer.write_result()
    assert not trainer.replica.applied
    trainer.boundary()
    assert trainer.reply() == messages.Applied(1)

    other = small_replica(tmp_path / "other", manifest, b"you")
    other.inner_step()
    meet((replica_side(twin, tmp_path / "twin"), replica_side(other, tmp_path / "other")), Terms())
    for name, tensor in twin.kept().tensors.items():
        assert torch.equal(tensor, trainer.replica.kept().tensors[name]), name


def test_what_needs_a_boundary_waits_for_one_in_its_order(trainer: Trainer) -> None:
    fragments = trainer.replica.fragments
    trainer.ask(messages.Open(1, 0), messages.Open(2, 1), messages.Drop(1))
    trainer.ask(messages.Apply(9, NAME, "zz"), messages.Solo(2), messages.Start(), messages.Open(3, 0))
    trainer.write_result()
    assert all(state.meeting is None for state in fragments)
    assert trainer.boundary() == [messages.Start()], "the training loop acts upon this one"
    replies = [trainer.reply() for _ in range(4)]
    opened = messages.Opened(1, 0, 0, RunPhase.TRAIN), messages.Opened(2, 0, 0, RunPhase.TRAIN), messages.Opened(3, 0, 0, RunPhase.TRAIN)
    assert replies == [opened[0], opened[1], messages.Unavailable(9, NO_MEETING), opened[2]]
    assert [state.meeting for state in fragments] == [3, 2, None]


def test_a_call_in_the_middle_of_a_step_is_answered_there_with_the_weights_before_it(trainer: Trainer, tmp_path: Path) -> None:
    replica, twin, replies = trainer.replica, small_replica(tmp_path, trainer.replica.manifest), list[messages.Answer]()
    prepare, report = messages.Prepare(1, 100, 0, 7, RunPhase.TRAIN), messages.NodeReport(1e6, 0.5)
    assert twin.handle(messages.Open(1, 0)) == messages.Opened(1, 0, 0, RunPhase.TRAIN)
    expected = twin.handle(prepare)

    def call() -> None:
        trainer.ask(report, messages.Open(1, 0))  # it comes every other second: a long step has always heard one
        replies.append(trainer.reply())

    trainer.step(call)
    assert replies == [messages.Opened(1, 0, 0, RunPhase.TRAIN)], "no token of the step that is under way counts"
    assert replica.own_steps == 1 and trainer.exchange.report == report
    trainer.ask(prepare)
    assert trainer.reply() == expected, "the hash of what is sent"


def test_a_call_in_the_middle_of_a_step_waits_behind_what_came_before_it(trainer: Trainer) -> None:
    trainer.ask(messages.Drop(7))
    trainer.write_result()

    def call() -> None:
        trainer.ask(messages.Open(2, 1))
        trainer.write_result()

    trainer.step(call)
    trainer.write_result()
    trainer.boundary()
    assert trainer.reply() == messages.Opened(2, trainer.replica.tokens, 1, RunPhase.TRAIN, own_steps=1), "it was answered at the boundary"


def test_what_comes_to_nothing_in_the_middle_of_a_step_ends_there_and_keeps_no_call_waiting(trainer: Trainer, tmp_path: Path) -> None:
    replica, twin, replies = trainer.replica, small_replica(tmp_path, trainer.replica.manifest), list[messages.Answer]()
    for one in (replica, twin):
        while not (due := one.countdown.tick()):
            pass
        one.inner_step()
    twin.handle(messages.Solo(due[0]))

    def call() -> None:
        trainer.ask(messages.Open(1, due[0]))
        replies.append(trainer.reply())
        trainer.ask(messages.Drop(1), messages.Solo(due[0]))
        trainer.ask(messages.Open(2, due[0]))
        replies.append(trainer.reply())

    trainer.step(call)
    tokens = replica.tokens // 2  # of a step
    assert replies == [messages.Opened(1, tokens, 1, RunPhase.TRAIN, 1), messages.Opened(2, 0, 1, RunPhase.TRAIN, 1)]
    state = replica.fragments[due[0]]
    assert state.since.steps == 1 and due[0] not in replica.countdown.due()
    assert torch.equal(state.slow, twin.fragments[due[0]].slow), "the step alone is not that of the weights before"


def judged(replica: AskedReplica, payloads: Path, partner: Path) -> None:
    """Bring a meeting of a replica's first fragment to where it can be applied."""
    other = small_replica(partner, replica.manifest, b"you")
    for one in (replica, other):
        one.inner_step()
    exchange((replica_side(replica, payloads), replica_side(other, partner)), Terms())
    replica.handle(messages.Check(1))


def test_the_node_is_answered_while_weights_are_read_and_what_it_decides_moves_them_afterwards(trainer: Trainer, tmp_path: Path) -> None:
    replica = trainer.replica
    judged(replica, trainer.runtime / "payloads", tmp_path)
    fragment, before = replica.fragments[0].codec.fragment, replica.fragments[0].fast()
    with trainer.exchange.while_weights_are_read():
        trainer.ask(messages.Open(9, 1), messages.Apply(1, NAME, ""))
        assert trainer.reply() == messages.Opened(9, replica.tokens, 1, RunPhase.TRAIN, own_steps=1)
        assert trainer.reply() == messages.Applied(1)
        assert torch.equal(gather(fragment, replica.parameters), before)
    replica.move_fast_weights()
    assert not torch.equal(gather(fragment, replica.parameters), before)


class WatchedLock:
    """A lock that is held, and tells when somebody waits for it, however long."""

    def __init__(self, lock: threading.Lock) -> None:
        self.release = lock.release
        self.is_wanted = threading.Event()
        self._lock = lock

    def acquire(self, *, timeout: float = -1.0) -> bool:
        if timeout > 0.0:
            self.is_wanted.set()
        return self._lock.acquire(timeout=20.0 if timeout else 0.0)


def test_a_loss_is_measured_beside_the_next_gradient(trainer: Trainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the boundary it would keep the trainer from training."""
    lock = WatchedLock(trainer.exchange._weights)
    monkeypatch.setattr(trainer.exchange, "_weights", lock)
    replica, partner = trainer.replica, small_replica(tmp_path, trainer.replica.manifest, b"you")
    exchange((replica_side(replica, trainer.runtime / "payloads"), replica_side(partner, tmp_path)), Terms())
    trainer.exchange.has_begun = True
    trainer.ask(messages.Check(1), messages.Check(77))
    assert lock.is_wanted.wait(20)
    with trainer.exchange.while_weights_are_read():
        reply = trainer.reply()
        assert isinstance(reply, messages.Checked) and reply.gain is not None
        assert trainer.reply() == messages.Unavailable(77, NO_MEETING), "it overtook"


def test_a_loss_is_measured_at_the_boundary_where_nothing_is_trained(trainer: Trainer, tmp_path: Path) -> None:
    partner = small_replica(tmp_path, trainer.replica.manifest, b"you")
    exchange((replica_side(trainer.replica, trainer.runtime / "payloads"), replica_side(partner, tmp_path)), Terms())
    trainer.ask(messages.Check(1))
    trainer.boundary()
    assert isinstance(trainer.reply(), messages.Checked)


def test_a_merge_that_is_to_be_measured_waits_for_the_boundary(trainer: Trainer, tmp_path: Path) -> None:
    judged(trainer.replica, trainer.runtime / "payloads", tmp_path)
    trainer.exchange.measures_next = True
    with trainer.exchange.while_weights_are_read():
        trainer.ask(messages.Apply(1, NAME, ""))
        trainer.write_result()
    trainer.boundary()
    assert trainer.reply() == messages.Applied(1) and not trainer.exchange.measures_next


@pytest.mark.parametrize("call", [0, 1], ids=["before the merge", "after it"])
def test_a_request_that_ctrl_c_breaks_off_is_answered_at_the_next_boundary(
    trainer: Trainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: int
) -> None:
    judged(trainer.replica, trainer.runtime / "payloads", tmp_path)
    judged(twin := small_replica(tmp_path / "twin", trainer.replica.manifest), tmp_path / "twin", tmp_path / "other")
    twin.handle(messages.Apply(1, NAME, ""))
    calls = iter(range(9))

    def outputs() -> Tensor:
        if next(calls) == call:
            raise KeyboardInterrupt
        return torch.zeros(1, 1)

    monkeypatch.setattr(trainer.replica.program, "outputs", outputs)
    trainer.exchange.measures_next = True
    trainer.ask(messages.Apply(1, NAME, ""), messages.Drop(5))
    with pytest.raises(KeyboardInterrupt):
        trainer.boundary()
    assert not list(trainer.exchange.at_boundary())
    assert trainer.reply() == messages.Applied(1)
    assert torch.equal(trainer.replica.fragments[0].slow, twin.fragments[0].slow), "merged once"


def test_a_program_without_outputs_merges_beside_the_step_again(trainer: Trainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    judged(trainer.replica, trainer.runtime / "payloads", tmp_path)
    monkeypatch.setattr(trainer.replica.program, "outputs", lambda: None)
    trainer.exchange.measures_next = True
    trainer.ask(messages.Apply(1, NAME, ""))
    trainer.boundary()
    assert trainer.reply() == messages.Applied(1) and not trainer.exchange.measures_next


def test_a_call_sooner_than_the_line_carries_it_is_refused(trainer: Trainer) -> None:
    trainer.replica.inner_step()
    trainer.exchange.min_call_steps = 2
    too_soon = trainer.replica.handle(messages.Open(1, 0))
    assert isinstance(too_soon, messages.Unavailable) and "line" in too_soon.reason
    trainer.replica.inner_step()
    assert isinstance(trainer.replica.handle(messages.Open(1, 0)), messages.Opened)


def test_a_meeting_decided_in_the_middle_of_a_step_counts_there_and_moves_the_model_behind_it(trainer: Trainer, tmp_path: Path) -> None:
    replica, replies = trainer.replica, list[messages.Answer]()
    later, sooner = (small_replica(tmp_path / name / "payloads", replica.manifest) for name in ("later", "sooner"))
    for one, folder in ((replica, trainer.runtime), (later, tmp_path / "later"), (sooner, tmp_path / "sooner")):
        judged(one, folder / "payloads", folder / "partner")

    def decide() -> None:
        trainer.ask(messages.Apply(1, NAME, ""))
        replies.append(trainer.reply())
        trainer.ask(messages.Open(2, 0))
        replies.append(trainer.reply())

    trainer.step(decide)
    assert isinstance(replies[1], messages.Opened) and replies[0] == messages.Applied(1)

    later.inner_step()
    later.handle(messages.Apply(1, NAME, ""))
    for name, tensor in later.kept().tensors.items():
        assert torch.equal(tensor, replica.kept().tensors[name]), f"{name}: the gradient was not that of the weights before"
    sooner.handle(messages.Apply(1, NAME, ""))
    sooner.handle(messages.Open(2, 0))
    prepare = messages.Prepare(2, 100, 0, 7, RunPhase.TRAIN)
    trainer.ask(prepare)
    assert trainer.reply() == sooner.handle(prepare), "the next meeting's snapshot is not that of the meeting before"


def test_a_partners_clock_that_ends_the_schedule_in_the_middle_of_a_step_ends_it_there(trainer: Trainer, tmp_path: Path) -> None:
    replica, total_steps = trainer.replica, trainer.replica.manifest.run.total_steps
    partner = small_replica(tmp_path, replica.manifest, b"you")
    replica.inner_step()
    replica.global_step, replica.own_steps, partner.global_step = total_steps - 1, total_steps - 1, total_steps
    for one in (replica, partner):
        one.count(100)
    exchange((replica_side(replica, trainer.runtime / "payloads"), replica_side(partner, tmp_path)), Terms())
    replica.handle(messages.Check(1))

    def decide() -> None:
        trainer.ask(messages.Apply(1, NAME, ""))
        assert trainer.reply() == messages.Applied(1)
        assert replica.global_step == total_steps

    trainer.step(decide)
    assert replica.global_step == total_steps and replica.phase is RunPhase.FINISH


def test_an_impossible_apply_is_answered_at_the_boundary(trainer: Trainer, tmp_path: Path) -> None:
    partner = replica_side(small_replica(tmp_path, trainer.replica.manifest, b"you"), tmp_path)
    exchange((replica_side(trainer.replica, trainer.runtime / "payloads"), partner), Terms())
    trainer.replica.handle(messages.Check(1))
    trainer.ask(messages.Apply(1, NAME, "ff" * 99))  # a bitmap of another size
    trainer.boundary()
    assert isinstance(trainer.reply(), messages.Unavailable)
    trainer.ask(messages.Apply(1, NAME, ""))
    trainer.boundary()
    assert trainer.reply() == messages.Applied(1)


def test_the_trainer_steps_while_a_message_is_coded(trainer: Trainer) -> None:
    gate = trainer.gate()
    trainer.prepare(gate)
    for _ in range(3):
        trainer.replica.inner_step(trainer.exchange.while_weights_are_read())
        assert list(trainer.exchange.at_boundary()) == []
    gate.released.set()
    assert isinstance(trainer.reply(), messages.PayloadReady)


def test_adopting_a_state_waits_for_the_coding_and_discards_it(trainer: Trainer) -> None:
    gate = trainer.gate()
    trainer.prepare(gate)
    dropping = threading.Thread(target=trainer.exchange.drop_all)  # as adopting does first
    dropping.start()
    dropping.join(0.1)
    assert dropping.is_alive(), "it was dropped while the other thread coded"
    gate.released.set()
    dropping.join(20)
    assert isinstance(trainer.reply(), messages.PayloadReady)
    assert not trainer.payloads.read(payload_name(1, File.OWN_PAYLOAD))
    assert trainer.replica.fragments[0].meeting is None
    trainer.ask(messages.Check(1))
    assert isinstance(trainer.reply(), messages.Unavailable)


def test_requests_of_a_dead_node_are_carried_out_and_its_successor_gets_no_reply(trainer: Trainer) -> None:
    trainer.ask(messages.Open(1, 0), messages.Start())
    trainer.node.close()
    trainer.node, acted = trainer.come(), list[object]()
    while not select.select([trainer.node], [], [], 0)[0]:
        acted += trainer.boundary()
    assert acted == [messages.Start()]
    trainer.greet()
    assert trainer.replica.fragments[0].meeting is None
    trainer.write_result()


def test_a_bug_in_the_thread_is_raised_in_the_trainer(trainer: Trainer) -> None:
    gate = trainer.gate()
    gate.bug = RuntimeError("ours")
    gate.released.set()
    trainer.ask(messages.Open(1, 0))
    trainer.boundary()
    trainer.ask(messages.Prepare(1, 100, 0, 7, RunPhase.TRAIN))
    with pytest.raises(RuntimeError, match="ours"):
        trainer.boundary()


def test_the_node_has_the_reply_about_a_result_only_once_the_loop_has_saved_it(trainer: Trainer) -> None:
    trainer.ask(messages.WriteResult("copy-result"))
    trainer.exchange.has_news.wait(20)
    boundary = trainer.exchange.at_boundary()
    assert next(boundary) == messages.WriteResult("copy-result")
    assert not select.select([trainer.node], [], [], 0)[0], "the loop is still saving"
    assert list(boundary) == []
    assert trainer.reply() == messages.Written("copy-result", "") and isinstance(trainer.reply(), messages.Progress)


def test_closing_ends_the_thread_and_frees_the_socket(trainer: Trainer) -> None:
    trainer.exchange.close()
    assert all(thread.name != "exchange" for thread in threading.enumerate())
    assert not (trainer.runtime / SOCKET_NAME).exists()
    assert trainer.node.recv(1) == b""


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU here")
def test_beside_a_gpu_that_is_behind_its_host_a_meeting_begins_with_the_weights_behind_the_step() -> None:
    def sketch(is_behind: bool) -> messages.Answer:
        with linked("modulo4", "cuda") as trainer:
            square = torch.ones((8192, 8192), device="cuda")
            for _ in range(20 if is_behind else 0):  # a tenth of a second and more
                square = (square @ square).clamp_(max=1.0)
            with torch.no_grad():
                for parameter in trainer.replica.parameters.values():
                    parameter.add_(square[0, 0])
            with trainer.exchange.while_weights_are_read():
                trainer.ask(messages.Open(1, 0), messages.Prepare(1, 100, 0, 7, RunPhase.TRAIN))
                assert isinstance(trainer.reply(), messages.Opened)
            return trainer.reply()

    behind = sketch(is_behind=True)
    assert isinstance(behind, messages.SketchReady) and behind == sketch(is_behind=False)
