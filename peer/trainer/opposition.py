"""Sources of micro-batches whose gradients point against those of all other sources.

A holder cannot see whether the tokens of a micro-batch are the text from which its outputs were computed. But a driver that always sends
wrong tokens moves the stage's weights away from where the other drivers move them. Then the mean gradient of that driver points against the
mean gradient of each other one, and the others agree with one another. With unlike texts neither is the case. The limits are measured:
docs/concepts/attacks.md.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from gossamer.protocol.newest import keep_newest

SAMPLED: Final = 1 << 14  # entries of the gradient
SAMPLE_SEED: Final = 1
DECAY: Final = 0.9  # of a source's mean gradient, for each micro-batch of it
LEARNED: Final = 8  # micro-batches of a source before it is compared
LEAST_SOURCES: Final = 3  # of two that oppose each other nobody can tell which is right
MOST_COSINE: Final = -0.25  # of the mean gradient of a source that is opposed, with that of the others
LEAST_CONTRAST: Final = 0.4  # by how much the cosines of the others with one another lie above it
IN_A_ROW: Final = 8  # micro-batches of a source
RECENT: Final = 512  # micro-batches of all: a mean that is older is of other weights
SOURCES_KEPT: Final = 64


class GradientSample:
    """The same random entries of the gradients of these parameters, whenever it is read."""

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self._parameters = [parameter for parameter in parameters if parameter.requires_grad]
        ends = list(itertools.accumulate((parameter.numel() for parameter in self._parameters), initial=0))
        draws = torch.Generator().manual_seed(SAMPLE_SEED)
        entries = torch.randint(ends[-1], (min(SAMPLED, ends[-1]),), generator=draws)
        owners = torch.bucketize(entries, torch.tensor(ends[1:]), right=True)
        self._entries = [
            (entries[owners == number] - ends[number]).to(parameter.device) for number, parameter in enumerate(self._parameters)
        ]

    def read(self) -> Tensor:
        """Return the entries as they are now, f32[K] on the CPU; zeros where there is no gradient."""
        parts = [
            torch.zeros(len(entries), device=parameter.device) if parameter.grad is None else parameter.grad.flatten()[entries].float()
            for parameter, entries in zip(self._parameters, self._entries, strict=True)
        ]
        return torch.cat(parts).cpu()


@dataclass(slots=True)
class Pull:
    """The gradients of one source's micro-batches."""

    mean: Tensor  # f32[K], of the gradient sample, over the last micro-batches
    num: int = 0
    num_opposed: int = 0  # micro-batches in a row at which it was opposed
    last: int = 0  # the number of its newest micro-batch, of all


class Opposition:
    """The gradients of each source of micro-batches at one stage. Belongs to one thread."""

    def __init__(self) -> None:
        self._pulls: dict[str, Pull] = {}
        self._num = 0

    def note(self, source: str, sample: Tensor) -> str:
        """Take in the gradient sample of a micro-batch, f32[K]; return why its source is opposed, or nothing.

        A source that is opposed is forgotten: it begins anew. Values that are not finite are left out.
        """
        if not bool(sample.isfinite().all()):
            return ""
        self._num += 1
        pull = self._pulls.get(source) or Pull(torch.zeros_like(sample))
        pull.mean.lerp_(sample, 1.0 - DECAY)
        pull.num, pull.last = pull.num + 1, self._num
        keep_newest(self._pulls, source, pull, SOURCES_KEPT)
        others = [one.mean for one in self._pulls.values() if one is not pull and one.num >= LEARNED and self._num - one.last < RECENT]
        if pull.num < LEARNED or len(others) + 1 < LEAST_SOURCES:
            return ""
        cosine, agreement = _cosines(pull.mean, others)
        is_opposed = cosine < MOST_COSINE and agreement - cosine > LEAST_CONTRAST
        pull.num_opposed = pull.num_opposed + 1 if is_opposed else 0
        if pull.num_opposed < IN_A_ROW:
            return ""
        del self._pulls[source]
        return (
            f"its gradients have a cosine of {cosine:.2f} with those of {len(others)} others, which have {agreement:.2f} with one another"
        )


def _cosines(mean: Tensor, others: list[Tensor]) -> tuple[float, float]:
    """Return the cosine of a mean gradient with the others, and of the others with one another: medians, in favour of the source."""
    directions = torch.nn.functional.normalize(torch.stack([mean, *others]), dim=1)
    table = directions @ directions.T
    own = sorted(table[0, 1:].tolist())
    pairs = sorted(float(table[one, other]) for one, other in itertools.combinations(range(1, len(directions)), 2))
    return own[len(own) // 2], pairs[(len(pairs) - 1) // 2]
