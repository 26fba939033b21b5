"""What a peer can carry out of what a manifest may name: outer methods, inner optimizers, codecs.

A manifest only shapes these names, for another release may know more of them. What is not known here is refused, never replaced.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from optim.codecs import CODECS
from optim.names import nearest
from optim.optimizers import OPTIMIZERS
from protocol.errors import BadManifest
from protocol.manifest import Manifest

METHODS: Final = ("noloco",)


def need_abilities(manifest: Manifest) -> None:
    """Raise BadManifest, with the nearest names, for the first name that means nothing to this build."""
    _need("outer.method", manifest.outer.method, METHODS)
    _need("inner.optimizer", manifest.inner.optimizer, OPTIMIZERS)
    _need("codec.name", manifest.codec.name, CODECS)


def _need(key: str, name: str, known: Iterable[str]) -> None:
    names = list(known)
    if name not in names:
        raise BadManifest(f'{key} = "{name}" means nothing to this build', hint=f"did you mean {nearest(name, names)}?")
