"""Which options of `peer simulate` mean something: with --network, without it, or always. What would be ignored is refused."""

from __future__ import annotations

from collections.abc import Iterable

import typer

from protocol.errors import BadSettings

ALWAYS = frozenset({"manifest", "home", "codec", "peers", "inner_steps", "settings", "seed", "network", "as_json"})
ONLY_NETWORK = frozenset({"latency", "variation", "bandwidth", "params", "layers", "step_seconds"})
NETWORK_SETTINGS = ("codec", "peers", "inner_steps", "seed")  # of those that --set knows

WITH = "leave it out; see `peer simulate --help` for what --network takes, beside --peers, --codec, --inner-steps and --seed"
WITHOUT = "leave it out, or add --network"


def need_meaning(context: typer.Context, *, network: bool) -> None:
    """Raise BadSettings that names the first option given on the command line that means nothing there."""
    for parameter in context.command.params:
        name = parameter.name or ""
        if name in ALWAYS or (name in ONLY_NETWORK) is network or not _is_given(context, name):
            continue
        spelling = (parameter.secondary_opts if context.params[name] is False else parameter.opts)[0]
        raise BadSettings(f"{spelling} means nothing {'with' if network else 'without'} --network", hint=WITH if network else WITHOUT)


def need_network_settings(settings: Iterable[str]) -> None:
    """Raise BadSettings that names the first of the settings (NAME=VALUE) that means nothing with --network."""
    for setting in settings:
        name = setting.partition("=")[0]
        if name not in NETWORK_SETTINGS:
            raise BadSettings(f"--set {name} means nothing with --network", hint=WITH)


def _is_given(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"
