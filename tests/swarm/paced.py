"""A trainer whose inner steps last, in virtual time: while a gradient is computed its coding thread answers, at other times it cannot."""

from __future__ import annotations

import asyncio
from typing import Any

from tests.swarm.trainer import Trainer

CODING_S = 0.02  # from a request to the thread's answer


class PacedTrainer(Trainer):
    """The real trainer, slowed down: `step_s` for a gradient, then `optimizer_s` for the optimizer's step."""

    replica: Any
    optimizer_s = 0.0

    def connect(self, link: Any) -> None:
        """Have what the coding thread says reach the node a little later, whatever the trainer does."""
        super().connect(link)
        end, put = self._end, self._end.put

        def put_and_answer(item: Any) -> None:
            put(item)
            if not isinstance(item, int):
                asyncio.get_running_loop().call_later(CODING_S, self._deliver)

        end.put = put_and_answer  # type: ignore[method-assign]

    def begin_step(self) -> None:
        """Do what an inner step does when it begins."""

    async def _pass_step(self) -> None:
        if not self._boundary.is_training:
            await asyncio.sleep(CODING_S)
            return
        self.begin_step()
        with self._exchange.while_weights_are_read():
            await super()._pass_step()
        await asyncio.sleep(self.optimizer_s)
