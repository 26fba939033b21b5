"""torchft's streaming DiLoCo: two alternating fragments, each in transit for four of the five steps between two exchanges.

With an outer rate of 1 and no outer momentum it averages, as all others here; half of what a fragment trained meanwhile is kept
(`fragment_update_alpha`). The lighthouse, which says who takes part, runs beside peer 1.
"""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torchft import Manager, ProcessGroupGloo
from torchft.coordination import LighthouseServer
from torchft.local_sgd import DiLoCo

from benchmarks.side_by_side.network import INSIDE
from benchmarks.side_by_side.training import Training

LIGHTHOUSE_PORT, STORE_PORT = 29_510, 29_600
TIMEOUT = timedelta(seconds=120)
JOIN_MS = 10_000  # how long a quorum waits for a peer that is alive: as in torchft's own examples
NUM_FRAGMENTS = 2
UPDATE_ALPHA = 0.5


class StreamingDiLoCo:
    """One replica group of one process each."""

    def __init__(self, training: Training) -> None:
        seat = training.seat
        os.environ["GLOO_SOCKET_IFNAME"] = INSIDE
        self._lighthouse = LighthouseServer(f"0.0.0.0:{LIGHTHOUSE_PORT}", 1, join_timeout_ms=JOIN_MS) if seat.number == 1 else None
        self._parts: dict[str, Any] = {"model": training.model, "optimizer": training.inner}
        self._store = dist.TCPStore(seat.address, STORE_PORT, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
        self._manager = Manager(
            pg=ProcessGroupGloo(timeout=TIMEOUT),
            load_state_dict=self._load_state,
            state_dict=self._state,
            min_replica_size=1,
            use_async_quorum=False,
            timeout=TIMEOUT,
            quorum_timeout=TIMEOUT,
            rank=0,
            world_size=1,
            store_addr=seat.address,
            store_port=STORE_PORT,
            lighthouse_addr=f"http://{seat.addresses[0]}:{LIGHTHOUSE_PORT}",
            replica_id=f"peer-{seat.number}",
            hostname=seat.address,
            init_sync=False,
        )
        fragments = cut(training.model)
        outer = [torch.optim.SGD(fragment.parameters(), lr=1.0) for fragment in fragments]
        every_steps = seat.job.every_steps
        self._diloco = DiLoCo(
            self._manager,
            fragments,
            training.inner,
            outer,
            sync_every=every_steps,
            fragment_sync_delay=every_steps // NUM_FRAGMENTS - 1,
            fragment_update_alpha=UPDATE_ALPHA,
        )
        self._diloco.__enter__()  # it hooks itself into the inner optimizer's step

    def _state(self) -> dict[str, Any]:
        """Return the state that a recovering peer receives from another."""
        return {name: part.state_dict() for name, part in self._parts.items()}

    def _load_state(self, state: dict[str, Any]) -> None:
        for name, part in self._parts.items():
            part.load_state_dict(state[name])

    def after_step(self, own_steps: int) -> None:
        """Do nothing: the optimizer's step exchanges."""

    def finish(self) -> None:
        """Leave the quorum, so that slower peers do not wait; the last step exchanged the last fragment."""
        self._diloco.__exit__(None, None, None)
        self._manager.shutdown(wait=False)

    def close(self) -> None:
        """Stop the lighthouse."""
        if self._lighthouse is not None:
            self._lighthouse.shutdown()


def cut(model: nn.Module) -> list[nn.Module]:
    """Cut a Llama into fragments that share no parameter: embedding and first half of the layers, second half and last norm."""
    inside: Any = model.get_submodule("model")
    layers, half = list(inside.layers), len(inside.layers) // NUM_FRAGMENTS
    fragments: list[nn.Module] = [nn.ModuleList([inside.embed_tokens, *layers[:half]]), nn.ModuleList([*layers[half:], inside.norm])]
    if sum(p.numel() for fragment in fragments for p in fragment.parameters()) != sum(p.numel() for p in model.parameters()):
        raise ValueError("The model has parameters outside its embedding, layers and last norm, or shared ones.")
    return fragments
