"""A trainer process that meets and does not train, for `meeting_cost`: its inner steps sleep, and move the weights a little.

All else is the real trainer's. Fragments become due as soon as `meet` lies in the home folder, each again as soon as it is counted down.
"""

from __future__ import annotations

import itertools
import os
import sys
import time
from contextlib import AbstractContextManager

import torch

from gossamer.peer.machine.child import Child, run_child
from gossamer.peer.trainer.process import build
from gossamer.peer.trainer.replica import ALONE
from gossamer.peer.trainer.stopwatch import InnerStep
from gossamer.peer.trainer.text_training import TextTrainer

STEP_S = 0.004
NUM_TOKENS = 512
MOVE = 1e-3
MOVE_STEPS = 8
CLOCK_STEPS = 1000  # to one that counts: no partner is left behind, and nothing is evaluated or saved

FLAG = "meet"


def without_training(child: Child) -> TextTrainer:
    """Put a trainer together whose steps cost nothing."""
    trainer = build(child)
    replica = trainer._replica
    flag = child.settings.config.home / FLAG
    tick = replica.countdown.tick
    numbers = itertools.count()

    @torch.no_grad()
    def inner_step(beside: AbstractContextManager[None] = ALONE) -> InnerStep:
        time.sleep(STEP_S)
        number = next(numbers)
        if number % MOVE_STEPS == 0:
            for parameter in replica.parameters.values():
                parameter.add_(torch.randn_like(parameter), alpha=MOVE)
        replica.own_steps += number % CLOCK_STEPS == 0
        replica.global_step += number % CLOCK_STEPS == 0
        replica.tokens += NUM_TOKENS
        replica.count(NUM_TOKENS)
        return InnerStep(1.0, 0.0, NUM_TOKENS)

    replica.inner_step = inner_step  # type: ignore[method-assign]
    replica.countdown.tick = lambda: tick() if flag.exists() else []  # type: ignore[method-assign]
    return trainer


if __name__ == "__main__":
    exit_code = run_child(lambda child: without_training(child).run())
    sys.stderr.flush()
    os._exit(exit_code)
