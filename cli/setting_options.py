"""One option for each local setting, generated from LocalSettings: spelling, type, bounds, help and default."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from gossamer.peer.machine.config import LocalSettings

R = TypeVar("R")

Given = dict[str, object]
"""The local settings that a command line gave, by name."""

EVERY = tuple(name for name in LocalSettings.model_fields if LocalSettings.setting(name).option is not None)
"""The settings that have an option, in the order of `--help`."""


def takes_settings(*names: str) -> Callable[[Callable[..., R]], Callable[..., R]]:
    """Return a decorator that replaces a command's parameter `given` by one option for each of these settings.

    The command receives in `given` the settings that the command line gave.
    """

    def decorate(command: Callable[..., R]) -> Callable[..., R]:
        @wraps(command)
        def called(**options: object) -> R:
            values = {name: options.pop(name) for name in names}
            return command(given={name: value for name, value in values.items() if value not in (None, [])}, **options)

        own = inspect.signature(command, eval_str=True)
        parameters: list[inspect.Parameter] = []
        for parameter in own.parameters.values():
            parameters += map(_parameter, names) if parameter.name == "given" else [parameter]
        vars(called)["__signature__"] = own.replace(parameters=parameters)
        return called

    return decorate


def _parameter(name: str) -> inspect.Parameter:
    """Return the parameter behind a setting's option; its value is None, or an empty list, where the option was not given."""
    kind: Any = LocalSettings.model_fields[name].annotation
    given = list[str] if kind == tuple[str, ...] else kind
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[given | None, _option(name)])


def _option(name: str) -> Any:
    field, setting = LocalSettings.model_fields[name], LocalSettings.setting(name)
    spelling = setting.option or f"--{name.replace('_', '-')}"
    if field.annotation == bool | None:
        spelling += f"/--no-{spelling.removeprefix('--')}"
    help_text, default = field.description or "", field.get_default()
    if default not in (None, (), False) and "Not set:" not in help_text:
        help_text += f" Default: {default}."
    if field.annotation == tuple[str, ...]:
        help_text += " May repeat."
    bounds = {key: getattr(item, key) for item in field.metadata for key in ("ge", "le") if hasattr(item, key)}
    return typer.Option(
        spelling,
        metavar=setting.metavar or None,
        help=help_text,
        min=bounds.get("ge"),
        max=bounds.get("le"),
        exists=field.annotation == Path | None,
        file_okay=setting.metavar != "FOLDER",
    )
