"""What others ask of us costs us bytes and time, and so everybody gets only so much: each peer, each network, and all together."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass

from gossamer.protocol.newest import keep_newest

REMEMBERED = 4096  # purses


@dataclass(frozen=True, slots=True)
class Allowance:
    """So much at once, and as much again in `again_s`, little by little."""

    most: float
    again_s: float


@dataclass(slots=True)
class _Purse:
    left: float
    at_s: float


class Budgets:
    """A purse for all who ask, and one for each key by which an asker is known: itself, its network. `clock` only goes forward."""

    def __init__(self, clock: Callable[[], float], in_all: Allowance, *each: Allowance) -> None:
        self._clock = clock
        self._allowances = (in_all, *each)
        self._purses: dict[tuple[int, Hashable], _Purse] = {}  # by number of the allowance, and key

    def take(self, amount: float, *keys: Hashable) -> bool:
        """Take so much from the purse of each key, one for each allowance, and of all; False, and none is taken, where one has less."""
        purses = [self._filled(name, allowance) for name, allowance in zip(enumerate(("", *keys)), self._allowances, strict=True)]
        if any(purse.left < amount for purse in purses):
            return False
        for purse in purses:
            purse.left -= amount
        return True

    def _filled(self, name: tuple[int, Hashable], allowance: Allowance) -> _Purse:
        now_s = self._clock()
        purse = self._purses.get(name) or _Purse(allowance.most, now_s)
        purse.left = min(allowance.most, purse.left + (now_s - purse.at_s) / allowance.again_s * allowance.most)
        purse.at_s = now_s
        keep_newest(self._purses, name, purse, REMEMBERED)
        return purse
