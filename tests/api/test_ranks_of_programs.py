"""Programs of several ranks as one peer: real processes over gloo, in real swarms."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from gossamer.peer.machine.control_socket import ask
from gossamer.peer.machine.home import Home
from tests.api.forked import Forks
from tests.api.test_swarm import ForkedPrograms, Started, all_ended
from tests.peer.waiting import wait_until

PROGRAM = str(Path(__file__).with_name("program_of_ranks.py"))
LONG = ("--steps", "1000000")
SLOW = ("--pause-s", "0.01")
STEPS, SLOWER = "150", ("--pause-s", "0.04")  # of a run that ends: a guest that comes late still makes a step
SHARDED = ("--sharded", "rows")
KINDS = pytest.mark.parametrize("kind", [(), SHARDED], ids=["DDP", "FSDP2"])
FAR_STEPS = 250  # behind the host, so that its weights are taken over


class Ranks(ForkedPrograms):
    """Starts programs of one rank or several."""

    def one(self, home: str, *options: str) -> Started:
        return self.fork(PROGRAM, str(self.folder / home), *options)

    def two(self, home: str, *options: str) -> tuple[Started, Started]:
        store = f"store{len(self.started)}"
        command = (PROGRAM, str(self.folder / home), *options)
        first, second = (self.fork(*command, RANK=str(rank), WORLD_SIZE="2", STORE=store) for rank in (0, 1))
        return first, second


@pytest.fixture
def programs(tmp_path: Path, forks: Forks) -> Iterator[Ranks]:
    started = Ranks(tmp_path, forks)
    with all_ended(started):
        yield started


def steps_of(rank: Started) -> list[str]:
    return [line for line in rank.lines() if line.startswith("step ")]


@pytest.mark.timeout(240)
@pytest.mark.parametrize("kind", [(), SHARDED, (*SHARDED, "--frozen")], ids=" ".join)
def test_two_ranks_and_a_program_of_one_process_meet_and_end_alike(programs: Ranks, kind: tuple[str, ...]) -> None:
    first, second = programs.two("host", "--steps", STEPS, "--peers", "1", *SLOWER, *kind)
    alone = programs.one("guest", "--invite", first.says("invite"), *SLOWER, *kind[2:])
    end = alone.end().split()
    assert first.end().split() == second.end().split() == end
    assert end[1] == STEPS and float(end[3]) < 0.05
    assert steps_of(first) == steps_of(second) and len(steps_of(first)) > 2
    assert first.find("counted") == "counted 64.0 a step" and alone.find("counted") == "counted 32.0 a step"


@pytest.mark.timeout(240)
def test_one_process_two_ddp_ranks_and_two_fsdp2_ranks_meet_in_one_swarm_and_end_alike(programs: Ranks) -> None:
    alone = programs.one("host", "--steps", STEPS, "--peers", "2", *SLOWER)
    invite = ("--invite", alone.says("invite"), "--peers", "2", *SLOWER)
    ranks = (*programs.two("replicas", *invite), *programs.two("shards", *invite, *SHARDED))
    end = alone.end().split()
    assert all(rank.end().split() == end for rank in ranks)
    assert end[1] == STEPS and float(end[3]) < 0.05


@pytest.mark.timeout(240)
@KINDS
def test_two_ranks_go_on_from_their_checkpoint_and_clear_the_optimizer_together(
    programs: Ranks, tmp_path: Path, kind: tuple[str, ...]
) -> None:
    host = programs.one("host", *LONG, *SLOW)
    ranks = programs.two("guest", "--invite", host.says("invite"), "--own-steps", "40", "--leaves", "1", *kind)
    left_at = ranks[0].end().split()[1]
    assert ranks[1].end().split()[1] == left_at
    assert steps_of(ranks[0]) == steps_of(ranks[1]) and len(steps_of(ranks[0])) == 2
    wait_until(lambda: int((steps_of(host) or ["step 0 0"])[-1].split()[2]) > int(left_at) + FAR_STEPS, "steps of the host", 60.0)
    again = programs.two("guest", "--go-on", "--unjudged", *LONG, *SLOW, *kind)
    began = [rank.says("began") for rank in again]
    assert began[0] == began[1] and began[0].split()[0] == left_at and int(began[0].split()[2]) > 0
    adopted = [rank.says("adopted after", 90.0) for rank in again]
    assert adopted[0] == adopted[1] and adopted[0].split()[1] == "0"
    num_steps = len(steps_of(again[0]))
    wait_until(lambda: len(steps_of(again[0])) > num_steps + 1, "steps after the adoption")
    ask(tmp_path / "guest", {"verb": "leave"})
    assert again[0].end().split()[1] == again[1].end().split()[1]
    assert steps_of(again[0]) == steps_of(again[1])


@pytest.mark.timeout(180)
def test_a_checkpoint_goes_from_shards_to_one_process_and_back(programs: Ranks) -> None:
    first, _ = programs.two("host", *LONG, *SHARDED, "--own-steps", "20")
    first.end()
    alone = programs.one("host", *LONG, "--own-steps", "20")
    alone.end()
    again = programs.two("host", *LONG, *SHARDED, "--own-steps", "20")
    again[0].end()
    assert alone.find("began").split()[1:3] == first.find("left").split()[1:]
    assert again[0].find("began").split()[1:3] == again[1].find("began").split()[1:3] == alone.find("left").split()[1:]


@pytest.mark.timeout(120)
@KINDS
def test_all_ranks_go_back_to_the_state_of_rank_0(programs: Ranks, kind: tuple[str, ...]) -> None:
    first, second = programs.two("host", *LONG, "--goes-back", "--own-steps", "60", *kind)
    assert first.end().split()[1] == second.end().split()[1]
    assert steps_of(first) == steps_of(second) and len(steps_of(first)) == 3
    assert first.find("back at") == second.find("back at")
    assert first.find("back at").split()[2:] == steps_of(first)[0].split()[2:]


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--unsteady",), "for the same weights"),
        (("--go-on",), "holds no run"),
        (("--miscounts", "0"), "step(tokens=...) on rank 0: it takes a count"),
        (("--miscounts", "1"), "step(tokens=...) on rank 1: it takes a count"),
        ((*SHARDED, "--raises", "0"), "evaluate() raised ValueError: no data here (rank 0)"),
        ((*SHARDED, "--raises", "1"), "evaluate() raised ValueError: no data here (rank 1)"),
    ],
    ids=str,
)
def test_an_error_is_raised_on_every_rank(programs: Ranks, options: tuple[str, ...], words: str) -> None:
    first, second = programs.two("host", *options)
    assert (first.process.wait(60), second.process.wait(60)) == (2, 2)
    failed = first.find("failed")
    assert failed == second.find("failed") and words in failed and not failed.endswith("| ")


@pytest.mark.timeout(120)
def test_another_model_on_one_rank_is_refused_on_both(programs: Ranks) -> None:
    first, second = programs.two("host", "--wider", "1")
    assert (first.process.wait(60), second.process.wait(60)) == (2, 2)
    assert first.find("failed") == second.find("failed")
    assert "rank 1 has another model than rank 0" in first.find("failed")


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("early", "kind"), [(0, ()), (1, ()), (0, SHARDED)], ids=str)
def test_ranks_that_call_unlike_methods_all_raise_which(programs: Ranks, early: int, kind: tuple[str, ...]) -> None:
    first, second = programs.two("host", *LONG, "--stops-early", str(early), *kind)
    assert (first.process.wait(60), second.process.wait(60)) == (2, 2)
    assert first.find("failed") == second.find("failed")
    calls = ("finish", "step") if early == 1 else ("step", "finish")
    assert f"rank 1 calls {calls[0]}() while rank 0 calls {calls[1]}()" in first.find("failed")


@pytest.mark.timeout(120)
@KINDS
def test_pause_holds_both_ranks_and_leave_ends_both(programs: Ranks, tmp_path: Path, kind: tuple[str, ...]) -> None:
    (first, second), home = programs.two("host", *LONG, *kind), tmp_path / "host"
    first.says("step")
    ask(home, {"verb": "pause"})
    wait_until(lambda: ask(home, {"verb": "status"})["state"] == "paused", "pause")
    before = steps_of(second)
    ask(home, {"verb": "resume"})
    wait_until(lambda: len(steps_of(second)) > len(before), "steps after the pause")
    ask(home, {"verb": "leave"})
    assert first.end().split()[1] == second.end().split()[1]
    assert steps_of(first) == steps_of(second)
    assert Home(home).last_status()["state"] == "left"


@pytest.mark.timeout(120)
@pytest.mark.usefixtures("signals_of_a_terminal")
@KINDS
def test_ctrl_c_at_rank_0_alone_leaves_and_ends_the_other_rank(programs: Ranks, tmp_path: Path, kind: tuple[str, ...]) -> None:
    first, second = programs.two("host", *LONG, *kind)
    first.says("step")
    first.process.send_signal(signal.SIGINT)
    assert first.process.wait(60) != 0 and second.process.wait(60) != 0
    assert first.lines()[-1].endswith("KeyboardInterrupt")
    assert Home(tmp_path / "host").last_status()["state"] == "left"
    newest = max(int(path.name.removeprefix("step-")) for path in Home(tmp_path / "host").checkpoints.iterdir())
    assert newest >= 20 or kind == SHARDED, "what the other rank holds of its weights cannot be saved without it"
    again = programs.two("host", *LONG, *kind)
    assert int(again[1].says("began").split()[0]) == newest


@pytest.mark.timeout(120)
@pytest.mark.parametrize("killed", [0, 1])
def test_the_death_of_a_rank_ends_the_other_and_the_peer(programs: Ranks, tmp_path: Path, killed: int) -> None:
    ranks = programs.two("host", *LONG)
    ranks[0].says("step")
    ranks[killed].process.kill()
    assert ranks[1 - killed].process.wait(60) != 0
    wait_until(lambda: not Home(tmp_path / "host").holder(), "end of the peer", 30.0)


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("columns", "0.weight is placed as S(1), not sharded by its rows"),
        ("mesh", "0.bias lies on a mesh of 2 dimensions [2, 1]; a peer shards over one"),
    ],
)
def test_shards_of_another_kind_are_refused_on_every_rank(programs: Ranks, how: str, words: str) -> None:
    for rank in programs.two("host", "--sharded", how):
        assert rank.process.wait(60) == 2
        assert words in rank.find("failed") and "fully_shard over one mesh of all ranks" in rank.find("failed")
