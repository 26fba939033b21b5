"""The choice of the stage that a peer holds."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from gossamer.peer.machine.events import Event, StageHeld
from gossamer.peer.machine.home import Home
from gossamer.peer.node.staging import StageChoice
from gossamer.peer.swarm.lifecycle import Lifecycle
from gossamer.peer.swarm.sybil_groups import SybilGroups
from gossamer.protocol.errors import BadSettings
from gossamer.protocol.tasks import loop_s
from tests.peer.swarm.test_address_book_stages import book_of
from tests.protocol.samples import STAGE_TERMS


@pytest.fixture(autouse=True)
def nothing_said() -> None:
    emitted.clear()


class SeenDirectory:
    """A presence whose first look at the directory is over."""

    def __init__(self) -> None:
        self.show: Callable[[], None] = lambda: None  # at the next query

    async def first_look(self, most_s: float) -> bool:
        return True

    async def look_now(self, most_s: float) -> None:
        self.show()


emitted: list[Event] = []


def choice(folder: Path, stages: list[int], seed: int = 0, *, is_founder: bool = False) -> StageChoice:
    home = Home(folder)
    home.create()
    groups = SybilGroups(book_of(stages, own=0), STAGE_TERMS)
    rng = random.Random(seed)
    return StageChoice(home, groups, SeenDirectory(), Lifecycle(), rng, 3, emitted.append, is_founder)  # type: ignore[arg-type]


async def chosen(folder: Path, stages: list[int], fits: tuple[int, ...], seed: int = 0, *, is_founder: bool = False) -> int:
    choosing = choice(folder, stages, seed, is_founder=is_founder)
    for entry in choosing.groups.book.known(0.0):
        entry.seen_s = loop_s()
    stage = await choosing.choose(fits)
    assert choosing.lifecycle.stage == stage + 1, "it is announced before the trainer is ready"
    assert emitted[-1] == StageHeld(stage + 1, 3)
    return stage


async def test_the_first_peer_of_a_run_takes_the_first_stage_that_fits(tmp_path: Path) -> None:
    assert await chosen(tmp_path / "a", [], (0, 1, 2), is_founder=True) == 0
    assert await chosen(tmp_path / "b", [], (1, 2), is_founder=True) == 1


@pytest.mark.parametrize("seed", range(4))
async def test_a_peer_that_joins_before_the_directory_shows_anybody_looks_again(seed: int, tmp_path: Path) -> None:
    """Peers that join right after the first one has printed its invite see no record of a stage yet."""

    choosing, others = choice(tmp_path, [], seed), book_of([1, 3], own=0)

    def show() -> None:
        for record in others.records(loop_s()):
            choosing.groups.book.learn(record, loop_s())

    choosing.presence.show = show  # type: ignore[attr-defined]
    assert await choosing.choose((0, 1, 2)) == 1


async def test_a_joining_peer_takes_the_stage_that_nobody_holds(tmp_path: Path) -> None:
    assert await chosen(tmp_path, [1, 3, 3], (0, 1, 2)) == 1


async def test_of_the_stages_that_fit_it_takes_the_one_with_the_fewest_holders(tmp_path: Path) -> None:
    assert await chosen(tmp_path, [1, 1, 2, 3, 3], (0, 2)) in (0, 2)
    assert await chosen(tmp_path / "other", [1, 1, 2, 3, 3], (0, 1, 2)) == 1


async def test_equal_stages_are_drawn(tmp_path: Path) -> None:
    assert {await chosen(tmp_path / str(seed), [1, 2], (0, 1), seed) for seed in range(20)} == {0, 1}


async def test_peers_that_join_together_choose_unlike_stages(tmp_path: Path) -> None:
    """A second one has chosen the same stage at the same moment: the later look sees it."""
    choosing = choice(tmp_path, [1, 2])
    entries = choosing.groups.book.known(0.0)
    for entry in entries:
        entry.seen_s = loop_s()
    chosen = asyncio.create_task(choosing.choose((0, 1)))
    await choosing.lifecycle.until(lambda: choosing.lifecycle.stage > 0)
    first = choosing.lifecycle.stage - 1
    for entry in entries:
        assert entry.record is not None
        entry.record = replace(entry.record, stage=first + 1)
    assert await chosen == 1 - first


async def test_the_choice_is_kept_in_the_home(tmp_path: Path) -> None:
    assert await chosen(tmp_path, [1], (0, 1)) == 1
    assert await chosen(tmp_path, [2, 2, 2], (0, 1)) == 1, "though another stage needs it more by now"
    assert Home(tmp_path).stage.read_text() == "2\n"
    assert await chosen(tmp_path, [2], (0,)) == 0, "unless it does not fit any more"


async def test_a_kept_choice_is_shown_before_the_trainer_is_there_and_once(tmp_path: Path) -> None:
    assert await chosen(tmp_path, [1], (0, 1)) == 1
    emitted.clear()
    choosing = choice(tmp_path, [2, 2, 2])
    choosing.show_held()
    assert (choosing.lifecycle.stage, emitted) == (2, [StageHeld(2, 3)])
    assert await choosing.choose((0, 1)) == 1
    assert emitted == [StageHeld(2, 3)]


@pytest.mark.parametrize("text", ["", "4\n"])
def test_no_stage_is_shown_where_none_is_kept_or_the_run_lacks_it(text: str, tmp_path: Path) -> None:
    choosing = choice(tmp_path, [1])
    if text:
        choosing.home.stage.write_text(text)
    choosing.show_held()
    assert (choosing.lifecycle.stage, emitted) == (0, [])


async def test_an_unreadable_choice_is_reported_with_what_to_do(tmp_path: Path) -> None:
    Home(tmp_path).create()
    Home(tmp_path).stage.write_text("last\n")
    with pytest.raises(BadSettings, match="does not hold the number of a stage") as caught:
        await chosen(tmp_path, [], (0, 1))
    assert "remove it" in caught.value.hint
