"""The options that several verbs share, so that each means the same everywhere. Those of local settings: cli/setting_options.py."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer


def inner_steps(text: str) -> int | str:
    """Read a number of steps, or `auto`; other text is left to the check of the manifest, which says what is legal."""
    return int(text) if text.isdecimal() else text


DEFAULT_HOME = Path("~/.gossamer")

HomeFolder = Annotated[
    Path,
    typer.Option("--home", envvar="GOSSAMER_HOME", metavar="DIR", help="Home folder of this peer: key, checkpoints and logs."),
]
Json = Annotated[bool, typer.Option("--json", help="Print exactly one JSON object on stdout; everything else goes to stderr.")]

Data = Annotated[
    Path | None,
    typer.Option(
        "--data", metavar="PATH", exists=True, help="Text file, or folder of text files. Default: the data that the manifest names."
    ),
]
Threads = Annotated[int | None, typer.Option("--threads", metavar="N", min=0, help="Processor threads; 0 lets torch choose. Default: 0.")]
Device = Annotated[str | None, typer.Option("--device", metavar="NAME", help="Where to train: auto (default), cpu, mps, cuda or cuda:N.")]

Metrics = Annotated[
    str | None,
    typer.Option(
        "--metrics",
        metavar="[ADDRESS:]PORT",
        help="Serve metrics for Prometheus on this port; the default address is 127.0.0.1.",
    ),
]

Steps = Annotated[int | None, typer.Option("--steps", metavar="N", min=1, help="Length of the run in inner steps.")]
Seed = Annotated[int | None, typer.Option("--seed", metavar="N", min=0, help="Seed of the run's random numbers.")]
Codec = Annotated[
    str | None, typer.Option("--codec", metavar="NAME", help="Codec for the weights that peers exchange, like fp32, int8 or modulo4.")
]
InnerSteps = Annotated[
    Any,
    typer.Option(
        "--inner-steps",
        metavar="N|auto",
        parser=inner_steps,
        help="Mean number of inner steps between two meetings on a fragment; auto: each peer finds its own.",
    ),
]
Method = Annotated[str | None, typer.Option("--method", metavar="NAME", help="Outer optimizer: noloco.")]
