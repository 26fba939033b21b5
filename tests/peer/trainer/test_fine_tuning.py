"""A replica that trains an adapter on answers: what travels and is kept, what counts as a token, and the same on any device."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from torch import Tensor

from gossamer.peer.model.computing import Computing
from gossamer.peer.model.evaluation import held_out_loss, held_out_rows, mask_as_run
from gossamer.peer.model.plan import fragment_codecs
from gossamer.peer.model.start import initial_model
from gossamer.peer.text.batches import Draw
from gossamer.peer.text.corpus import Corpus, load_corpus
from gossamer.peer.text.labels import num_targets
from gossamer.peer.text.tokenizer import load_tokenizer
from gossamer.peer.trainer.need import FROZEN, run_need
from gossamer.peer.trainer.probe import Gain
from gossamer.peer.trainer.ranks import RankProcesses
from gossamer.peer.trainer.text_training import TextProgram
from gossamer.protocol.run.manifest import Manifest
from tests.peer.fine_tuned import base_model, conversations, tuned_manifest
from tests.peer.small import AskedReplica, fingerprint, ignored
from tests.peer.trainer.test_ranks import two_processes

ONE_DEVICE = Computing()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("tuned")
    base_model(made / "base")
    conversations(made / "chats.jsonl", 300, 1)
    return made


def corpus(folder: Path, manifest: Manifest) -> Corpus:
    tokenizer, sizes = load_tokenizer(manifest.tokenizer, folder / "base"), manifest.inner
    draw = Draw(0, b"me", sizes.batch_size, sizes.sequence_length)
    return load_corpus(manifest.data, tokenizer, draw, folder / "chats.jsonl", folder / "cache")


def replica(folder: Path, manifest: Manifest, computing: Computing = ONE_DEVICE, processes: RankProcesses | None = None) -> AskedReplica:
    model = initial_model(manifest, folder / "base")
    mask_as_run(model, manifest)
    ranks = processes.joined(manifest, model) if processes is not None else None
    return AskedReplica(manifest, TextProgram(manifest, model, corpus(folder, manifest), ignored, computing, ranks), 1)


def frozen(one: AskedReplica) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in one.program.model.named_parameters() if name not in one.parameters}


def test_only_factors_move_travel_and_are_kept(folder: Path) -> None:
    one = replica(folder, tuned_manifest(folder / "base"))
    before, base = {name: tensor.clone() for name, tensor in one.parameters.items()}, frozen(one)
    loss = held_out_loss(one.program.model, one.program.corpus, 4)
    for _ in range(40):
        one.inner_step()
    assert held_out_loss(one.program.model, one.program.corpus, 4) < 0.9 * loss
    assert all(not torch.equal(tensor, before[name]) for name, tensor in one.parameters.items())
    assert all(torch.equal(tensor, base[name]) for name, tensor in frozen(one).items()) and len(base) == 21
    num_values = sum(tensor.numel() for tensor in one.parameters.values())
    assert sum(fragment.codec.fragment.numel for fragment in one.fragments) == num_values
    assert sum(tensor.numel() for tensor in one.kept().tensors.values()) < 4 * num_values + 2 * len(before), "fast, slow and AdamW's two"


def test_a_restored_replica_goes_on_bit_for_bit(folder: Path) -> None:
    manifest = tuned_manifest(folder / "base")
    one, other = replica(folder, manifest), replica(folder, manifest)
    for _ in range(3):
        one.inner_step()
    other.restore({name: tensor.clone() for name, tensor in one.kept().tensors.items()}, one.kept().state)
    for each in (one, other):
        each.inner_step()
    assert fingerprint(one) == fingerprint(other)


def test_tokens_that_train_are_what_counts(folder: Path) -> None:
    one = replica(folder, tuned_manifest(folder / "base"))
    batch = one.program.corpus.batch(0)
    assert one.inner_step().num_tokens == one.tokens == int(num_targets(batch)) < batch[:, 1:].numel() // 2
    assert int(num_targets(held_out_rows(one.program.corpus, 2))) == sum(
        int(num_targets(each)) for each in one.program.corpus.held_out_batches(2)
    )


def test_the_loss_is_the_mean_of_all_targets_however_a_batch_is_cut(folder: Path) -> None:
    """Sequences have unequal numbers of targets, so a mean of means would be another loss, and another gradient."""
    manifest = tuned_manifest(folder / "base", data={"mask_documents": False})
    whole, cut = replica(folder, manifest), replica(folder, manifest, Computing(micro_batch=1))
    assert len({int(num_targets(row[None])) for row in whole.program.corpus.batch(0)}) > 1
    losses = [each.inner_step().loss for each in (whole, cut)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    for name, tensor in whole.parameters.items():
        torch.testing.assert_close(cut.parameters[name], tensor, rtol=1e-3, atol=1e-5)
    in_parts, at_once = (held_out_loss(whole.program.model, whole.program.corpus, 3, computing=Computing(micro_batch=n)) for n in (1, 4))
    assert in_parts == pytest.approx(at_once, rel=1e-5)


def test_recomputed_activations_give_the_same_factors(folder: Path) -> None:
    manifest = tuned_manifest(folder / "base")
    kept, recomputed = replica(folder, manifest), replica(folder, manifest, Computing(recompute=True))
    assert recomputed.inner_step().loss == pytest.approx(kept.inner_step().loss, rel=1e-5)
    for name, tensor in kept.parameters.items():
        torch.testing.assert_close(recomputed.parameters[name], tensor, rtol=1e-3, atol=1e-5)


@pytest.mark.timeout(120)
def test_two_ranks_train_the_same_adapter_without_a_folder_at_the_second(folder: Path, tmp_path: Path) -> None:
    manifest = tuned_manifest(folder / "base")
    alone = replica(folder, manifest)
    together = replica(folder, manifest, Computing(num_devices=2), two_processes(tmp_path / "ranks", manifest))
    try:
        for _ in range(3):
            losses = [each.inner_step().loss for each in (alone, together)]
            assert losses[1] == pytest.approx(losses[0], rel=1e-4)
        assert together.program.inner.devices.state().keys() == alone.program.inner.devices.state().keys()
    finally:
        together.program.inner.devices.close()
    for name, tensor in alone.parameters.items():
        torch.testing.assert_close(together.parameters[name], tensor, rtol=1e-3, atol=1e-4)


def test_the_probe_measures_targets_with_factors_that_moved(folder: Path) -> None:
    one = replica(folder, tuned_manifest(folder / "base"))
    for _ in range(20):
        one.inner_step()
    probe = one.program.new_probe(random.Random(1))
    (codec,) = fragment_codecs(one.manifest, {name: tuple(tensor.shape) for name, tensor in one.parameters.items()})
    first, more = probe.draw()
    assert 64 <= int(num_targets(first)) <= 256 < int(num_targets(more))
    here, kept = torch.zeros(codec.fragment.numel), fingerprint(one)
    before = probe.losses(codec.fragment, here, more)
    assert before.shape == (int(num_targets(more)),)
    worse = probe.losses(codec.fragment, here - 0.5, more)
    assert probe.gain(before, worse).value < 0 and fingerprint(one) == kept


def test_a_gain_on_one_token_is_a_number() -> None:
    gain = Gain.of(torch.tensor([2.0]), torch.tensor([1.5]))
    assert (gain.value, gain.scale, gain.noise) == (0.5, 2.0, float("inf"))


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_frozen_weights_are_counted_and_nothing_of_them_travels(folder: Path, device: str) -> None:
    adapted, whole = (run_need(tuned_manifest(folder / "base", rank=rank), device) for rank in (4, 0))
    num_frozen = sum(tensor.numel() for tensor in frozen(replica(folder, tuned_manifest(folder / "base"))).values())
    held = adapted.device if device == "cuda" else adapted.memory
    assert held[FROZEN] == 4 * num_frozen == 4 * whole.num_params
    assert FROZEN not in whole.memory | whole.device
    assert adapted.plan.state_bytes < whole.plan.state_bytes and sum(adapted.disk.values()) < sum(whole.disk.values())
