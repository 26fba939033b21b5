"""What meetings do to a replica, through the exchange: against the oracle, and against malicious partners."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import asdict, astuple
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from gossamer.optim.codecs import CODECS
from gossamer.optim.fragments import gather
from gossamer.optim.noloco import NoLoCo
from gossamer.peer.link import messages
from gossamer.peer.link.messages import File
from gossamer.peer.link.payload_folder import PayloadFolder
from gossamer.peer.trainer.exchange import TrainerExchange
from gossamer.peer.trainer.meeting import pack, unpack
from gossamer.peer.trainer.text_training import TextProgram, TextReplica
from gossamer.protocol.messages.messages import RunPhase
from tests import reference
from tests.peer.exchange import Side, Terms, checked, exchange, meet, opened
from tests.peer.small import NoLink, ignored, small_corpus, small_manifest

CPU = torch.device("cpu")
RULE = NoLoCo()
DEFAULT = NoLoCo(0.0, 1.0, 1.0)  # of a run: the same numbers as those of the last averaging
CODED, SMALL = 5000, 30  # values: the first are coded in blocks, the last short; the others travel in fp32
NAMES = {"fp32": 2e-7, "bf16": 5e-3, "int8": 8e-3, "modulo8": 1e-3, "modulo4": 1.2e-2}  # and how near the oracle it comes


class ToyModel(nn.Module):
    """A block of a matrix and a norm, and an embedding outside: two fragments."""

    def __init__(self) -> None:
        super().__init__()
        block = nn.Module()
        block.matrix, block.norm = nn.Parameter(torch.zeros(CODED)), nn.Parameter(torch.zeros(SMALL))
        self.layers = nn.ModuleList([block])
        self.embedding = nn.Parameter(torch.zeros(4096))

    def forward(self, input_ids: Tensor, use_cache: bool) -> SimpleNamespace:
        """Foresee nothing: no merge changes the loss."""
        return SimpleNamespace(logits=torch.zeros(*input_ids.shape, 256))


class ToyReplica(TextReplica):
    """A replica that notes its outer steps, and follows no clock."""

    steps: list[tuple[int, int]]

    def count_outer_step(self, fragment: int, partner_global_step: int, *, is_met: bool = True) -> None:
        self.steps.append((fragment, partner_global_step))


class Peer:
    """A replica of a toy model and its exchange."""

    def __init__(self, folder: Path, name: str, codec_name: str = "fp32", rule: NoLoCo = RULE) -> None:
        manifest = small_manifest(codec={"name": codec_name}, inner={"optimizer": "adamw"}, outer=asdict(rule))
        self.replica = ToyReplica(manifest, TextProgram(manifest, ToyModel(), small_corpus(manifest), ignored), 0)
        self.replica.steps = self.steps = []
        self.parameters = {name.split(".")[-1]: tensor.detach() for name, tensor in self.replica.parameters.items()}
        self.move(torch.Generator().manual_seed(5), 0.5)
        self.payloads = PayloadFolder(folder / name)
        self.exchange = TrainerExchange(NoLink(), self.payloads, self.replica, ignored, random.Random(0))
        self.side = Side(self.exchange.carry_out, self.payloads)

    def solo(self, phase: RunPhase = RunPhase.TRAIN) -> None:
        self.replica.take_solo_step(0, phase)
        self.replica.move_fast_weights()

    def move(self, draws: torch.Generator, size: float = 0.01) -> None:
        """Take some inner steps."""
        for tensor in self.parameters.values():
            tensor.add_(torch.randn(tensor.shape, generator=draws), alpha=size)

    def fast(self, fragment: int = 0) -> Tensor:
        return gather(self.replica.fragments[fragment].codec.fragment, self.replica.parameters)

    def state(self) -> list[Tensor]:
        """All that a refusal must leave as it was."""
        states = [tensor for f in self.replica.fragments for tensor in (f.slow, f.momentum, torch.tensor(f.since.tokens))]
        return [tensor.clone() for tensor in (*self.parameters.values(), *states)]

    def oracle(self, fragment: int = 0) -> list[reference.Replica]:
        state = self.replica.fragments[fragment]
        columns = zip(state.slow.tolist(), state.momentum.tolist(), self.fast(fragment).tolist(), strict=True)
        return [reference.Replica(*column) for column in columns]


def same(before: list[Tensor], after: list[Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(before, after, strict=True))


def pair(folder: Path, codec_name: str = "fp32", rule: NoLoCo = RULE) -> tuple[Peer, Peer]:
    """Two peers that have met before: momentum and slow weights differ, the tokens too."""
    peers = Peer(folder, "i", codec_name, rule), Peer(folder, "j", codec_name, rule)
    draws = torch.Generator().manual_seed(6)
    for peer, tokens in zip(peers, (300, 100), strict=True):
        peer.move(draws)
        peer.solo()
        peer.move(draws)
        peer.replica.count(tokens)
        peer.steps.clear()
    return peers


def sides(peers: tuple[Peer, Peer]) -> tuple[Side, Side]:
    return peers[0].side, peers[1].side


def expected(peers: tuple[Peer, Peer], tokens: tuple[int, int], rule: NoLoCo = RULE) -> list[list[reference.Replica]]:
    columns = zip(peers[0].oracle(), peers[1].oracle(), strict=True)
    moved = [reference.noloco_token_weighted(i, j, tokens, *astuple(rule)) for i, j in columns]
    return [list(side) for side in zip(*moved, strict=True)]


def assert_at(peer: Peer, wanted: list[reference.Replica], tolerance: float, moved_in_flight: Tensor | float = 0.0) -> None:
    state = peer.replica.fragments[0]
    momentum = [(state.momentum, "delta")] if state.has_momentum else []
    for have, name in ((state.slow, "phi"), *momentum, (peer.fast() - moved_in_flight, "theta")):
        want = torch.tensor([getattr(replica, name) for replica in wanted], dtype=torch.float64)
        assert float((have.double() - want).abs().max()) < tolerance, name


@pytest.mark.parametrize(("name", "rule"), [*((name, RULE) for name in NAMES), ("fp32", DEFAULT)])
def test_a_meeting_is_the_oracles_outer_step(tmp_path: Path, name: str, rule: NoLoCo) -> None:
    peers = pair(tmp_path, name, rule)
    wanted = expected(peers, (300, 100), rule)
    meet(sides(peers), Terms())
    for peer, want in zip(peers, wanted, strict=True):
        assert_at(peer, want, NAMES[name])
        assert peer.steps == [(0, 0)]


@pytest.mark.parametrize("name", list(CODECS))
def test_the_pairs_mean_moves_as_if_nothing_were_coded(tmp_path: Path, name: str) -> None:
    peers = pair(tmp_path, name)
    wanted = expected(peers, (300, 100))
    meet(sides(peers), Terms())
    mean = (peers[0].replica.fragments[0].slow.double() + peers[1].replica.fragments[0].slow.double()) / 2
    want = torch.tensor([(i.phi + j.phi) / 2 for i, j in zip(*wanted, strict=True)], dtype=torch.float64)
    assert float((mean - want).abs().max()) < 3e-7


def test_steps_made_in_flight_are_kept(tmp_path: Path) -> None:
    peers = pair(tmp_path)
    wanted = expected(peers, (300, 100))
    exchange(sides(peers), Terms())
    before = [peer.fast() for peer in peers]
    draws = torch.Generator().manual_seed(8)
    for peer in peers:
        peer.move(draws)
        peer.replica.count(50)
    flown = [peer.fast() - was for peer, was in zip(peers, before, strict=True)]
    for peer, want, moved in zip(peers, wanted, flown, strict=True):
        assert checked(peer.side, 1).accepted
        peer.move(draws, 0.0)
        peer.side.answer(messages.Apply(1, "ab" * 16, ""))
        assert_at(peer, want, 3e-7, moved)
        assert peer.replica.fragments[0].since.tokens == 50  # what was trained in flight stands behind the next pseudo-gradient


def test_the_last_averaging_ends_on_the_mean_of_the_fast_weights(tmp_path: Path) -> None:
    peers = pair(tmp_path)
    mean = (peers[0].fast().double() + peers[1].fast().double()) / 2
    meet(sides(peers), Terms(phase=RunPhase.FINISH))
    for peer in peers:
        assert float((peer.fast() - mean).abs().max()) < 1e-7
        assert float((peer.replica.fragments[0].slow - mean).abs().max()) < 1e-7


def test_the_last_averaging_alone_keeps_the_fast_weights(tmp_path: Path) -> None:
    peer = pair(tmp_path)[0]
    fast = peer.fast()
    peer.solo(RunPhase.FINISH)
    assert torch.allclose(peer.fast(), fast, atol=1e-7)
    assert torch.allclose(peer.replica.fragments[0].slow, fast, atol=1e-7)


def test_a_solo_step_is_the_oracles(tmp_path: Path) -> None:
    peer = pair(tmp_path)[0]
    wanted = [reference.solo(replica, RULE.alpha, RULE.beta) for replica in peer.oracle()]
    peer.solo()
    assert_at(peer, wanted, 2e-7)
    assert peer.replica.fragments[0].since.tokens == 0
    assert peer.replica.fragments[1].since.tokens == 300
    assert peer.steps == [(0, 0)]


def test_failed_blocks_are_taken_alone_on_both_sides(tmp_path: Path) -> None:
    peers = pair(tmp_path, "modulo8")
    pairs = expected(peers, (300, 100))
    alone = [[reference.solo(replica, RULE.alpha, RULE.beta) for replica in peer.oracle()] for peer in peers]
    failed = torch.zeros(5, dtype=torch.bool)  # blocks of 1024
    failed[[1, 4]] = True
    values = failed.repeat_interleave(1024)[:CODED].tolist() + [False] * SMALL
    meet(sides(peers), Terms(), pack(failed))
    for peer, met, solo in zip(peers, pairs, alone, strict=True):
        assert_at(peer, [s if is_failed else m for is_failed, m, s in zip(values, met, solo, strict=True)], NAMES["modulo8"])


def test_a_block_that_one_side_cannot_decode_is_reported_and_taken_alone_by_both(tmp_path: Path) -> None:
    peers = pair(tmp_path, "modulo4")
    wanted = [[reference.solo(replica, RULE.alpha, RULE.beta) for replica in peer.oracle()] for peer in peers]
    exchange(sides(peers), Terms())
    payload = bytearray(peers[0].side.get(1, File.PARTNER_PAYLOAD))
    for place in range(512, 1024, 40):  # codes of the second block, two a byte
        payload[place] ^= 0xFF
    peers[0].side.put(1, File.PARTNER_PAYLOAD, bytes(payload))
    verdicts = [checked(peer.side, 1) for peer in peers]
    assert [verdict.failed_blocks for verdict in verdicts] == ["02", ""]
    for peer, want in zip(peers, wanted, strict=True):
        assert peer.side.answer(messages.Apply(1, "ab" * 16, "02")) == messages.Applied(1)
        alone = torch.tensor([replica.phi for replica in want[1024:2048]])
        assert torch.allclose(peer.replica.fragments[0].slow[1024:2048], alone, atol=2e-7)


def garbage(honest: bytes) -> bytes:
    return bytes((17 * i + 91) % 256 for i in range(len(honest)))


HOSTILE: dict[str, Callable[[bytes], bytes]] = {
    "nothing": lambda honest: b"",
    "short": lambda honest: honest[:-1],
    "long": lambda honest: honest + b"\0",
    "nan": lambda honest: b"\xff" * len(honest),
    "garbage": garbage,
    "far away": lambda honest: (torch.frombuffer(bytearray(honest), dtype=torch.float32) * 1e6).numpy().tobytes(),
    "near overflow": lambda honest: torch.full((len(honest) // 4,), 2.0**95).numpy().tobytes(),
}


@pytest.mark.parametrize("attack", list(HOSTILE))
def test_a_hostile_payload_is_refused_and_changes_nothing(tmp_path: Path, attack: str) -> None:
    peers = pair(tmp_path)
    victim = peers[0]
    exchange(sides(peers), Terms())
    before, gate = victim.state(), json.dumps(victim.replica.kept().state)
    victim.side.put(1, File.PARTNER_PAYLOAD, HOSTILE[attack](victim.side.get(1, File.PARTNER_PAYLOAD)))
    verdict = checked(victim.side, 1)
    assert not verdict.accepted
    assert verdict.reason
    assert isinstance(victim.side.answer(messages.Apply(1, "cd" * 16, "")), messages.Unavailable)  # even if the node wanted it
    victim.side.answer(messages.Drop(1))
    assert same(before, victim.state())
    assert json.dumps(victim.replica.kept().state) == gate
    assert not victim.steps
    assert isinstance(victim.side.answer(messages.Open(2, 0)), messages.Opened)


@pytest.mark.parametrize("name", ["int8", "modulo4"])
@pytest.mark.parametrize("attack", ["nothing", "short", "nan"])
def test_coded_payloads_are_checked_as_well(tmp_path: Path, name: str, attack: str) -> None:
    peers = pair(tmp_path, name)
    exchange(sides(peers), Terms())
    before = peers[0].state()
    peers[0].side.put(1, File.PARTNER_PAYLOAD, HOSTILE[attack](peers[0].side.get(1, File.PARTNER_PAYLOAD)))
    assert not checked(peers[0].side, 1).accepted
    assert same(before, peers[0].state())


@pytest.mark.parametrize("sketch", [b"", b"\xff" * 80, b"\0" * 79])
def test_a_hostile_sketch_is_refused(tmp_path: Path, sketch: bytes) -> None:
    peer = pair(tmp_path, "modulo4")[0]
    opened(peer.side, Terms())
    before = peer.state()
    assert isinstance(peer.side.answer(messages.Prepare(1, 100, 0, 7, RunPhase.TRAIN)), messages.SketchReady)
    peer.side.put(1, File.PARTNER_SKETCH, sketch)
    assert isinstance(peer.side.answer(messages.Encode(1)), messages.Unavailable)
    assert same(before, peer.state())


def test_fragments_have_yardsticks_of_their_own_and_a_restored_loop_has_them_too(tmp_path: Path) -> None:
    peers = pair(tmp_path)
    before = json.loads(json.dumps(peers[0].replica.kept().state["outer"]["gate"]))
    meet(sides(peers), Terms())
    state, tensors = json.loads(json.dumps(peers[0].replica.kept().state)), peers[0].replica.kept().tensors
    outer = state["outer"]
    assert outer["gate"][0]["reach"] > 0.0 and outer["gate"][1] == before[1]
    again = Peer(tmp_path, "again")
    again.replica.restore(tensors, state)
    assert again.replica.kept().state == state
    with pytest.raises(ValueError):
        again.replica.restore(tensors, {**state, "outer": {**outer, "gate": outer["gate"][:1]}})


def test_none_failed_is_empty() -> None:
    assert pack(torch.zeros(100, dtype=torch.bool)) == ""
    assert not unpack("", 100, CPU).any()
    assert unpack("", 0, CPU).shape == (0,)
    assert pack(torch.zeros(0, dtype=torch.bool)) == ""


def test_the_lowest_bit_is_the_first_block() -> None:
    failed = torch.zeros(10, dtype=torch.bool)
    failed[[0, 2, 9]] = True
    assert pack(failed) == "0502"


@given(st.lists(st.booleans(), max_size=50))
def test_what_was_packed_is_unpacked(blocks: list[bool]) -> None:
    failed = torch.tensor(blocks, dtype=torch.bool)
    assert torch.equal(unpack(pack(failed), len(blocks), CPU), failed)


@pytest.mark.parametrize(("text", "num_blocks"), [("01", 9), ("0101", 8), ("01", 0), ("zz", 8)])
def test_a_list_of_another_size_is_refused(text: str, num_blocks: int) -> None:
    with pytest.raises(ValueError):
        unpack(text, num_blocks, CPU)
