"""Options of a command, generated from the fields of a model: spelling, type, bounds, help and default."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Annotated, Any, TypeVar

import typer

from gossamer.peer.machine.config import LocalSettings, WithOptions

R = TypeVar("R")

Given = dict[str, Any]
"""The fields whose options the command line gave, by name."""

EVERY = tuple(name for name in LocalSettings.model_fields if LocalSettings.setting(name).option is not None)
"""The local settings that have an option, in the order of `--help`."""


def takes(parameter: str, model: type[WithOptions], *names: str) -> Callable[[Callable[..., R]], Callable[..., R]]:
    """Return a decorator that replaces a parameter of a command by one option for each of these fields; without names, for each field.

    In that parameter the command receives what the command line gave.
    """
    chosen = names or tuple(model.model_fields)

    def decorate(command: Callable[..., R]) -> Callable[..., R]:
        @wraps(command)
        def called(**options: object) -> R:
            values = {name: options.pop(name) for name in chosen}
            return command(**{parameter: {name: value for name, value in values.items() if value not in (None, [])}}, **options)

        own = inspect.signature(command, eval_str=True)
        parameters: list[inspect.Parameter] = []
        for each in own.parameters.values():
            parameters += [_parameter(model, name) for name in chosen] if each.name == parameter else [each]
        vars(called)["__signature__"] = own.replace(parameters=parameters)
        return called

    return decorate


def _parameter(model: type[WithOptions], name: str) -> inspect.Parameter:
    """Return the parameter behind a field's option; its value is None, or an empty list, where the option was not given."""
    kind: Any = model.model_fields[name].annotation
    given = list[str] if kind == tuple[str, ...] else kind
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[given | None, _option(model, name)])


def _option(model: type[WithOptions], name: str) -> Any:
    field, setting, spelling = model.model_fields[name], model.setting(name), model.spelling(name)
    if field.annotation == bool | None:
        spelling += f"/--no-{spelling.removeprefix('--')}"
    help_text, default = field.description or "", field.get_default()
    if default not in (None, ()) and default is not False and "Not set:" not in help_text:
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
        exists=setting.metavar in ("PATH", "FOLDER"),
        file_okay=setting.metavar != "FOLDER",
        parser=setting.parser,
    )
