"""What every event of a peer has: a time, and its name in a line."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from typing import Annotated, Literal, dataclass_transform

from pydantic import BeforeValidator

Figure = Annotated[float, BeforeValidator(lambda value: math.nan if value is None else value)]  # null in a line if it is not finite


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
@dataclass(frozen=True)
class Stamped:
    """Fields of every event; makes a frozen dataclass of each subclass. Comparisons ignore the time."""

    ts: float = field(default_factory=lambda: round(time.time(), 6), kw_only=True, compare=False, repr=False)  # seconds since 1970
    event: str = field(default="", kw_only=True, repr=False)  # the subclass's name, its mark in a line

    def __init_subclass__(cls) -> None:
        cls.__annotations__["event"] = Literal[cls.__name__]
        setattr(cls, "event", field(default=cls.__name__, kw_only=True, repr=False))  # noqa: B010 - not for type checkers
        dataclass(frozen=True)(cls)
