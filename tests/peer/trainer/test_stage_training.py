from __future__ import annotations

from pathlib import Path

import pytest
import torch

from gossamer.peer.link import messages
from gossamer.peer.link.messages import Begin, File, Forwarded, HopFile, Returned, payload_name
from gossamer.peer.machine.events import Event
from gossamer.peer.model.evaluation import held_out_loss
from gossamer.peer.model.model import build_model
from gossamer.peer.model.stages import manifest_cuts
from gossamer.peer.trainer import stage_training
from gossamer.peer.trainer.fragment_syncs import FragmentSyncs
from gossamer.peer.trainer.losses import NUM_EVAL_BATCHES
from gossamer.peer.trainer.stage_training import StageProgram, StageReplica
from gossamer.protocol.messages.messages import RunPhase
from tests.peer.small import fingerprint
from tests.peer.trainer.staged import SESSION, Holder, staged_manifest

torch.set_num_threads(1)
MANIFEST = staged_manifest()


class Line:
    """Two replicas, one of each stage, and the way between them."""

    def __init__(self, folder: Path) -> None:
        self.holders = [Holder(MANIFEST, cut, folder) for cut in manifest_cuts(MANIFEST)]
        self.first, self.last = (StageReplica(MANIFEST, StageProgram(one.loop, one.corpus), 3) for one in self.holders)
        self.num_hops = 0
        self.events: list[Event] = []

    def begin(self, count: int) -> None:
        """Let the driver begin micro-batches, and carry what is due to the last stage."""
        below, above = self.holders
        for _ in range(count):
            below.hops.put(Begin(self.num_hops, f"{self.num_hops:032x}"), SESSION)
            self.num_hops += 1
        assert self.first.inner_step() is None
        for reply in below.taken():
            assert isinstance(reply, Forwarded)
            tokens, values = below.own(reply.hop, HopFile.OWN_TOKENS), below.own(reply.hop, HopFile.OWN_FORWARD)
            above.forward(reply.hop, tokens, values, measure=reply.measure, lower_step=self.first.global_step)

    def answer(self) -> None:
        """Carry what the last stage has done back to the driver."""
        below, above = self.holders
        for reply in above.taken():
            assert isinstance(reply, Returned), reply
            gradient = above.own(reply.hop, HopFile.OWN_BACKWARD)
            below.backward(reply.hop, gradient, reply.loss, measure=not gradient)

    def put(self, name: str, file: File, data: bytes) -> None:
        """Bring the last stage a file of its node."""
        self.holders[1].payloads.write(payload_name(name, file), data)

    def got(self, name: str, file: File) -> bytes:
        """Return a file of the last stage's trainer."""
        return bytes(self.holders[1].payloads.read(payload_name(name, file)))

    def step(self) -> None:
        self.begin(3)
        made = self.last.inner_step()
        self.answer()
        other = self.first.inner_step()
        self.holders[0].taken()
        assert made is not None and other is not None
        assert made.loss == pytest.approx(other.loss)
        assert made.num_tokens == other.num_tokens == 6 * 16


def test_replicas_of_stages_step_when_a_batch_has_come_back(tmp_path: Path) -> None:
    line = Line(tmp_path)
    line.step()
    assert line.last.inner_step() is None
    assert [replica.own_steps for replica in (line.first, line.last)] == [1, 1]
    line.step()
    assert [(replica.global_step, replica.tokens) for replica in (line.first, line.last)] == [(2, 192)] * 2
    assert {one.codec.fragment.pieces[0].name for one in line.first.fragments} & {"model.embed_tokens.weight"}
    assert not any("embed" in piece.name for one in line.last.fragments for piece in one.codec.fragment.pieces)


def test_micro_batches_that_came_back_are_counted_before_the_step(tmp_path: Path) -> None:
    line = Line(tmp_path)
    line.begin(2)
    assert line.last.inner_step() is None
    line.answer()
    assert line.first.inner_step() is None
    assert [replica.num_gathered for replica in (line.first, line.last)] == [4 * 16] * 2
    line.holders[0].taken()
    line.begin(1)
    assert line.last.inner_step() is not None
    assert [replica.num_gathered for replica in (line.first, line.last)] == [4 * 16, 0]


def test_the_held_out_loss_comes_back_to_the_driver(tmp_path: Path) -> None:
    line = Line(tmp_path)
    line.step()
    assert line.last.program.evaluation() is None
    assert line.first.program.evaluation() is None  # nothing has come back; now some are sent
    for _ in range(NUM_EVAL_BATCHES):
        line.begin(3)
        assert line.last.inner_step() is None
        line.answer()
        assert line.first.inner_step() is None
        line.holders[0].taken()
    measured = line.first.program.evaluation()
    model = build_model(MANIFEST.model, 0)
    model.load_state_dict({name: tensor for one in line.holders for name, tensor in one.stage.state_dict().items()})
    corpus = line.holders[0].corpus
    assert corpus is not None
    assert measured == (pytest.approx(held_out_loss(model, corpus, NUM_EVAL_BATCHES), rel=1e-5), NUM_EVAL_BATCHES)


def test_a_micro_batch_of_more_tokens_than_an_evaluation_is_measured_nevertheless(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage_training, "NUM_EVAL_BATCHES", 1)
    monkeypatch.setattr(stage_training, "MOST_EVAL_TOKENS", 16)
    line = Line(tmp_path)
    line.step()
    assert line.first.program.evaluation() is None
    line.begin(1)
    assert line.last.inner_step() is None
    line.answer()
    assert line.first.inner_step() is None
    assert line.first.program.evaluation() is not None


def test_a_checkpoint_holds_the_optimizer_and_the_names_that_were_added(tmp_path: Path) -> None:
    line, restored = Line(tmp_path / "one"), Line(tmp_path / "two")
    for _ in range(2):
        line.step()
    for replica, other in ((line.first, restored.first), (line.last, restored.last)):
        kept = replica.kept()
        other.restore({name: tensor.clone() for name, tensor in kept.tensors.items()}, kept.state)
        assert fingerprint(other) == fingerprint(replica)
    assert restored.holders[1].loop.added == [f"{hop:032x}" for hop in range(6)]
    restored.num_hops = line.num_hops
    line.step()
    restored.step()
    assert fingerprint(restored.first) == fingerprint(line.first)
    assert fingerprint(restored.last) == fingerprint(line.last)


def test_the_text_of_a_driver_never_goes_back(tmp_path: Path) -> None:
    """Micro-batches that were passed over put its windows ahead of its steps: a streamed text cannot give an earlier one again."""

    def windows(line: Line) -> list[bytes]:
        first = line.num_hops
        line.begin(3)
        return [line.holders[0].own(hop, HopFile.OWN_TOKENS) for hop in range(first, line.num_hops)]

    line, restored = Line(tmp_path / "one"), Line(tmp_path / "two")
    seen = windows(line)
    seen += windows(line)
    line.first.take_over([], 5)
    kept = line.first.kept()
    restored.first.restore({name: tensor.clone() for name, tensor in kept.tensors.items()}, kept.state)
    assert windows(line) == windows(restored)
    seen += [line.holders[0].own(hop, HopFile.OWN_TOKENS) for hop in range(6, 9)]
    corpus = line.holders[0].corpus
    assert corpus is not None
    rows = torch.cat([corpus.batch(step) for step in range(3)]).split(2)
    assert seen == [part.numpy().astype("<i4").tobytes() for part in rows]


def test_weights_of_others_end_the_half_batch(tmp_path: Path) -> None:
    line = Line(tmp_path)
    line.step()
    line.begin(2)
    assert line.last.inner_step() is None
    line.last.take_over([], 5)
    assert all(parameter.grad is None for parameter in line.holders[1].stage.parameters())
    assert line.last.global_step == 5


def test_no_stage_is_judged_by_a_loss_of_its_own(tmp_path: Path) -> None:
    line = Line(tmp_path)
    for replica in (line.first, line.last):
        assert replica.program.losses().may_replace(replica.program.losses(), 0.0)
        assert replica.program.outputs() is None


def test_a_stage_moves_to_the_newer_weights_of_a_mate_and_keeps_its_optimizer(tmp_path: Path) -> None:
    """A replica of a stage with an old checkpoint takes newer weights unmeasured: no loss of its own tells which are better."""
    older, newer = Line(tmp_path / "older"), Line(tmp_path / "newer")
    older.step()
    for _ in range(4):
        newer.step()
    for line in (older, newer):
        for number in range(len(line.last.fragments)):
            line.last.take_solo_step(number, RunPhase.TRAIN)
        line.last.move_fast_weights()
    state = {name: value.clone() for name, value in older.holders[1].loop.devices.state().items()}
    before = [float((one.slow - other.slow).norm()) for one, other in zip(older.last.fragments, newer.last.fragments, strict=True)]
    names = [f"sync-{number}" for number in range(len(older.last.fragments))]
    asking, giving = (FragmentSyncs(line.last.fragments, line.holders[1].payloads) for line in (older, newer))
    for number, name in enumerate(names):
        asking.sketch(messages.SketchSlow(name, number, 1))
        newer.put(name, File.PARTNER_SKETCH, older.got(name, File.OWN_SKETCH))
        giving.code(messages.CodeSlow(name, number, 1))
        older.put(name, File.PARTNER_PAYLOAD, newer.got(name, File.OWN_PAYLOAD))
        asking.decode(messages.DecodeSlow(name))
    moved = asking.move(messages.MoveFragments("sync", (tuple(names),), newer.last.global_step), older.last)
    assert set(moved.moved) == set(names)
    for one, other, far in zip(older.last.fragments, newer.last.fragments, before, strict=True):
        assert float((one.slow - other.slow).norm()) < 0.35 * far, "but for what the codec loses"
        assert torch.allclose(one.fast(), one.slow, atol=1e-6)
    assert older.last.global_step == newer.last.global_step == 4
    now = older.holders[1].loop.devices.state()
    assert state and all(torch.equal(value, now[name]) for name, value in state.items())
