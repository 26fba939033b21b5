"""`gossamer.lightning`: real Trainers in real swarms."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import gossamer
from gossamer.lightning import SwarmCallback
from gossamer.peer.machine.home import Home
from gossamer.protocol.errors import BadSettings
from tests.api.forked import Forks
from tests.api.test_swarm import STEPS, ForkedPrograms, all_ended, shortened

pytestmark = pytest.mark.filterwarnings("default")  # the framework's own


class Regression(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 1)

    def loss(self, batch: list[Tensor]) -> Tensor:
        return (self.layer(batch[0]) - batch[1]).square().mean()

    def training_step(self, batch: list[Tensor], number: int) -> Tensor:
        return self.loss(batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Failing(Callback):
    def on_train_batch_end(self, trainer: Trainer, *others: Any) -> None:
        if trainer.global_step == 5:
            raise RuntimeError("a bug of the user's")


def data() -> TensorDataset:
    draws = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(64, 4, generator=draws), torch.randn(64, 1, generator=draws))


def callback_of(module: Regression, home: Path, run: gossamer.Run | None, **options: Any) -> SwarmCallback:
    settings = {"listen": "127.0.0.1", "alone": True, "checkpoint_interval_steps": 10}
    return SwarmCallback(run, evaluate=lambda: module.loss(data().tensors), home=home, settings=settings, **options)


def fit(module: Regression, callbacks: list[Callback], **options: Any) -> Trainer:
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = Trainer(accelerator="cpu", callbacks=callbacks, **quiet, **{"max_epochs": -1, **options})
    trainer.fit(module, DataLoader(data(), batch_size=4))
    return trainer


@pytest.mark.timeout(300)
def test_two_trainers_end_alike(forks: Forks, tmp_path: Path) -> None:
    forks.load("lightning.pytorch")
    programs, example = ForkedPrograms(tmp_path, forks), str(shortened("images_lightning.py", tmp_path))
    with all_ended(programs):
        host = programs.fork(example, str(tmp_path / "first"))
        guest = programs.fork(example, str(tmp_path / "second"), f"gossamer1{host.says('gossamer1', 120.0)}")
        assert host.end() == guest.end()
        assert host.lines()[-1].endswith(f"{STEPS} steps of the run")
    assert Home(tmp_path / "first").last_status()["meetings"]["completed"] > 0


@pytest.mark.timeout(120)
def test_the_run_ends_the_trainer_and_accumulated_batches_are_one_step(tmp_path: Path) -> None:
    module = Regression()
    callback = callback_of(module, tmp_path / "home", gossamer.Run("a", 20), rate=lambda swarm: swarm.rate(1e-2, warmup_steps=4))
    trainer = fit(module, [callback], accumulate_grad_batches=2)
    assert trainer.global_step == callback.swarm.clock.steps == 20
    assert trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(1e-3, rel=0.1)  # a tenth of the peak
    status = Home(tmp_path / "home").last_status()
    assert (status["state"], status["own_steps"], status["tokens"]) == ("done", 20, 20 * 8)


@pytest.mark.timeout(120)
def test_an_exception_leaves_the_run_and_the_same_script_goes_on(tmp_path: Path) -> None:
    module, home = Regression(), tmp_path / "home"
    with pytest.raises(RuntimeError, match="a bug of the user's"):
        fit(module, [Failing(), callback_of(module, home, gossamer.Run("a", 20))])
    assert Home(home).last_status()["state"] == "failed" and not Home(home).holder()
    again = callback_of(module, home, None)
    fit(module, [again])
    assert again.swarm.clock.steps == 20 and Home(home).last_status()["state"] == "done"


@pytest.mark.timeout(120)
def test_a_trainer_that_ends_before_the_run_says_so_and_leaves(tmp_path: Path) -> None:
    module = Regression()
    with pytest.warns(UserWarning, match="the Trainer ends after 5 steps and leaves a run that lasts 100 more"):
        fit(module, [callback_of(module, tmp_path / "home", gossamer.Run("a", 100))], max_steps=5)
    assert Home(tmp_path / "home").last_status()["state"] == "left"


def test_ranks_and_shortest_lengths_are_refused(tmp_path: Path) -> None:
    module = Regression()
    callback = callback_of(module, tmp_path / "home", gossamer.Run("a", 5))
    with pytest.raises(BadSettings, match="the Trainer has 2 ranks"):
        callback.on_train_start(Trainer(accelerator="cpu", devices=2, strategy="ddp_spawn", logger=False), module)
    with pytest.raises(BadSettings, match="the run decides when training ends"):
        fit(module, [callback], min_steps=7)
