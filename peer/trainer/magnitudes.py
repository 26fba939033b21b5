"""Limits on the size of the values that partners send at one boundary between stages.

Values of any finite size pass the codecs. A few huge ones would make the whole batch useless: the length of its gradient is infinite. So
values beyond any honest size are refused, and a gradient that is much longer than usual is shortened.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from typing import Final

from torch import Tensor

TIMES_USUAL: Final = 256.0  # honest gradients of small models reach 30 times the median, activations 3 times
LEARNED: Final = 32  # micro-batches before the usual size counts
REMEMBERED: Final = 256  # micro-batches
TIMES_LENGTH: Final = 3.0  # the usual length of a micro-batch's gradient: what counts of a longer one
LENGTHS_LEARNED: Final = 128  # micro-batches before the usual length counts: in the first steps honest lengths vary by five times
MOST_ACTIVATION: Final = 1e6  # hidden states of the largest models stay below 1e5
MOST_GRADIENT: Final = 1e3  # of a mean loss, whose gradients are far below 1


class Magnitudes:
    """The sizes of recent micro-batches: of each, the largest root mean square of one token's values.

    `most` is the limit at any time; the usual size lowers it. Refused sizes count too, so that honest ones that have grown pass again.
    Belongs to one thread.
    """

    def __init__(self, most: float) -> None:
        self._most = most
        self._recent: deque[float] = deque(maxlen=REMEMBERED)

    @property
    def limit(self) -> float:
        """The largest size that passes now."""
        usual = statistics.median(self._recent) if len(self._recent) >= LEARNED else 0.0
        return min(self._most, TIMES_USUAL * usual) if usual else self._most

    def check(self, values: Tensor, share: float = 1.0) -> None:
        """Take in values, f32[rows, L, width]. Raises ValueError where they are too large; nothing may be computed with them then.

        `share`: of the tokens, those with a loss; the gradient of a mean over few of them is larger.
        """
        size, limit = share * float(values.square().mean(-1).amax().sqrt()), self.limit
        self._recent.append(math.inf if math.isnan(size) else size)
        if not size <= limit:
            raise ValueError(f"the size of the values is {size:.3g}, above {limit:.3g}")


class GradientLengths:
    """The lengths of the gradients of recent micro-batches. Belongs to one thread."""

    def __init__(self) -> None:
        self._recent: deque[float] = deque(maxlen=REMEMBERED)

    def shorten(self, gradient: Tensor, share: float = 1.0) -> Tensor:
        """Return a gradient, f32[rows, L, width], or one of its direction that is TIMES_LENGTH times as long as usual.

        `share`: of the tokens, those with a loss; the gradient of a mean over fewer of them is longer.
        """
        length = math.sqrt(share) * float(gradient.norm())
        usual = statistics.median(self._recent) if len(self._recent) >= LENGTHS_LEARNED else 0.0
        self._recent.append(length)
        return gradient * (TIMES_LENGTH * usual / length) if 0.0 < TIMES_LENGTH * usual < length else gradient
