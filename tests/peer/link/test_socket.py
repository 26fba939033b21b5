from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import uvloop

from gossamer.peer.link import messages
from gossamer.peer.link import socket as link
from gossamer.peer.link.socket import SOCKET_NAME, LinkLost, NodeEnd, TrainerEnd
from gossamer.protocol import limits
from gossamer.protocol.errors import GossamerError
from gossamer.protocol.messages.messages import RunPhase
from gossamer.protocol.messages.terms import FragmentTerms, ModelPlan, StageTerms
from gossamer.protocol.tasks import cancel
from tests.peer.waiting import eventually

pytestmark = pytest.mark.real_time

UNASKED = messages.ANSWERS.write(messages.Applied(1))
PLAN = ModelPlan(16, (FragmentTerms(0, 1000, 0), FragmentTerms(64, 900, 20)), 800)
PROGRESS = messages.Progress(5, RunPhase.TRAIN, True)


class Pair:
    """Both ends in one loop: the trainer's is polled by the test, as a trainer does between steps."""

    def __init__(self, folder: Path) -> None:
        self.notices: list[messages.TrainerReport] = []
        self.trainer = TrainerEnd(folder)
        self.node = NodeEnd(folder)
        self.asked: list[messages.Request] = []
        self.greeted = 0  # the last session that was told the plan

    def poll(self) -> list[messages.Request]:
        self.asked += self.trainer.poll()
        if self.trainer.session != self.greeted:
            self.greeted = self.trainer.session
            self.trainer.send(messages.Built(PLAN), self.greeted)
        return self.asked

    async def requests(self, number: int) -> list[messages.Request]:
        await eventually(lambda: len(self.poll()) >= number, f"{number} requests")
        return self.asked


async def kept(node: NodeEnd, on_report: Callable[[messages.TrainerReport], None], plan: ModelPlan = PLAN) -> None:
    assert await node.connect() == plan
    await node.run(on_report)


@contextlib.asynccontextmanager
async def connected(folder: Path) -> AsyncIterator[Pair]:
    pair = Pair(folder)
    running = asyncio.create_task(kept(pair.node, pair.notices.append))
    try:
        await eventually(lambda: pair.poll() or (pair.trainer.session and pair.node.connected), "connection")
        yield pair
    finally:
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running
        pair.trainer.close()


@pytest.fixture
def pair(folder: Path) -> contextlib.AbstractAsyncContextManager[Pair]:
    return connected(folder)


@pytest.mark.parametrize("step", [1, -1])
async def test_replies_find_their_requests_in_whatever_order(step: int, pair: Pair) -> None:
    waiting = [asyncio.create_task(pair.node.request(messages.Open(number, 0))) for number in range(20)]
    for request in (await pair.requests(20))[::step]:
        assert isinstance(request, messages.Open)
        pair.trainer.send(messages.Opened(request.meeting, 10 * request.meeting, 1, RunPhase.TRAIN), pair.trainer.session)
    replies = await asyncio.gather(*waiting)
    assert replies == [messages.Opened(number, 10 * number, 1, RunPhase.TRAIN) for number in range(20)]


async def test_notices_come_between_replies(pair: Pair) -> None:
    waiting = asyncio.create_task(pair.node.request(messages.Check(1)))
    await pair.requests(1)
    pair.trainer.send(messages.Due(2, RunPhase.TRAIN), pair.trainer.session)
    pair.trainer.send(messages.Checked(1, True, "", ""), pair.trainer.session)
    pair.trainer.send(PROGRESS, pair.trainer.session)
    assert await waiting == messages.Checked(1, True, "", "")
    await eventually(lambda: pair.notices == [messages.Due(2, RunPhase.TRAIN), PROGRESS], "notices")


async def test_what_has_no_reply_keeps_its_place(pair: Pair) -> None:
    pair.node.notify(messages.Drop(1))
    waiting = asyncio.create_task(pair.node.request(messages.Open(2, 0)))
    await asyncio.sleep(0)
    pair.node.notify(messages.Solo(0))
    assert await pair.requests(3) == [messages.Drop(1), messages.Open(2, 0), messages.Solo(0)]
    pair.trainer.send(messages.Unavailable(2, "busy"), pair.trainer.session)
    assert await waiting == messages.Unavailable(2, "busy")


async def test_a_cancelled_request_does_not_take_anothers_reply(pair: Pair) -> None:
    first = asyncio.create_task(pair.node.request(messages.Check(1)))
    second = asyncio.create_task(pair.node.request(messages.Check(2)))
    await pair.requests(2)
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    pair.trainer.send(messages.Checked(1, False, "no", ""), pair.trainer.session)
    pair.trainer.send(messages.Checked(2, True, "", ""), pair.trainer.session)
    assert await second == messages.Checked(2, True, "", "")


async def test_one_request_at_a_time_may_be_about_a_meeting(pair: Pair) -> None:
    first = asyncio.create_task(pair.node.request(messages.Check(1)))
    await pair.requests(1)
    with pytest.raises(ValueError, match="earlier request"):
        await pair.node.request(messages.Check(1))
    pair.trainer.send(messages.Checked(1, True, "", ""), pair.trainer.session)
    assert await first == messages.Checked(1, True, "", "")


async def test_the_trainer_going_away_fails_every_request(pair: Pair) -> None:
    waiting = [asyncio.create_task(pair.node.request(messages.Check(number))) for number in range(3)]
    await pair.requests(3)
    pair.trainer.close()
    for request in waiting:
        with pytest.raises(LinkLost):
            await request
    assert not pair.node.connected
    with pytest.raises(LinkLost):
        await pair.node.request(messages.Check(9))
    pair.node.notify(messages.Drop(9))  # nobody hears it


@pytest.mark.real_time(loop_factory=uvloop.new_event_loop)  # as in the node process: its closed transports raise on write
async def test_a_node_may_send_to_a_trainer_that_has_just_gone(folder: Path) -> None:
    trainer, node = TrainerEnd(folder), NodeEnd(folder)
    connecting = asyncio.create_task(node.connect())
    await eventually(lambda: trainer.poll() or trainer.session, "a session")
    trainer.send(messages.Built(PLAN), trainer.session)
    await connecting
    trainer.close()
    while node.connected:  # nobody reads yet: only writing notices that the trainer has gone
        node.notify(messages.Drop(1))
        await asyncio.sleep(0)
    node.notify(messages.Drop(1))
    with pytest.raises(LinkLost):
        await node.request(messages.Check(1))


async def test_the_node_finds_the_next_trainer(folder: Path, pair: Pair) -> None:
    pair.trainer.close()
    await eventually(lambda: not pair.node.connected, "loss")
    pair.trainer, pair.greeted = TrainerEnd(folder), 0
    pair.trainer.send(PROGRESS, 1)  # to nobody
    await eventually(lambda: pair.poll() or pair.node.connected, "the next trainer")
    waiting = asyncio.create_task(pair.node.request(messages.Open(1, 0)))
    assert await pair.requests(1) == [messages.Open(1, 0)]
    pair.trainer.send(messages.Unavailable(1, "just started"), pair.trainer.session)
    assert await waiting == messages.Unavailable(1, "just started")
    assert not pair.notices


@pytest.mark.parametrize("before", [b"", messages.ANSWERS.write(messages.Built(PLAN))], ids=["at first", "later"])
@pytest.mark.parametrize("data", [b"garbage\n", b"x" * (link.LINE_BYTES + 2), UNASKED, b'{"record":"Dru'])
async def test_the_node_leaves_a_trainer_that_makes_no_sense_and_comes_back(folder: Path, data: bytes, before: bytes) -> None:
    came: asyncio.Queue[asyncio.StreamWriter] = asyncio.Queue()
    server = await asyncio.start_unix_server(lambda _, writer: came.put_nowait(writer), path=str(folder / SOCKET_NAME))
    running = asyncio.create_task(kept(NodeEnd(folder), lambda _: None))
    first = await came.get()
    first.write(before + data)
    if data.endswith(b"u"):
        first.close()  # the trainer died in the middle of a line
    again = await came.get()
    assert not running.done()
    running.cancel()
    for writer in (first, again):
        writer.close()
    server.close()
    await server.wait_closed()
    with contextlib.suppress(asyncio.CancelledError):
        await running


async def test_the_next_node_finds_the_trainer_in_a_folder_that_was_removed_and_made_again(folder: Path, pair: Pair) -> None:
    shutil.rmtree(folder)
    os.mkdir(folder)  # noqa: PTH102
    assert pair.node._writer is not None
    pair.node._writer.close()
    await eventually(lambda: pair.poll() or (pair.trainer.session == 2 and pair.node.connected), "another connection")


async def test_the_plan_of_the_most_fragments_arrives(folder: Path) -> None:
    plan = ModelPlan(16, (FragmentTerms(limits.TRANSFER_BYTES, limits.TRANSFER_BYTES, 1 << 30),) * limits.FRAGMENTS, 800)
    node, trainer = NodeEnd(folder), TrainerEnd(folder)
    running = asyncio.create_task(kept(node, lambda report: None, plan))
    await eventually(lambda: trainer.poll() or trainer.session, "a session")
    trainer.send(messages.Built(plan), trainer.session)
    await eventually(lambda: trainer.poll() or node.connected, "the plan")
    await cancel(running)
    trainer.close()


async def test_a_node_chooses_the_stage_that_the_trainer_builds(folder: Path) -> None:
    """The trainer learns it before it has built anything; a node that connects later reads the plan at once."""
    plan = ModelPlan(16, PLAN.fragments, 800, StageTerms(2, 3, 516, 8448, 4))

    async def choose(stages: tuple[int, ...]) -> int:
        assert stages == (0, 2)
        return 2

    node, trainer = NodeEnd(folder), TrainerEnd(folder)
    node.choose_stage = choose
    reports: list[messages.TrainerReport] = []
    connecting = asyncio.create_task(node.connect())
    assert await asyncio.to_thread(trainer.wait_for_stage, messages.Fits((0, 2))) == 2
    trainer.send(messages.Built(plan), trainer.session)
    assert await connecting == plan
    running = asyncio.create_task(node.run(reports.append))
    trainer.send(PROGRESS, trainer.session)
    await eventually(lambda: reports == [PROGRESS], "report")
    await cancel(running)
    trainer.close()


async def test_a_node_ends_where_its_trainer_comes_back_with_another_stage(folder: Path) -> None:
    """Its lanes and meetings are those of the former stage. A setting of the device restarts the trainer alone, and changes what fits."""
    stages = [ModelPlan(16, PLAN.fragments, 800, StageTerms(stage, 3, 516, 8448, 4)) for stage in (1, 2)]
    node, running = NodeEnd(folder), list[asyncio.Task[None]]()
    for plan in (stages[0], *stages):
        trainer = TrainerEnd(folder)
        if not running:
            running.append(asyncio.create_task(kept(node, lambda report: None, plan)))
        await eventually(lambda trainer=trainer: trainer.poll() or trainer.session, "a session")  # type: ignore[misc]
        trainer.send(messages.Built(plan), trainer.session)
        await eventually(lambda: node.connected or running[0].done(), "the plan")
        assert node.connected is (plan == stages[0])
        trainer.close()
        await eventually(lambda: not node.connected, "loss")
    with pytest.raises(GossamerError, match="another stage"):
        await running[0]


async def test_a_stage_that_does_not_fit_is_no_choice(folder: Path) -> None:
    async def choose(stages: tuple[int, ...]) -> int:
        return 1

    node, trainer = NodeEnd(folder), TrainerEnd(folder)
    node.choose_stage = choose
    connecting = asyncio.create_task(node.connect())
    with pytest.raises(ValueError, match="stage 1, which does not fit"):
        await asyncio.to_thread(trainer.wait_for_stage, messages.Fits((0, 2)))
    await cancel(connecting)
    trainer.close()


async def test_a_request_about_a_hop_gets_the_reply_about_that_hop(pair: Pair) -> None:
    first, second = (asyncio.create_task(pair.node.pass_hop(messages.Forward(hop, "ab" * 16))) for hop in (1, 2))
    await pair.requests(2)
    pair.trainer.send(messages.Declined(2, "late"), pair.trainer.session)
    pair.trainer.send(messages.Forwarded(1), pair.trainer.session)
    assert await first == messages.Forwarded(1)
    assert await second == messages.Declined(2, "late")
