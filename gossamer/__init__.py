"""Gossamer: many machines train one model together over the internet, with no coordinator.

`host` and `join` put a PyTorch program into a swarm; see docs/guide/your-own-loop.md. The subpackages are links to the folders of the same
name at the top of the repository. They are private.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gossamer.protocol import errors as errors
    from gossamer.run import Run as Run
    from gossamer.swarm import Clock as Clock
    from gossamer.swarm import Swarm as Swarm
    from gossamer.swarm import host as host
    from gossamer.swarm import join as join

_HOMES = {"Run": "run", "Clock": "swarm", "Swarm": "swarm", "host": "swarm", "join": "swarm"}

__all__ = ["Clock", "Run", "Swarm", "errors", "host", "join"]


def __getattr__(name: str) -> Any:
    """Load a public name when it is first used: the command line imports this package, and needs no torch."""
    if name == "errors":
        return import_module("gossamer.protocol.errors")
    if name in _HOMES:
        return getattr(import_module(f"gossamer.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
