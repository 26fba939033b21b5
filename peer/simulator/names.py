"""Names that people type: looked up in a table, or answered with the nearest ones."""

from __future__ import annotations

from collections.abc import Iterable

from optim.names import nearest
from protocol.errors import BadSettings


def known(name: str, names: Iterable[str], kind: str) -> str:
    """Return the name. Raises BadSettings, with the nearest names, when it is not one of them."""
    table = list(names)
    if name in table:
        return name
    raise BadSettings(f"there is no {kind} named {name!r}", hint=f"did you mean {nearest(name, table)}?")
