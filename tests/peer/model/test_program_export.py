"""`peer export` and its neighbours on a program run."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from gossamer.peer.machine.event_log import EventLog
from gossamer.peer.machine.events import EvalDone, MeetingDone
from gossamer.peer.machine.home import Home
from gossamer.peer.model.evaluation import compare_homes, evaluate_home
from gossamer.peer.model.export import MARK, WEIGHTS, export_model
from gossamer.protocol.errors import BadManifest, BadSettings
from gossamer.run import Run
from tests.full_disk import room_for
from tests.peer.program_homes import program_home, program_manifest, tensors


@pytest.mark.parametrize(("use_slow_weights", "seed"), [(False, 2), (True, 1)])
@pytest.mark.parametrize("max_fragment_mb", [8.0, 1e-3], ids=["one fragment", "many fragments"])
def test_the_folder_holds_the_tensors_by_name(tmp_path: Path, use_slow_weights: bool, seed: int, max_fragment_mb: float) -> None:
    run = Run("cifar", 300, access="open", settings={"fragments": {"max_fragment_mb": max_fragment_mb}})
    measured = export_model(program_home(tmp_path / "home", program_manifest(run)), folder := tmp_path / "out", use_slow_weights)
    found = load_file(folder / WEIGHTS)
    assert found.keys() == tensors(seed).keys(), "and nothing of the optimizer"
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors(seed).items())
    assert measured.loss is None and measured.reason == "the program measures it"
    assert json.loads((folder / MARK).read_text())["files"] == ["README.md", WEIGHTS]


def test_the_card_names_the_program_and_its_loss(tmp_path: Path) -> None:
    home = program_home(tmp_path / "home", manifest := program_manifest())
    log = EventLog(home.events)
    for event in (EvalDone(20, 2.5, 1), MeetingDone("12D3KooWa", 0, "completed", "", "direct", 1, 1, 0.1), EvalDone(40, 1.25, 1)):
        log.append(event)
    export_model(home, tmp_path / "out")
    card = (tmp_path / "out" / "README.md").read_text()
    for fact in (
        manifest.run_id.hex(),
        "| program | cifar |",
        "| source | https?//example.org/cifar |",
        "| revision | 1a2b3c |",
        "| frozen parameters | none |",
        "40 inner steps, 1000 images",
        "| held-out loss | 1.2500, as the program last measured it, at step 40 |",
        "`12D3KooWa`",
        "load_state_dict",
    ):
        assert fact in card
    assert "transformers" not in card and "tokens" not in card


def test_an_earlier_export_is_replaced_and_a_full_disk_leaves_it(tmp_path: Path) -> None:
    home = program_home(tmp_path / "home", program_manifest())
    export_model(home, folder := tmp_path / "out", use_slow_weights=True)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    with room_for(5_000), pytest.raises(BadSettings, match="cannot write to") as caught:
        export_model(home, folder)
    assert caught.value.hint
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    export_model(home, folder)
    assert (folder / WEIGHTS).read_bytes() != before[WEIGHTS]


def test_a_loss_on_text_is_not_promised(tmp_path: Path) -> None:
    home = program_home(tmp_path / "home", program_manifest())
    for options in ({"data": tmp_path}, {"num_tokens": 3}):
        with pytest.raises(BadSettings, match="no text to measure a loss on") as caught:
            export_model(home, tmp_path / "out", **options)  # type: ignore[arg-type]
        assert caught.value.hint
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("measure", [evaluate_home, lambda home: compare_homes([home.path], home.path)], ids=["eval", "compare"])
@pytest.mark.parametrize("is_trained", [True, False])
def test_what_measures_on_text_says_why_not(tmp_path: Path, measure: Callable[[Home], object], is_trained: bool) -> None:
    with pytest.raises(BadManifest, match="this run trains a program of its members: cifar, source") as caught:
        measure(program_home(tmp_path, program_manifest(), is_trained=is_trained))
    assert "the program measures it" in caught.value.hint


def test_it_loads_nothing_of_a_text_run(tmp_path: Path) -> None:
    home = program_home(tmp_path / "home", program_manifest())
    program = (
        "import sys; from pathlib import Path; from gossamer.peer.machine.home import Home;"
        "from gossamer.peer.model.export import export_model;"
        "export_model(Home(Path(sys.argv[1])), Path(sys.argv[2])); print(*{name.partition('.')[0] for name in sys.modules})"
    )
    command = [sys.executable, "-c", program, str(home.path), str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert not {"transformers", "datasets", "tokenizers", "pyarrow"} & set(done.stdout.split())
