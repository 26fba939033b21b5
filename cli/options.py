"""The options that several verbs share, so that each means the same everywhere."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

DEFAULT_HOME = Path("~/.gossamer")

HomeFolder = Annotated[
    Path,
    typer.Option("--home", envvar="GOSSAMER_HOME", metavar="DIR", help="Folder of this peer: its key, checkpoints and logs."),
]
Json = Annotated[bool, typer.Option("--json", help="Print exactly one JSON object on stdout; everything else goes to stderr.")]
Data = Annotated[
    Path | None, typer.Option("--data", metavar="PATH", help="Text file, or folder of text, to train on. Default: what the manifest says.")
]
Device = Annotated[str, typer.Option("--device", metavar="NAME", help="Where to train: auto, cpu, cuda or cuda:N.")]
Port = Annotated[int, typer.Option("--port", min=0, max=65535, help="TCP port to listen on; 0 takes a free one.")]
Announce = Annotated[
    list[str] | None,
    typer.Option(
        "--announce", metavar="MULTIADDR", help="Address that other peers can reach, for example /ip4/203.0.113.7/tcp/4001. May repeat."
    ),
]
Lan = Annotated[bool, typer.Option("--lan", help="Also tell others the private addresses of this machine (peers on one local network).")]
Threads = Annotated[int, typer.Option("--threads", min=0, help="CPU threads for training; 0 lets torch choose.")]
Steps = Annotated[int | None, typer.Option("--steps", min=1, help="Inner steps that the run lasts.")]
Seed = Annotated[int | None, typer.Option("--seed", min=0, help="Seed of the first weights and of the order of the data.")]
Codec = Annotated[
    str | None, typer.Option("--codec", metavar="NAME", help="How peers pack what they exchange, for example fp32, bf16 or int8.")
]
Method = Annotated[str | None, typer.Option("--method", metavar="NAME", help="How the outer step is made; noloco is the default.")]
