"""`gossamer.transformers`: real Trainers in real swarms."""

from __future__ import annotations

import subprocess
import sys
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import Trainer, TrainerCallback, TrainingArguments

import gossamer
from gossamer.peer.machine.home import Home
from gossamer.protocol.errors import BadSettings
from gossamer.protocol.run.manifest import SignedManifest
from gossamer.transformers import SwarmCallback
from tests.api.forked import ROOT, Forks
from tests.api.test_swarm import ForkedPrograms, all_ended, shortened

NUM_ADAPTER_VALUES = 2 * 8 * (2 * (64 + 64) + (128 + 64))  # layers, rank; q_proj and v_proj, down_proj

pytestmark = pytest.mark.filterwarnings("default")  # the framework's own


@pytest.fixture
def programs(tmp_path: Path, forks: Forks) -> ForkedPrograms:
    """Programs that use transformers, in a process that has imported it."""
    forks.load("accelerate", "peft", "transformers.models.llama.modeling_llama")  # not the Trainer: pyarrow starts a thread
    return ForkedPrograms(tmp_path, forks)


class Regression(nn.Module):
    """A model as a Trainer takes it; only its second layer trains."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(4, 8).requires_grad_(False)
        self.second = nn.Linear(8, 1)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": (self.second(self.first(x).tanh()).flatten() - labels).square().mean()}


class Failing(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 5:
            raise RuntimeError("a bug of the user's")


def rows(number: int) -> list[dict[str, Tensor]]:
    draws = torch.Generator().manual_seed(number)
    return [{"x": torch.randn(4, generator=draws), "labels": torch.randn((), generator=draws)} for _ in range(number)]


def callback_of(model: Regression, home: Path, run: gossamer.Run | None, **options: Any) -> SwarmCallback:
    held_out = rows(32)
    data = {name: torch.stack([row[name] for row in held_out]) for name in ("x", "labels")}
    settings = {"listen": "127.0.0.1", "alone": True, "checkpoint_interval_steps": 10}
    return SwarmCallback(
        run, evaluate=lambda: model(**data)["loss"], home=home, settings=settings, show_invite=lambda invite: None, **options
    )


def trainer_of(model: Regression, folder: Path, callbacks: list[TrainerCallback], **options: Any) -> Trainer:
    arguments = TrainingArguments(
        output_dir=str(folder / "trainer"),
        per_device_train_batch_size=4,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        **{"max_steps": 30, **options},
    )
    return Trainer(model=model, args=arguments, train_dataset=rows(64), callbacks=callbacks)


@pytest.mark.timeout(300)
def test_two_trainers_of_an_adapter_end_alike_and_exchange_its_values_alone(programs: ForkedPrograms, tmp_path: Path) -> None:
    example = str(shortened("sft_lora.py", tmp_path))
    with all_ended(programs):
        host = programs.fork(example, str(tmp_path / "first"))
        guest = programs.fork(example, str(tmp_path / "second"), f"gossamer1{host.says('gossamer1', 120.0)}")
        assert host.end() == guest.end()
        assert f"{NUM_ADAPTER_VALUES} values" in host.lines()[-1]
    manifest: Any = SignedManifest.from_bytes(Home(tmp_path / "second").manifest.read_bytes()).manifest()
    assert sum(map(prod, manifest.model.shapes.values())) == NUM_ADAPTER_VALUES
    assert all(".lora_" in name for name in manifest.model.shapes)
    assert len(manifest.program.base) == 64
    status = Home(tmp_path / "first").last_status()
    assert status["meetings"]["completed"] > 0 and status["state"] == "done"


@pytest.mark.timeout(120)
def test_the_run_ends_the_trainer_and_accumulated_batches_are_one_step(tmp_path: Path) -> None:
    model = Regression()
    callback = callback_of(model, tmp_path / "home", gossamer.Run("a", 20), rate=lambda swarm: swarm.rate(1e-2, warmup_steps=4))
    trainer = trainer_of(model, tmp_path, [callback], gradient_accumulation_steps=2)
    trainer.train()
    assert trainer.state.global_step == callback.swarm.clock.steps == 20
    assert trainer.optimizer.param_groups[0]["lr"] == pytest.approx(1e-3, rel=0.1)  # a tenth of the peak, not the Trainer's schedule
    status = Home(tmp_path / "home").last_status()
    assert (status["state"], status["own_steps"], status["tokens"], status["unit"]) == ("done", 20, 20 * 8, "examples")


@pytest.mark.timeout(120)
def test_an_exception_leaves_the_run_and_the_same_script_goes_on(tmp_path: Path) -> None:
    model, home, run = Regression(), tmp_path / "home", gossamer.Run("a", 20)
    with pytest.raises(RuntimeError, match="a bug of the user's"), callback_of(model, home, run) as callback:
        trainer_of(model, tmp_path, [Failing(), callback]).train()
    assert Home(home).last_status()["state"] == "failed" and not Home(home).holder()
    again = callback_of(model, home, None)
    trainer_of(model, tmp_path, [again]).train()
    assert again.swarm.clock.steps == 20 and Home(home).last_status()["state"] == "done"


@pytest.mark.timeout(120)
def test_an_exception_without_a_with_block_ends_the_process_and_the_peer(programs: ForkedPrograms, tmp_path: Path) -> None:
    (program := tmp_path / "program.py").write_text(f"""
from tests.api.test_transformers_callback import *
model, folder = Regression(), Path({str(tmp_path)!r})
trainer_of(model, folder, [Failing(), callback_of(model, folder / "home", gossamer.Run("a", 20))]).train()
""")
    with all_ended(programs):
        failing = programs.fork(str(program))
        assert failing.process.wait(100) == 1 and failing.lines()[-1] == "RuntimeError: a bug of the user's"
    assert Home(tmp_path / "home").last_status()["state"] == "left" and not Home(tmp_path / "home").holder()


@pytest.mark.timeout(120)
def test_tokens_are_counted_if_the_run_counts_them(tmp_path: Path) -> None:
    model, run = Regression(), gossamer.Run("a", 10, "tokens")
    model.main_input_name = "x"
    with pytest.raises(BadSettings, match="the run counts tokens, and the Trainer does not"):
        trainer_of(model, tmp_path, [callback_of(model, tmp_path / "home", run)]).train()
    assert not Home(tmp_path / "home").holder()
    trainer_of(model, tmp_path, [callback_of(model, tmp_path / "home", run)], include_num_input_tokens_seen="all").train()
    assert Home(tmp_path / "home").last_status()["tokens"] == 10 * 4 * 4


@pytest.mark.timeout(120)
def test_a_trainer_that_ends_before_the_run_says_so_and_leaves(tmp_path: Path) -> None:
    model = Regression()
    callback = callback_of(model, tmp_path / "home", gossamer.Run("a", 100))
    with pytest.warns(UserWarning, match="the Trainer ends after 5 steps and leaves a run that lasts 100 more"):
        trainer_of(model, tmp_path, [callback], max_steps=5).train()
    assert Home(tmp_path / "home").last_status()["state"] == "left"


def test_ranks_and_deepspeed_are_refused(tmp_path: Path) -> None:
    model = Regression()
    callback, optimizer = callback_of(model, tmp_path / "home", gossamer.Run("a", 5)), torch.optim.AdamW(model.second.parameters())
    for arguments, reason in ((SimpleNamespace(world_size=2), "has 2 ranks"), (SimpleNamespace(world_size=1, deepspeed="x"), "DeepSpeed")):
        with pytest.raises(BadSettings, match=reason):
            callback.on_train_begin(arguments, SimpleNamespace(), SimpleNamespace(), model=model, optimizer=optimizer)
    with pytest.raises(BadSettings, match="training has not begun"):
        callback.swarm.clock  # noqa: B018


@pytest.mark.parametrize("module", ["gossamer.transformers", "gossamer.lightning"])
def test_a_missing_framework_is_named_with_the_command_that_installs_it(module: str) -> None:
    framework = module.rpartition(".")[2]
    program = f"import sys; sys.modules[{framework!r}] = None; import {module}"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, check=False)
    assert f"a package that is not installed ({framework})" in done.stderr and f"hint: pip install {framework}" in done.stderr


def test_no_other_module_loads_a_framework() -> None:
    program = "import sys, gossamer; gossamer.Swarm, gossamer.Run; print(*{name.partition('.')[0] for name in sys.modules})"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, check=True)
    assert not {"transformers", "accelerate", "lightning", "peft"} & set(done.stdout.split())
