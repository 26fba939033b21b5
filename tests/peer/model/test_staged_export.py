"""The stages that peers hold are put together into one model that transformers loads."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from gossamer.optim.fragments import gather
from gossamer.peer.machine.events import MeetingDone, MemberSeen, MembersSeen, to_line
from gossamer.peer.machine.home import Home
from gossamer.peer.machine.room import Room
from gossamer.peer.machine.run_view import RunView
from gossamer.peer.model import staged_export
from gossamer.peer.model.checkpoint import CheckpointContents, save
from gossamer.peer.model.evaluation import evaluate_home, held_out_loss, open_corpus
from gossamer.peer.model.export import export_model
from gossamer.peer.model.model import build_model
from gossamer.peer.model.plan import fragment_codecs
from gossamer.peer.model.stages import manifest_cuts, stage_shapes
from gossamer.peer.model.weights import mean_weights, set_weights
from gossamer.protocol.errors import BadSettings
from gossamer.protocol.identity import Identity
from gossamer.protocol.run.manifest import Manifest, SignedManifest, StagedManifest
from tests.peer.trained_homes import LLAMA, trained_home, weights_from


def staged_manifest(name: str = "staged") -> StagedManifest:
    manifest = Manifest.checked(
        {
            "run": {"name": name, "issuers": [str(Identity(bytes(32)).peer_id)]},
            "model": {"architecture": "llama", "config": LLAMA | {"tie_word_embeddings": False, "num_hidden_layers": 3}},
            "stages": {"count": 2, "blocks": [1, 2]},
            "inner": {"batch_size": 2, "sequence_length": 32},
            "fragments": {"blocks_per_fragment": 1},
        }
    )
    assert isinstance(manifest, StagedManifest)
    return manifest


MANIFEST = staged_manifest()


def home_of_stage(
    path: Path, stage: int, seed: int, manifest: StagedManifest = MANIFEST, slow_seed: int = 1, global_step: int = 42
) -> Home:
    """Make a home whose checkpoint holds one stage of the weights of these seeds."""
    home = Home(path)
    home.create()
    home.manifest.write_bytes(SignedManifest.sign(manifest, Identity.load_or_create(home.identity)).to_bytes())
    shapes = stage_shapes(manifest.model, manifest_cuts(manifest)[stage])
    fast, slow = weights_from(manifest, seed), weights_from(manifest, slow_seed)
    tensors = {f"fast/{name}": fast[name] for name in shapes}
    for codec in fragment_codecs(manifest, shapes):
        tensors[f"slow/{codec.fragment.id}"] = gather(codec.fragment, slow)
    save(home.checkpoints, CheckpointContents(manifest.run_id, 40, tensors, {"clock_steps": global_step, "tokens": 1000}))
    return home


@pytest.mark.parametrize(("use_slow_weights", "seed"), [(False, 2), (True, 3)])
def test_transformers_loads_what_is_put_together(tmp_path: Path, use_slow_weights: bool, seed: int) -> None:
    first, last = (home_of_stage(tmp_path / str(stage), stage, 2, slow_seed=3) for stage in range(2))
    measured = export_model(last, folder := tmp_path / "out", use_slow_weights, num_tokens=2048, others=[first])
    expected = build_model(MANIFEST.model, 0)
    set_weights(expected, weights_from(MANIFEST, seed))
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    assert {name: value.tolist() for name, value in loaded.state_dict().items()} == {
        name: value.tolist() for name, value in expected.state_dict().items()
    }
    corpus = open_corpus(MANIFEST, last, None)
    assert measured.loss == pytest.approx(held_out_loss(loaded, corpus, 2048 // 64), abs=1e-6)
    corpus.close()
    names = {path.name for path in folder.iterdir()}
    assert {"model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "model.safetensors.index.json"} <= names
    assert loaded.config.eos_token_id == 0
    assert MANIFEST.run_id.hex() in (folder / "README.md").read_text()


def test_peers_of_one_stage_are_averaged(tmp_path: Path) -> None:
    homes = [home_of_stage(tmp_path / str(number), stage, seed) for number, (stage, seed) in enumerate([(0, 2), (1, 2), (1, 4)])]
    export_model(homes[0], folder := tmp_path / "out", num_tokens=0, others=homes[1:])
    state = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    expected = mean_weights([weights_from(MANIFEST, seed) for seed in (2, 4)])
    assert torch.equal(state["lm_head.weight"], expected["lm_head.weight"])
    assert torch.equal(state["model.embed_tokens.weight"], weights_from(MANIFEST, 2)["model.embed_tokens.weight"])


def test_the_card_names_the_holders_of_all_stages_and_those_whose_work_they_carry(tmp_path: Path) -> None:
    first, last, other = (home_of_stage(tmp_path / str(number), stage, 2) for number, stage in enumerate((0, 1, 1)))
    for number, home in enumerate((first, last)):
        met = MeetingDone(f"12D3KooWmet{number}", 0, "completed", "", "tunnel", 1, 1, 0.1)
        home.events.write_bytes(to_line(met))
        view = RunView()
        view.begin(MANIFEST.run_id.hex(), 1000, 64, stages=2)
        member = MemberSeen(f"12D3KooWseen{number}", "training", 1, 2e9, 100, 6400, 100, stage=number + 1)
        view.take(MembersSeen((member,), ts=1.8e9))
        home.run.write_text(json.dumps(view.to_record()))
    export_model(first, folder := tmp_path / "out", num_tokens=0, others=[last, other])
    card = (folder / "README.md").read_text()
    ids = [str(Identity.load_or_create(home.identity).peer_id) for home in (first, last, other)]
    assert f"| stage 1 | `{ids[0]}`: 40 inner steps, 1000 tokens |" in card
    assert f"| stage 2 | `{ids[1]}`: 40 inner steps, 1000 tokens; `{ids[2]}`: 40 inner steps, 1000 tokens |" in card
    for name in (*ids, "12D3KooWmet0", "12D3KooWmet1"):
        assert f"- `{name}`" in card
    assert "| peers met | 2 at least |" in card and "| clock | 42 of" in card
    assert "| `12D3KooWseen0`, stage 1 | 6400 | 50.0 % |" in card and "| `12D3KooWseen1`, stage 2 | 6400 | 50.0 % |" in card


def test_what_cannot_be_put_together_is_refused(tmp_path: Path) -> None:
    first = home_of_stage(tmp_path / "first", 0, 2)
    with pytest.raises(BadSettings, match="stage 2 of 2 is not among the given homes") as caught:
        export_model(first, tmp_path / "out")
    assert "--with HOME" in caught.value.hint
    other = home_of_stage(tmp_path / "other", 1, 2, staged_manifest("other"))
    with pytest.raises(BadSettings, match="holds another run"):
        export_model(first, tmp_path / "out", others=[other])
    behind = [home_of_stage(tmp_path / str(step), 1, 2, global_step=step) for step in (42, 9000)]
    with pytest.raises(BadSettings, match="homes of stage 2 are at step 42 and at step 9000"):
        export_model(first, tmp_path / "out", others=behind)
    with pytest.raises(BadSettings, match="no loss of its own"):
        evaluate_home(first)
    whole = trained_home(tmp_path / "whole", Manifest.checked({"run": {"access": "open"}, "model": {"config": LLAMA}}), 2)
    with pytest.raises(BadSettings, match="--with has no effect"):
        export_model(whole, tmp_path / "out", others=[first])
    assert not (tmp_path / "out").exists()


def test_a_model_that_does_not_fit_here_is_written_and_not_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staged_export, "memory_room", lambda held_bytes: Room(1000, "free"))
    first, last = (home_of_stage(tmp_path / str(stage), stage, 2) for stage in range(2))
    measured = export_model(first, tmp_path / "out", others=[last])
    assert measured.loss is None and "the whole model takes 0.0 GB" in measured.reason
