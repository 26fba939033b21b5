"""How the operator writes the model of a run."""

from __future__ import annotations


def export_text(home: str = "", *, is_staged: bool = False) -> str:
    """Return how the model of a run is written, as a clause. `home`: the folder of this peer, where it must be named."""
    named = f" --home {home}" if home else ""
    if is_staged:
        return f"`peer export FOLDER{named} --with HOME` writes the model, with a home of each other stage"
    return f"`peer export FOLDER{named}` writes the model"
