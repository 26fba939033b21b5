"""Packages that only some commands need: each extra of the distribution, what needs it, and the error where it is missing."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Mapping
from typing import Final

from gossamer.protocol.errors import OperatorError

PACKAGE: Final = "gossamer-peer"
EXTRAS: Final[Mapping[str, tuple[str, tuple[str, ...]]]] = {  # by extra: what needs it, and the modules of its packages
    "backup": ("`peer backup`", ("pyrage",)),
    "dashboard": ("`peer dashboard`", ("plotly", "starlette", "uvicorn")),
    "lora": ("this run trains an adapter, which", ("peft",)),
    "metrics": ("--metrics", ("prometheus_client",)),
    "plot": ("--plot", ("matplotlib",)),
    "text": ("this run trains on text, which", ("datasets", "pyarrow", "tokenizers", "transformers")),
    "watch": ("`peer watch`", ("textual",)),
}


def need_extra(extra: str) -> None:
    """Raise OperatorError, with the command that installs them, unless all packages of an extra are installed. Imports none of them."""
    user, modules = EXTRAS[extra]
    if missing := [module.replace("_", "-") for module in modules if not _is_installed(module)]:
        raise OperatorError(
            f"{user} needs packages that are not installed ({', '.join(missing)})", hint=f"pip install '{PACKAGE}[{extra}]'"
        )


def installed_version(package: str) -> str | None:
    """Return the version of an installed package, None if it is missing."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ImportError:
        return False
