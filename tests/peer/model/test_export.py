from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from gossamer.peer.machine.events import MeetingDone, MemberSeen, MembersSeen, StateTransferred
from gossamer.peer.machine.home import Home
from gossamer.peer.machine.run_view import RunView
from gossamer.peer.model.card import MAX_NAMED, CardSource, MeasuredLoss, contributors, model_card
from gossamer.peer.model.checkpoint import CheckpointContents, save
from gossamer.peer.model.evaluation import held_out_loss, open_corpus
from gossamer.peer.model.export import MARK, export_model
from gossamer.peer.model.model import build_model
from gossamer.peer.model.weights import load_trained, set_weights
from gossamer.protocol.errors import BadSettings
from tests.full_disk import room_for
from tests.peer.trained_homes import checkpoint, tiny_manifest, trained_home, weights_from

MANIFEST = tiny_manifest(source="text")


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return trained_home(tmp_path / "home", MANIFEST, fast_seed=2)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize(("use_slow_weights", "seed"), [(False, 2), (True, 3)])
def test_transformers_loads_the_folder(tmp_path: Path, use_slow_weights: bool, seed: int) -> None:
    home = trained_home(tmp_path / "home", MANIFEST, fast_seed=2, slow_seed=3)
    export_model(home, folder := tmp_path / "out", use_slow_weights)
    expected = build_model(MANIFEST.model, 0).eval()
    set_weights(expected, weights_from(MANIFEST, seed))
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    tokens = tokenizer("def main():\u20ac", return_tensors="pt")["input_ids"]
    with torch.no_grad():
        assert torch.equal(model(tokens).logits, expected(tokens).logits)
    assert isinstance(tokenizer.decode(model.generate(tokens, max_new_tokens=5)[0]), str)
    assert model.generation_config.eos_token_id == 0
    assert MANIFEST.run_id.hex() in (folder / "README.md").read_text()


def test_a_checkpoint_holds_no_pickle(home: Home, tmp_path: Path) -> None:
    export_model(home, folder := tmp_path / "out")
    names = {path.name for path in folder.iterdir()}
    assert {"model.safetensors", "config.json", "generation_config.json", "tokenizer.json", "README.md", MARK} <= names
    assert not any(name.endswith((".bin", ".pt", ".pkl")) or name.startswith(".") for name in names)


def test_an_earlier_export_is_replaced(home: Home, tmp_path: Path) -> None:
    export_model(home, folder := tmp_path / "out")
    mark = json.loads((folder / MARK).read_text())
    (folder / MARK).write_text(json.dumps(mark | {"files": [*mark["files"], "stale.safetensors", "../home/identity.key"]}))
    (folder / "stale.safetensors").touch()
    (folder / "notes.txt").write_text("mine")
    later = checkpoint(MANIFEST, 9, 1)
    save(home.checkpoints, CheckpointContents(later.run_id, 50, later.tensors, later.state))
    export_model(home, folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert torch.equal(model.get_input_embeddings().weight, weights_from(MANIFEST, 9)["model.embed_tokens.weight"])
    assert json.loads((folder / MARK).read_text())["step"] == 50
    assert not (folder / "stale.safetensors").exists()
    assert (folder / "notes.txt").read_text() == "mine"
    assert home.identity.exists()


def test_an_empty_folder_will_do(home: Home, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    export_model(home, tmp_path / "out")
    assert (tmp_path / "out" / MARK).exists()


def test_an_export_whose_mark_a_power_cut_has_left_empty_is_replaced(home: Home, tmp_path: Path) -> None:
    (folder := tmp_path / "out").mkdir()
    (folder / MARK).touch()
    export_model(home, folder)
    assert "model.safetensors" in json.loads((folder / MARK).read_text())["files"]


def test_a_foreign_folder_is_left_alone(home: Home, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.txt").write_text("mine")
    with pytest.raises(BadSettings, match="not an earlier export") as caught:
        export_model(home, tmp_path / "out")
    assert caught.value.hint
    assert contents(tmp_path / "out") == {"thesis.txt": b"mine"}
    with pytest.raises(BadSettings, match="not a folder"):
        export_model(home, tmp_path / "out" / "thesis.txt")


def test_a_full_disk_leaves_the_earlier_export(home: Home, tmp_path: Path) -> None:
    export_model(home, tmp_path / "out")
    before = contents(tmp_path / "out")
    with room_for(50_000), pytest.raises(BadSettings, match="cannot write to") as caught:
        export_model(home, tmp_path / "out")
    assert "free some space" in caught.value.hint
    assert contents(tmp_path / "out") == before


def test_nothing_is_printed(home: Home, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    export_model(home, tmp_path / "out")
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("use_slow_weights", [False, True])
def test_the_card_has_the_loss_of_the_exported_weights(tmp_path: Path, use_slow_weights: bool) -> None:
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog, and so on and on; " * 400)
    home = trained_home(tmp_path / "home", MANIFEST, fast_seed=2, slow_seed=3)
    held_out = export_model(home, tmp_path / "out", use_slow_weights, text)
    model = build_model(MANIFEST.model, 0)
    set_weights(model, weights_from(MANIFEST, 3 if use_slow_weights else 2))
    corpus = open_corpus(MANIFEST, home, text)
    num_batches = corpus.num_held_out() // MANIFEST.inner.batch_size
    assert held_out.loss == pytest.approx(held_out_loss(model, corpus, num_batches), rel=1e-6)
    assert (
        f"| held-out loss | {held_out.loss:.4f} nats per token, over {num_batches * 2 * 32} tokens |"
        in (tmp_path / "out" / "README.md").read_text()
    )


def test_without_text_the_card_has_no_loss(home: Home, tmp_path: Path) -> None:
    held_out = export_model(home, tmp_path / "out")
    assert "its own text" in held_out.reason
    assert "| held-out loss | not measured |" in (tmp_path / "out" / "README.md").read_text()
    assert export_model(home, tmp_path / "out", num_tokens=0).loss is None
    (tmp_path / "short.txt").write_text("hello")
    with pytest.raises(BadSettings, match="one batch"):
        export_model(home, tmp_path / "out", data=tmp_path / "short.txt")


def met(partner: str, outcome: str = "completed") -> MeetingDone:
    return MeetingDone(partner, 0, outcome, "", "tunnel", 1, 1, 0.1)


def test_the_card_names_the_origin_of_the_model(tmp_path: Path) -> None:
    manifest = tiny_manifest()
    trained = load_trained(trained_home(tmp_path, manifest, fast_seed=2))
    card = model_card([CardSource(trained, [met("12D3KooWa")])], "fast", MeasuredLoss(2.125, 4096))
    steps = f"42 of {manifest.run.total_steps} steps"
    for fact in (
        manifest.run_id.hex(),
        steps,
        "40 inner steps, 1000 tokens",
        "2.1250 nats per token, over 4096 tokens",
        "`12D3KooWa`",
        f"codec {manifest.codec.name}",
        "| fast |",
    ):
        assert fact in card
    assert card.startswith("---\nlibrary_name: transformers\n")


def test_contributors_are_the_peers_whose_weights_were_merged() -> None:
    events = [met("a"), met("b", "failed"), met("c"), met("a"), StateTransferred(("d", "a"), 5, 10, 10, 0.1)]
    assert contributors(events) == ["a", "c", "d"]


def test_the_card_of_a_peer_without_meetings_names_no_contributors(tmp_path: Path) -> None:
    trained = load_trained(trained_home(tmp_path, tiny_manifest(), fast_seed=2))
    card = model_card([CardSource(trained, [])], "fast", MeasuredLoss(None))
    assert "| peers met | none |" in card
    assert "| held-out loss | not measured |" in card


def run_seen(run_id: str, num_members: int, **claims: int) -> RunView:
    """Return what a peer has seen of members that have all trained alike, the last of which may claim otherwise."""
    view, now_s = RunView(), 1_800_000_000.0
    view.begin(run_id, 1000, step_tokens=64)
    honest = [MemberSeen(f"12D3KooW{number:03}", "training", 1, now_s + 300, 100, 6400, 100) for number in range(num_members)]
    view.take(MembersSeen((*honest[:-1], replace(honest[-1], **claims)), ts=now_s))
    return view


def test_the_card_names_the_tokens_of_all_members_and_no_overstated_ones(tmp_path: Path) -> None:
    manifest = tiny_manifest()
    trained = load_trained(trained_home(tmp_path, manifest, fast_seed=2))
    card = model_card([CardSource(trained, [], run_seen(manifest.run_id.hex(), 4, tokens=1 << 53))], "fast", MeasuredLoss(None))
    assert card.count("| 6400 | 25.0 % |") == 4 and "## Members" in card
    many = model_card([CardSource(trained, [], run_seen(manifest.run_id.hex(), MAX_NAMED + 9))], "fast", MeasuredLoss(None))
    assert many.count("| 6400 |") == MAX_NAMED and f"| 9 more | {9 * 6400} | |" in many


def test_the_card_leaves_out_members_of_another_run_and_of_none(tmp_path: Path) -> None:
    trained = load_trained(trained_home(tmp_path, tiny_manifest(), fast_seed=2))
    for seen in (None, RunView(), run_seen("ab" * 32, 4)):
        assert "## Members" not in model_card([CardSource(trained, [], seen)], "fast", MeasuredLoss(None))


def test_an_export_reads_what_the_peer_has_seen_of_its_run(home: Home, tmp_path: Path) -> None:
    home.run.write_text(json.dumps(run_seen(MANIFEST.run_id.hex(), 3).to_record()))
    export_model(home, tmp_path / "out", num_tokens=0)
    assert "`12D3KooW002` | 6400 | 33.3 %" in (tmp_path / "out" / "README.md").read_text()


def test_a_large_swarm_is_not_listed_whole(tmp_path: Path) -> None:
    trained = load_trained(trained_home(tmp_path, tiny_manifest(), fast_seed=2))
    card = model_card([CardSource(trained, [met(f"peer{number}") for number in range(MAX_NAMED + 9)])], "fast", MeasuredLoss(None))
    assert card.count("- `peer") == MAX_NAMED
    assert "and 9 more" in card


def test_a_runs_name_is_only_text(tmp_path: Path) -> None:
    trained = load_trained(trained_home(tmp_path, tiny_manifest(name="x | <img src=http://e> {title}"), fast_seed=2))
    card = model_card([CardSource(trained, [])], "fast", MeasuredLoss(None))
    assert "<img" not in card
    assert "{title}" not in card
