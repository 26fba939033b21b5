from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from gossamer.optim.codecs.activations import ACTIVATIONS
from gossamer.optim.inner import learning_rate
from gossamer.peer.link.messages import Begin, Declined, Forwarded, HopFile, Returned, Writer, hop_file
from gossamer.peer.model.computing import Computing, next_token_loss
from gossamer.peer.model.model import build_model
from gossamer.peer.model.plan import inner_settings
from gossamer.peer.model.stages import Cut, manifest_cuts
from gossamer.peer.trainer import stage_loop
from gossamer.peer.trainer.inner_loop import InnerLoop
from gossamer.peer.trainer.stage_loop import MAX_LATE_STEPS, MOST_BATCHES, STARVED_S
from gossamer.protocol.messages.terms import BATCHES_AWAY
from gossamer.protocol.run.manifest import StagedManifest
from tests.peer.small import ignored, small_corpus
from tests.peer.trainer.staged import SESSION, Holder, ScriptedNode, reasons, staged_manifest

torch.set_num_threads(1)


def whole_loop(manifest: StagedManifest, holders: list[Holder]) -> InnerLoop:
    """Training of the whole model in parts of a micro-batch, from the stages' weights."""
    model = build_model(manifest.model, 0)
    model.load_state_dict({name: tensor for holder in holders for name, tensor in holder.stage.state_dict().items()})
    return InnerLoop(manifest, model, small_corpus(manifest), Computing(micro_batch=manifest.stages.micro_batch), ignored)


def gradients(holder: Holder) -> dict[str, Tensor]:
    return {name: parameter.grad.clone() for name, parameter in holder.stage.named_parameters() if parameter.grad is not None}


def last_holder(folder: Path, **given: str) -> Holder:
    manifest = staged_manifest(**given)  # type: ignore[arg-type]
    return Holder(manifest, manifest_cuts(manifest)[-1], folder)


def first_holder(folder: Path, **given: str) -> Holder:
    manifest = staged_manifest(**given)  # type: ignore[arg-type]
    return Holder(manifest, manifest_cuts(manifest)[0], folder)


def micro_batch(seed: int = 0, activations: str = "fp32") -> tuple[bytes, bytes]:
    """Tokens and input of a stage that is not the first."""
    draws = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, 256, (2, 17), generator=draws, dtype=torch.int32)
    return tokens.numpy().tobytes(), ACTIVATIONS[activations].pack(torch.randn(2 * 16 * 64, generator=draws)).numpy().tobytes()


def coded(values: Tensor) -> bytes:
    return values.flatten().numpy().tobytes()


# ---------------------------------------------------------------------- exactness


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
def test_steps_in_stages_are_those_of_the_whole_model_bit_for_bit(tmp_path: Path, count: int, optimizer: str) -> None:
    manifest = staged_manifest(count, optimizer=optimizer)
    node = ScriptedNode(manifest, tmp_path)
    whole = whole_loop(manifest, node.holders)
    for step in range(8):
        node.step()
        loss, norm, num_tokens = whole.gradient(step, 0)
        whole.devices.step(learning_rate(step, step, inner_settings(manifest)))
        assert num_tokens == 6 * 16
        assert [holder.losses[-1] for holder in node.holders] == [pytest.approx(float(loss), rel=1e-6)] * count
    for holder in node.holders:
        for name, parameter in holder.stage.named_parameters():
            assert torch.equal(parameter, whole.parameters[name]), name
        assert not list((tmp_path / f"stage-{node.holders.index(holder)}").iterdir())


def test_coded_activations_train_as_well(tmp_path: Path) -> None:
    nodes = [ScriptedNode(staged_manifest(activations=name), tmp_path / name) for name in ("fp32", "int8")]
    for _ in range(20):
        for node in nodes:
            node.step()
    exact, coded_ = (node.holders[0].losses for node in nodes)
    assert coded_ != exact
    assert coded_[-1] == pytest.approx(exact[-1], rel=0.01)
    assert exact[-1] < 0.9 * exact[0]


# ---------------------------------------------------------------------- whole batches, once


def test_a_step_holds_exactly_a_batch(tmp_path: Path) -> None:
    holder = last_holder(tmp_path)
    for hop in range(7):
        holder.forward(hop, *micro_batch(hop))
    assert holder.serve()
    assert [reply.hop for reply in holder.taken()] == [0, 1, 2]
    assert holder.serve()
    assert [reply.hop for reply in holder.taken()] == [3, 4, 5]
    assert not holder.serve()  # one is not a batch
    assert [reply.hop for reply in holder.taken()] == [6]
    holder.forward(7, *micro_batch(7))
    holder.forward(8, *micro_batch(8))
    assert holder.serve()


def test_a_stage_ahead_of_the_lower_one_makes_larger_steps_with_the_mean_of_the_gradient(tmp_path: Path) -> None:
    """Twelve micro-batches in one step are those of four batches."""
    holders = [last_holder(tmp_path / name) for name in ("behind", "ahead")]
    for number, holder in enumerate(holders):
        holder.loop.global_step = number * (10 + BATCHES_AWAY)
        for hop in range(12):
            holder.forward(hop, *micro_batch(hop), lower_step=10)
    batches = []
    for _ in range(4):
        assert holders[0].loop.gradient(0, 0) is not None
        batches.append(gradients(holders[0]))
    assert holders[1].loop.gradient(0, 0) is None
    holders[1].forward(12, *micro_batch(12), lower_step=11, measure=True)
    loss, _, num_tokens = holders[1].loop.gradient(0, 0) or (None, None, 0)
    assert loss is not None and num_tokens == 4 * 6 * 16
    for name, gradient in gradients(holders[1]).items():
        mean = torch.stack([batch[name] for batch in batches]).mean(0)
        torch.testing.assert_close(gradient, mean, rtol=1e-4, atol=1e-7)


def test_the_loop_returns_after_a_second_though_hops_wait_and_goes_on_with_what_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    holder = last_holder(tmp_path)
    for hop in range(3):
        holder.forward(hop, *micro_batch(hop))
    with monkeypatch.context() as patch:
        patch.setattr(stage_loop, "TURN_S", 0.0)
        assert holder.loop.gradient(0, 0) is None
    assert holder.loop.gradient(0, 0) is not None
    assert [reply.hop for reply in holder.taken()] == [0, 1, 2]


def test_a_full_disk_costs_the_answer_and_no_gradient(tmp_path: Path) -> None:
    holders = [last_holder(tmp_path / name) for name in ("whole", "full")]
    full = holders[1].payloads.path(hop_file(1, HopFile.OWN_BACKWARD))
    full.mkdir()  # cannot be replaced by a file
    for holder in holders:
        for hop in range(3):
            holder.forward(hop, *micro_batch(hop))
        assert holder.loop.gradient(0, 0) is not None
    whole, spoiled = (holder.taken() for holder in holders)
    assert [type(reply) for reply in spoiled] == [Returned, Declined, Returned] and len(whole) == 3
    assert all(torch.equal(gradient, gradients(holders[0])[name]) for name, gradient in gradients(holders[1]).items())


def test_a_step_holds_a_limited_number_of_batches(tmp_path: Path) -> None:
    holder = last_holder(tmp_path)
    holder.loop.global_step = 10
    for hop in range(MOST_BATCHES * 3 - 1):
        holder.forward(hop, *micro_batch(hop))
    assert holder.loop.gradient(0, 0) is None
    holder.forward(1000, *micro_batch(1000))
    assert holder.loop.gradient(0, 0) is not None


def test_a_starved_loop_returns_and_keeps_its_half_batch(tmp_path: Path) -> None:
    holders = [last_holder(tmp_path / name) for name in ("at-once", "starved", "replaced")]
    for hop in range(3):
        holders[0].forward(hop, *micro_batch(hop))
    assert holders[0].loop.gradient(0, 0) is not None
    for holder in holders[1:]:
        holder.forward(0, *micro_batch(0))
        waited_s = holder.loop.waited_s
        assert holder.loop.gradient(0, 0) is None
        assert holder.loop.waited_s - waited_s >= STARVED_S
    holders[2].loop.forget_batch()
    assert not gradients(holders[2])
    holders[2].forward(3, *micro_batch(0))  # a replica of another micro-batch's bytes, under a name of its own
    for holder in holders[1:]:
        holder.forward(1, *micro_batch(1))
        holder.forward(2, *micro_batch(2))
        assert holder.loop.gradient(0, 0) is not None
        assert all(torch.equal(gradient, gradients(holders[0])[name]) for name, gradient in gradients(holder).items())


def test_a_micro_batch_is_added_once(tmp_path: Path) -> None:
    holder = last_holder(tmp_path)
    holder.forward(0, *micro_batch(0), name="ab")
    holder.serve()
    once = gradients(holder)
    holder.taken()
    holder.forward(1, *micro_batch(0), name="ab")
    holder.serve()
    assert reasons(holder.taken()) == ["the micro-batch is added already"]
    assert all(torch.equal(gradient, once[name]) for name, gradient in gradients(holder).items())


def test_of_two_hops_of_one_micro_batch_the_first_to_return_counts(tmp_path: Path) -> None:
    manifest = staged_manifest(3)
    holder = Holder(manifest, manifest_cuts(manifest)[1], tmp_path)
    gradient = coded(torch.ones(2, 16, 64))
    for hop in range(2):
        holder.forward(hop, *micro_batch(0), name="ab")
    holder.serve()
    holder.taken()
    holder.backward(1, gradient, 5.0, name="ab")
    holder.backward(0, gradient, 5.0, name="ab")
    holder.serve()
    first, second = holder.taken()
    assert first == Returned(1, 5.0)
    assert reasons([second]) == ["the micro-batch is added already"]


@pytest.mark.parametrize("late", [0, MAX_LATE_STEPS, MAX_LATE_STEPS + 1, -MAX_LATE_STEPS - 1])
def test_a_gradient_that_is_too_late_is_not_added(tmp_path: Path, late: int) -> None:
    manifest = staged_manifest(3)
    holder = Holder(manifest, manifest_cuts(manifest)[1], tmp_path)
    holder.forward(0, *micro_batch())
    holder.serve()
    holder.taken()
    holder.own_steps += late
    holder.backward(0, coded(torch.ones(2, 16, 64)), 5.0, own_steps=0)
    holder.serve()
    if abs(late) <= MAX_LATE_STEPS:
        assert holder.taken() == [Returned(0, 5.0)]
        assert gradients(holder)
    else:
        assert reasons(holder.taken()) == [f"the gradient is {late} steps late"]
        assert not gradients(holder)


# ---------------------------------------------------------------------- order


def test_backward_passes_come_first_and_new_micro_batches_last(tmp_path: Path) -> None:
    holder = first_holder(tmp_path)
    for hop in range(2):
        holder.hops.put(Begin(hop, f"{hop:032x}"), SESSION)
    holder.serve()
    assert [type(reply) for reply in holder.taken()] == [Forwarded] * 2
    holder.hops.put(Begin(2, "02"), SESSION)
    holder.backward(0, coded(torch.ones(2, 16, 64)), 5.0)
    holder.backward(1, coded(torch.ones(2, 16, 64)), 5.0)
    holder.serve()
    assert [type(reply) for reply in holder.taken()] == [Returned, Returned, Forwarded]


@pytest.mark.parametrize(("batch_size", "in_batch"), [(6, 3), (16, 8)])
def test_a_driver_tells_how_many_micro_batches_wait_for_its_step(tmp_path: Path, batch_size: int, in_batch: int) -> None:
    """Its node begins so many less: a gradient of the batch after next would be two steps late."""
    manifest = staged_manifest(batch_size=batch_size)
    holder = Holder(manifest, manifest_cuts(manifest)[0], tmp_path)
    for hop in range(BATCHES_AWAY * in_batch):
        holder.hops.put(Begin(hop, f"{hop:032x}"), SESSION)
    assert not holder.serve()
    assert holder.taken() == [Forwarded(hop) for hop in range(BATCHES_AWAY * in_batch)]
    for hop in reversed(range(in_batch + 1, BATCHES_AWAY * in_batch)):  # a partner keeps as many as a batch has
        holder.backward(hop, coded(torch.ones(2, 16, 64)), 5.0)
    assert not holder.serve()
    holder.hops.put(Begin(100, "64"), SESSION)
    assert not holder.serve()
    holder.backward(in_batch, coded(torch.ones(2, 16, 64)), 5.0)
    assert holder.serve()
    gathered = [reply.num_gathered for reply in holder.taken() if isinstance(reply, Forwarded | Returned)]
    assert gathered == [*range(1, in_batch), in_batch - 1, 0], "none once the batch is whole: the step comes first"


def test_a_driver_takes_the_windows_of_its_text_in_order(tmp_path: Path) -> None:
    holder, corpus = first_holder(tmp_path), small_corpus(staged_manifest())
    for hop in range(4):
        holder.hops.put(Begin(hop, f"{hop:032x}"), SESSION)
    holder.serve()
    read = torch.cat([torch.frombuffer(bytearray(holder.own(hop, HopFile.OWN_TOKENS)), dtype=torch.int32).view(2, 17) for hop in range(4)])
    assert torch.equal(read.long(), torch.cat([corpus.batch(0), corpus.batch(1)[:2]]))


def test_hops_whose_files_are_gone_are_declined_and_those_of_a_node_that_is_gone_get_no_reply(tmp_path: Path) -> None:
    holder = last_holder(tmp_path)
    holder.forward(0, *micro_batch(0))
    holder.forward(1, *micro_batch(1))
    holder.payloads.remove_hop(0)
    holder.serve()
    declined, done = holder.taken()
    assert reasons([declined]) == ["0 tokens are not 2 sequences of 17"] and done.hop == 1
    holder.forward(2, *micro_batch(2))
    holder.hops.clear()
    assert not holder.serve()
    assert not holder.taken()


def test_an_interrupted_loop_returns_before_the_next_hop(tmp_path: Path) -> None:
    holder = last_holder(tmp_path)
    for hop in range(3):
        holder.forward(hop, *micro_batch(hop))
    holder.hops.interrupt()
    assert not holder.serve()
    assert not holder.taken()
    assert holder.serve()


def test_dropout_follows_from_the_name_and_is_off_for_held_out_text(tmp_path: Path) -> None:
    manifest = staged_manifest(3, dropout=0.3)
    holder = Holder(manifest, manifest_cuts(manifest)[1], tmp_path)
    for hop, (name, measure) in enumerate([("aa", False), ("aa", False), ("bb", False), ("aa", True), ("bb", True)]):
        holder.forward(hop, *micro_batch(), name=name, measure=measure)
    holder.serve()
    one, again, other, measured, measured_again = (holder.own(hop, HopFile.OWN_FORWARD) for hop in range(5))
    assert one == again
    assert measured == measured_again
    assert len({one, other, measured}) == 3


# ---------------------------------------------------------------------- bytes of strangers


def test_bytes_that_no_honest_partner_sends_change_nothing(tmp_path: Path) -> None:
    holder = last_holder(tmp_path, activations="int8")
    holder.forward(0, *micro_batch(0, "int8"))
    holder.serve()
    holder.taken()
    before = gradients(holder)
    tokens, values = micro_batch(1, "int8")
    endless = bytearray(values)
    endless[:2] = b"\x80\x7f"  # a scale of infinity
    outside = (256).to_bytes(4, "little") + tokens[4:]
    last_outside = tokens[:-4] + (1 << 20).to_bytes(4, "little")
    hostile = [(tokens[:-4], values), (tokens[:-1], values), (b"", values), (tokens, values[:-1]), (tokens, b""), (tokens, values + b"x")]
    hostile += [(tokens, bytes(endless)), (outside, values), (last_outside, values)]
    for hop, (wrong_tokens, wrong_values) in enumerate(hostile, 1):
        holder.forward(hop, wrong_tokens, wrong_values)
        assert not holder.serve()
        assert len(reasons(holder.taken())) == 1
    assert all(torch.equal(gradient, before[name]) for name, gradient in gradients(holder).items())
    for hop in (20, 21):
        holder.forward(hop, *micro_batch(hop, "int8"))
    assert holder.serve()


def test_a_gradient_of_a_hop_without_its_text_is_declined(tmp_path: Path) -> None:
    holder = first_holder(tmp_path)
    holder.backward(3, coded(torch.ones(2, 16, 64)), 5.0)
    holder.serve()
    assert reasons(holder.taken()) == ["0 tokens are not 2 sequences of 17"]


def test_a_trainer_that_was_started_again_adds_the_gradient_of_a_hop_that_is_away(tmp_path: Path) -> None:
    """The bytes from partners outlive it: the micro-batch is not computed again by the stages above."""
    manifest = staged_manifest(3)
    before = Holder(manifest, manifest_cuts(manifest)[1], tmp_path)
    before.forward(0, *micro_batch())
    before.serve()
    before.payloads.clear(Writer.TRAINER)
    after = Holder(manifest, manifest_cuts(manifest)[1], tmp_path)
    after.backward(0, coded(torch.ones(2, 16, 64)), 5.0)
    after.serve()
    assert after.taken() == [Returned(0, 5.0)] and gradients(after)


@pytest.mark.parametrize("weight", [torch.inf, 1e4])
@pytest.mark.parametrize("measure", [False, True])
def test_the_last_stage_declines_a_loss_that_no_answer_may_carry(tmp_path: Path, weight: float, measure: bool) -> None:
    holder = last_holder(tmp_path)
    with torch.no_grad():
        holder.stage.lm_head.weight[7] = weight * torch.randn(64, generator=torch.Generator().manual_seed(1)).sign()
    holder.forward(0, *micro_batch(), measure=measure)
    holder.serve()
    assert "the loss is" in reasons(holder.taken())[0]
    assert not gradients(holder)


@pytest.mark.parametrize("loss", [float("nan"), float("inf"), -1.0, 1000.5, 1.7e308])
def test_a_lower_stage_declines_a_loss_that_no_answer_may_carry(tmp_path: Path, loss: float) -> None:
    manifest = staged_manifest(3)
    holder = Holder(manifest, manifest_cuts(manifest)[1], tmp_path)
    holder.forward(0, *micro_batch())
    holder.serve()
    holder.taken()
    holder.backward(0, coded(torch.ones(2, 16, 64)), loss)
    holder.serve()
    assert reasons(holder.taken()) == [f"the loss is {loss}"]
    assert not gradients(holder)


def test_a_gradient_that_overflows_leaves_none(tmp_path: Path) -> None:
    manifest = staged_manifest(3)
    holder = Holder(manifest, manifest_cuts(manifest)[1], tmp_path)
    for hop in range(2):
        holder.forward(hop, *micro_batch(hop))
    holder.serve()
    holder.taken()
    holder.backward(0, coded(torch.ones(2, 16, 64)), 5.0)
    with torch.no_grad():
        holder.stage.model.layers[manifest_cuts(manifest)[1].span.start].mlp.down_proj.weight.mul_(1e36)
    holder.serve()
    holder.taken()
    holder.backward(1, coded(torch.ones(2, 16, 64)), 5.0)
    holder.serve()
    assert "numbers that are not finite" in reasons(holder.taken())[0]
    assert not gradients(holder)


@pytest.mark.parametrize("size", [1e4, 1e20, 7e28])
def test_a_gradient_or_an_activation_of_a_huge_size_costs_its_own_hop_only(tmp_path: Path, size: float) -> None:
    manifest = staged_manifest(3)
    holder = Holder(manifest, manifest_cuts(manifest)[1], tmp_path)
    for hop in range(4):
        holder.forward(hop, *micro_batch(hop))
    holder.serve()
    holder.taken()
    holder.backward(0, coded(torch.ones(2, 16, 64)), 5.0)
    holder.serve()
    assert holder.taken() == [Returned(0, 5.0)]
    before = gradients(holder)
    one_token = torch.zeros(2, 16, 64)
    one_token[1, 3] = size
    holder.backward(1, coded(one_token), 5.0)
    holder.forward(4, micro_batch(4)[0], coded(torch.full((2, 16, 64), 1e3 * size).clamp(max=7e28)))
    assert not holder.serve()
    assert all("the size of the values is" in reason for reason in reasons(holder.taken()))
    assert all(torch.equal(gradient, before[name]) for name, gradient in gradients(holder).items())
    for hop in (2, 3):
        holder.backward(hop, coded(torch.ones(2, 16, 64)), 5.0)
    assert holder.serve(), "the batch is whole"
    assert holder.taken() == [Returned(2, 5.0), Returned(3, 5.0)]
    assert all(bool(parameter.isfinite().all()) for parameter in holder.stage.parameters())


# ---------------------------------------------------------------------- held-out text


@pytest.mark.parametrize("stage", [1, 2])
def test_a_source_whose_tokens_are_wrong_is_named_and_no_other_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: int) -> None:
    """In the middle of three stages a wrong gradient comes back, at the last one wrong labels come."""
    monkeypatch.setattr(stage_loop, "STARVED_S", 0.001)
    manifest = staged_manifest(3, learning_rate=0.01)
    holder = Holder(manifest, manifest_cuts(manifest)[stage], tmp_path)
    (right, values), (wrong, _) = micro_batch(1), micro_batch(2)
    gradient, named = torch.randn(2 * 16 * 64, generator=torch.Generator().manual_seed(3)), dict[str, str]()
    for hop in range(80):  # twenty of each source; sixteen are needed
        source = ("a", "b", "c", "wrong")[hop % 4]
        is_wrong = source == "wrong"
        holder.forward(hop, wrong if is_wrong else right, values, source=source)
        holder.serve()
        if stage == 1:
            assert isinstance(holder.taken()[0], Forwarded)
            holder.backward(hop, coded(-gradient if is_wrong else gradient), 2.0, source=source)
            holder.serve()
        (reply,) = holder.taken()
        assert isinstance(reply, Returned), reply
        if reply.opposed:
            named[source] = reply.opposed
    assert set(named) == {"wrong"} and "with those of 3 others" in named["wrong"]


def test_held_out_micro_batches_are_measured_and_train_nothing(tmp_path: Path) -> None:
    manifest = staged_manifest()
    first, last = (Holder(manifest, cut, tmp_path) for cut in manifest_cuts(manifest))
    [rows] = small_corpus(manifest).held_out_batches(1)
    first.loop.measure(rows)
    for hop in range(4):
        first.hops.put(Begin(hop, f"{hop:032x}"), SESSION)
    first.serve()
    replies = first.taken()
    assert replies == [Forwarded(0, True), Forwarded(1, True), Forwarded(2, True), Forwarded(3)]
    for hop in range(3):
        last.forward(hop, first.own(hop, HopFile.OWN_TOKENS), first.own(hop, HopFile.OWN_FORWARD), measure=True)
    assert not last.serve()
    for reply in last.taken():
        assert isinstance(reply, Returned)
        assert not last.own(reply.hop, HopFile.OWN_BACKWARD)
        first.backward(reply.hop, b"", reply.loss, measure=True)
    first.serve()
    assert not any(isinstance(reply, Declined) for reply in first.taken())
    assert not gradients(first) and not gradients(last)
    assert [held.num_tokens for held in first.loop.held_out] == [32] * 3
    whole = whole_loop(manifest, [first, last])
    with torch.no_grad():
        expected = float(next_token_loss(whole._model, rows))
    assert sum(held.loss for held in first.loop.held_out) / 3 == pytest.approx(expected, rel=1e-5)


def test_only_a_driver_has_a_text(tmp_path: Path) -> None:
    holder = last_holder(tmp_path)
    assert set(holder.loop.parameters) == {name for name, _ in holder.stage.named_parameters()}
    assert holder.loop.device == torch.device("cpu")
    assert Cut((2, 2), 1).is_last
