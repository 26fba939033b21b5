"""What a stage takes of a line, and how much of a device a line can feed: the arithmetic of staged runs, without tensors.

A holder of P parameters computes F / 8P tokens a second at F useful operations a second: 2 forward, 2 again, 4 backward for a parameter.
For each token it sends and receives coded values of b bytes: a middle stage twice, the first and the last stage once. So a middle stage
takes 2 b F / P bits a second each way for full use of its device.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

COMPUTE: Final = 8  # operations per weight and token: forward, forward again, and twice as many backward
COMPUTE_LAST: Final = 6  # the last stage goes backward at once, as a peer with the whole model does
USEFUL_SHARE: Final = 0.4  # of a device's rate in matrix products, that inner steps reach
LEAST_USE: Final = 0.1  # of a device; below, a smaller model that fits it whole uses it better
DAY_S: Final = 86_400.0


@dataclass(frozen=True, slots=True)
class StageLine:
    """One holder on its line. Bytes are of hops alone; meetings come on top."""

    sent_bytes: float  # for each token
    received_bytes: float
    tokens_per_s: float  # that the device computes without ever waiting
    line_bytes_per_s: float  # of the slower direction; infinite: it limits nothing

    @property
    def full_use_bytes_per_s(self) -> float:
        """Return the rate in the busier direction that keeps the device at work."""
        return max(self.sent_bytes, self.received_bytes) * self.tokens_per_s

    @property
    def use(self) -> float:
        """Return the share of the device that the line can feed, at most 1."""
        return min(1.0, self.line_bytes_per_s / self.full_use_bytes_per_s)

    @property
    def carried_tokens_per_s(self) -> float:
        """Return the tokens a second that device and line allow."""
        return self.use * self.tokens_per_s

    @property
    def day_sent(self) -> float:
        """Return the bytes that hops send in a day."""
        return DAY_S * self.carried_tokens_per_s * self.sent_bytes

    @property
    def day_received(self) -> float:
        """Return the bytes that hops receive in a day."""
        return DAY_S * self.carried_tokens_per_s * self.received_bytes


def tokens_computed_per_s(flops: float, num_params: float, *, is_last: bool = False) -> float:
    """Return how many tokens a second a holder of so many parameters computes at so many useful operations a second."""
    return flops / ((COMPUTE_LAST if is_last else COMPUTE) * num_params)


def least_stages(num_params: float, most_params: float) -> int:
    """Return into how many equal stages a model is cut so that each has at most so many parameters."""
    return max(1, math.ceil(num_params / most_params))
