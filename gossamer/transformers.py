"""A callback that puts a `transformers.Trainer`, with or without an adapter of peft, into a swarm."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.optim import Optimizer

from gossamer.place import Place, needs
from gossamer.protocol.errors import BadSettings

with needs("transformers accelerate"):
    from accelerate.optimizer import AcceleratedOptimizer
    from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

TOKENS = "tokens"  # the unit of a run whose members count tokens


class SwarmCallback(Place, TrainerCallback):  # type: ignore[misc]
    """Train with others: pass it to a Trainer, which joins when training begins.

        swarm = SwarmCallback(gossamer.Run("sft", 2000), evaluate=evaluate, home="~/sft")     # first peer; shows an invite
        swarm = SwarmCallback(invite, evaluate=evaluate, home="~/sft")                        # others; None goes on from the home
        with swarm:
            Trainer(model, TrainingArguments(..., max_steps=2000), train_dataset=data, callbacks=[swarm]).train()

    `evaluate`, `home`, `state` and `settings` are those of `gossamer.host`. The trainable parameters and the buffers of floats travel: of a
    LoRA model, the adapter alone. Members must have equal frozen weights; their digest is part of the run.

    Training ends with the run; `max_steps` and the epochs must last as long. At the end `train` returns with the result of the run in the
    model. The home's checkpoint holds weights, optimizer and place in the run: the same script goes on with it, and its weights win over
    those of `resume_from_checkpoint`.

    Steps count in examples, `per_device_train_batch_size * gradient_accumulation_steps` each, or in tokens if the run's unit is "tokens";
    then set `include_num_input_tokens_seen`. The status shows the loss that the Trainer logs.

    `rate` returns the learning rate of the next step, of all parameters: `rate=lambda swarm: swarm.rate(3e-4, warmup_steps=100)` follows
    the clock of the run. Without it the Trainer's scheduler stays, which follows this peer's own steps. The Trainer logs its scheduler's
    rate.

    The Trainer tells no callback of an exception that ends training. The `with` block then leaves the run: after Ctrl-C with a new
    checkpoint, else with the last good one. Without the block the peer leaves when the process ends, with the last good checkpoint.

    One process and one model in it: raises BadSettings for several ranks and for DeepSpeed. Belongs to the thread that trains.
    """

    _loss: float | None = None
    _num_tokens = 0  # that the Trainer has counted
    _is_counting_tokens = False

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        *,
        model: nn.Module,
        optimizer: Optimizer,
        **kwargs: Any,
    ) -> None:
        """Host or join, and wait for others as the settings say. Raises OperatorError with a hint."""
        if args.world_size > 1:
            raise BadSettings(f"the Trainer has {args.world_size} ranks; a peer has one", hint="start one process without a launcher")
        if args.deepspeed:
            raise BadSettings("DeepSpeed keeps weights of its own, which would undo each meeting", hint="leave `deepspeed` out")
        bare = optimizer.optimizer if isinstance(optimizer, AcceleratedOptimizer) else optimizer
        self._begin(model, [bare], state.max_steps - state.global_step)
        self._is_counting_tokens, self._num_tokens = self.swarm.status["unit"] == TOKENS, state.num_input_tokens_seen
        if self._is_counting_tokens and args.include_num_input_tokens_seen == "no":
            error = BadSettings(
                "the run counts tokens, and the Trainer does not",
                hint='set include_num_input_tokens_seen="non_padding" in TrainingArguments',
            )
            self._end(error)
            raise error

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> TrainerControl:
        """End a step of the swarm after the optimizer's; stop the Trainer when the run is over, with the result in the model."""
        if self._is_counting_tokens:
            num_new, self._num_tokens = state.num_input_tokens_seen - self._num_tokens, state.num_input_tokens_seen
        else:
            num_new = state.train_batch_size * args.gradient_accumulation_steps
        control.should_training_stop = self._step(num_new, self._loss) or control.should_training_stop
        return self._ended_by(control)

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, *, logs: dict[str, float], **kwargs: Any
    ) -> None:
        """Keep the loss for the status."""
        self._loss = logs.get("loss", self._loss)

    def on_epoch_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> TrainerControl:
        """Leave if another callback has stopped the Trainer: before it loads its best model."""
        return self._ended_by(control)

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Save and leave, unless it is done."""
        self._end(None)

    def _ended_by(self, control: TrainerControl) -> TrainerControl:
        if control.should_training_stop:
            self._end(None)
        return control
