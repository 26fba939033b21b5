"""A callback that puts a Lightning Trainer into a swarm."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from gossamer.place import Place, needs
from gossamer.protocol.errors import BadSettings

with needs("lightning"):
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.strategies import DeepSpeedStrategy
    from lightning.pytorch.utilities.data import extract_batch_size


class SwarmCallback(Place, Callback):  # type: ignore[misc]
    """Train with others: pass it to a Trainer, which joins when training begins.

        swarm = SwarmCallback(gossamer.Run("images", 2000), evaluate=evaluate, home="~/images")    # first peer; shows an invite
        swarm = SwarmCallback(invite, evaluate=evaluate, home="~/images")                          # others; None goes on from the home
        Trainer(callbacks=[swarm], max_epochs=-1).fit(module, loader)

    `evaluate`, `home`, `state` and `settings` are those of `gossamer.host`. The module's trainable parameters and buffers of floats travel.

    Training ends with the run; `max_steps` and `max_epochs` must last as long, and `min_steps` and `min_epochs` stay out. At the end `fit`
    returns with the result of the run in the module. The home's checkpoint holds weights, optimizers and place in the run: the same script
    goes on with it, and its weights win over those of `ckpt_path`. An exception leaves the run with the last good checkpoint, Ctrl-C with a
    new one.

    A batch that ends with an optimizer's step is a step; batches before it, as of `accumulate_grad_batches`, count in it. Override
    `count` if the run's unit is not examples.

    `rate` returns the learning rate of all parameters in the next step: `rate=lambda swarm: swarm.rate(3e-4, warmup_steps=100)` follows the
    clock of the run. Without it the module's schedulers stay, which follow this peer's own steps.

    One process and one model in it: raises BadSettings for several ranks, which come later, and for DeepSpeed. Belongs to the thread that
    trains.
    """

    _num_steps = 0  # of the optimizers
    _num_tokens = 0  # since the last step

    def count(self, batch: Any) -> int:
        """Return how much of the run's unit a batch is: its number of examples."""
        return int(extract_batch_size(batch))

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Host or join, and wait for others as the settings say. Raises OperatorError with a hint."""
        if trainer.world_size > 1:
            raise BadSettings(
                f"the Trainer has {trainer.world_size} ranks; a peer has one as yet", hint="set devices=1, or one process for each device"
            )
        if isinstance(trainer.strategy, DeepSpeedStrategy):
            raise BadSettings("DeepSpeed keeps weights of its own, which would undo each meeting", hint="use another strategy")
        if trainer.min_epochs or trainer.min_steps:
            raise BadSettings("the run decides when training ends", hint="leave min_epochs and min_steps out")
        self._num_steps, self._num_tokens = trainer.global_step, 0
        self._begin(pl_module, trainer.optimizers, trainer.estimated_stepping_batches - trainer.global_step)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int) -> None:
        """End a step of the swarm if an optimizer has made one; stop the Trainer when the run is over, with the result in the module."""
        self._num_tokens += self.count(batch)
        if trainer.global_step == self._num_steps:
            return
        num_tokens, self._num_tokens, self._num_steps = self._num_tokens, 0, trainer.global_step
        trainer.should_stop = self._step(num_tokens, _loss_of(outputs)) or trainer.should_stop

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Leave: after Ctrl-C with a new checkpoint, else with the last good one."""
        self._end(exception)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save and leave, unless it is done."""
        self._end(None)


def _loss_of(outputs: Any) -> Tensor | None:
    loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
    return loss if isinstance(loss, Tensor) else None
