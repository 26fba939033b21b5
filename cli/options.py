"""The options that several verbs share, so that each means the same everywhere."""

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
    typer.Option("--home", envvar="GOSSAMER_HOME", metavar="DIR", help="Folder of this peer: its key, checkpoints and logs."),
]
Json = Annotated[bool, typer.Option("--json", help="Print exactly one JSON object on stdout; everything else goes to stderr.")]

Data = Annotated[
    Path | None,
    typer.Option("--data", metavar="PATH", exists=True, help="Text file, or folder of text, to train on. Default: what the manifest says."),
]
Device = Annotated[str | None, typer.Option("--device", metavar="NAME", help="Where to train: auto (default), cpu, mps, cuda or cuda:N.")]
Devices = Annotated[
    str | None,
    typer.Option(
        "--devices",
        metavar="NAMES",
        help="Where to train: auto (default), cpu, mps, cuda, cuda:N; 0,1 or all for several CUDA GPUs; cpu:2 for two processes.",
    ),
]
ModelFolder = Annotated[
    Path | None,
    typer.Option(
        "--model",
        metavar="FOLDER",
        exists=True,
        file_okay=False,
        help="Folder with the run's tokenizer, and the weights that it starts from.",
    ),
]
MicroBatch = Annotated[
    int | None, typer.Option("--micro-batch", metavar="N", min=0, help="Sequences to compute at a time; 0 (default) finds as many as fit.")
]
Threads = Annotated[
    int | None, typer.Option("--threads", metavar="N", min=0, help="Processor threads for training; 0 (default) lets torch choose.")
]
Listen = Annotated[
    str | None,
    typer.Option("--listen", metavar="HOST", help="Address to listen on; 127.0.0.1 keeps the peer on this machine. Default: 0.0.0.0."),
]
Port = Annotated[
    int | None,
    typer.Option(
        "--port",
        metavar="N",
        min=0,
        max=65535,
        help="TCP port to listen on; 0 takes any free one. Default: that of last time if it is free, so that old invites still lead here.",
    ),
]
Announce = Annotated[
    list[str] | None,
    typer.Option(
        "--announce",
        metavar="MULTIADDR",
        help="Address where others reach this peer, like /ip4/203.0.113.7/tcp/4001, in place of those found by listening. May repeat.",
    ),
]
Relay = Annotated[
    bool | None,
    typer.Option(
        "--relay/--no-relay",
        help="Carry the streams of peers behind routers, which others cannot call, where others can call this one; within limits. "
        "Default: the host of a run and `peer bootstrap` do.",
    ),
]
CheckpointEvery = Annotated[
    float | None,
    typer.Option(
        "--checkpoint-every",
        metavar="SECONDS",
        min=1.0,
        help="Save when so much time has passed. Default: after 60 seconds or 100 inner steps, whichever comes first.",
    ),
]

Niceness = Annotated[
    int | None,
    typer.Option("--niceness", metavar="N", min=0, max=19, help="Give way to other processes of the machine: 0 (default) not, 19 to all."),
]
MaxMemory = Annotated[
    str | None,
    typer.Option("--max-memory", metavar="SIZE", help='The most memory that the peer may hold, like "8 GB". Default: unlimited.'),
]
GpuMemory = Annotated[
    str | None, typer.Option("--gpu-memory", metavar="SIZE", help='The most memory to take on a GPU, like "6 GB". Default: unlimited.')
]
MaxDisk = Annotated[
    str | None,
    typer.Option("--max-disk", metavar="SIZE", help='The most that the home may take on the disk, like "20 GB". Default: unlimited.'),
]
MaxUpload = Annotated[
    str | None, typer.Option("--max-upload", metavar="RATE", help='The most that the peer sends, like "5 Mbit/s". Default: unlimited.')
]
MaxDownload = Annotated[
    str | None,
    typer.Option("--max-download", metavar="RATE", help='The most that the peer receives, like "20 Mbit/s". Default: unlimited.'),
]
MonthlyTraffic = Annotated[
    str | None,
    typer.Option("--monthly-traffic", metavar="SIZE", help='The most to send and receive in a month, like "200 GB". Default: unlimited.'),
]
WhenToTrain = Annotated[
    str | None,
    typer.Option(
        "--schedule", metavar="WINDOWS", help='When to train, by local time: "22:00-07:00", "mon-fri 22:00-07:00, sat 00:00-24:00".'
    ),
]
OnlyIdle = Annotated[bool | None, typer.Option("--only-idle", help="Train only while others leave the machine idle.")]
NotOnBattery = Annotated[bool | None, typer.Option("--not-on-battery", help="Train only while the machine does not run from its battery.")]

Metrics = Annotated[
    str | None,
    typer.Option(
        "--metrics",
        metavar="[ADDRESS:]PORT",
        help="Show metrics to Prometheus on this port, of 127.0.0.1 unless an address is given.",
    ),
]

Steps = Annotated[int | None, typer.Option("--steps", metavar="N", min=1, help="Inner steps that the run lasts.")]
Seed = Annotated[int | None, typer.Option("--seed", metavar="N", min=0, help="Everything random in the run follows from it.")]
Codec = Annotated[
    str | None, typer.Option("--codec", metavar="NAME", help="How peers pack what they exchange, like fp32, int8 or modulo4.")
]
InnerSteps = Annotated[
    Any,
    typer.Option(
        "--inner-steps",
        metavar="N|auto",
        parser=inner_steps,
        help="Inner steps between two meetings on a fragment, about; auto: as often as line and trainer of each peer afford.",
    ),
]
Method = Annotated[str | None, typer.Option("--method", metavar="NAME", help="How peers pull their weights together: noloco.")]
