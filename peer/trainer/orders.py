"""What the first rank tells the others: one line of JSON each on their stdin, carried out by all ranks at once, in this order.

Tensors never travel in an order: they go from rank to rank through torch (rank.py). The end of stdin means the end of the rank.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final

from pydantic import BaseModel, ConfigDict, Discriminator, TypeAdapter

from gossamer.peer.link.records import Lines, LinkRecord


class RankSettings(BaseModel):
    """What a rank is started with: the first line."""

    model_config = ConfigDict(frozen=True)

    number: int
    count: int
    device: str
    threads: int  # 0: torch's choice
    gpu_memory: str  # at most, as the setting is written
    manifest: Path
    store: Path  # the file by which the ranks find each other

    def to_line(self) -> bytes:
        """Serialize to one line of JSON."""
        return self.model_dump_json().encode() + b"\n"


class Backward(LinkRecord):
    """Take over what has changed of the weights, and compute your rows of a batch."""

    changed: tuple[int, ...]  # tensors of the model, by number
    batch_size: int
    length: int  # of a sequence, with the token after it
    seed: int
    micro_batch: int
    recompute: bool
    compiles: bool


class Clip(LinkRecord):
    """Make the gradient at most so long."""

    most: float


class Step(LinkRecord):
    """Let the optimizers step, each with its parameters, and share these."""

    rate: float


class GiveState(LinkRecord):
    """Send the first rank what your optimizer keeps."""


class TakeState(LinkRecord):
    """Take what your optimizer kept from the first rank."""


class BeginAnew(LinkRecord):
    """Let your optimizer begin anew."""


Order = Backward | Clip | Step | GiveState | TakeState | BeginAnew
ORDERS: Final[Lines[Order]] = Lines(TypeAdapter(Annotated[Order, Discriminator("record")], config=ConfigDict(extra="forbid", strict=True)))
