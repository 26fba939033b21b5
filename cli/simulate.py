"""`peer simulate`: whole swarms in one process and in virtual time, to compare methods, codecs and networks before running them."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from cli.manifests import read_manifest
from cli.options import DEFAULT_HOME, Codec, Data, Device, HomeFolder, Json, Seed, Steps, Threads
from cli.screen import meter
from cli.simulate_options import need_meaning, need_network_settings
from cli.simulation_report import network_text, rows_text
from peer.machine.home import Home
from peer.simulator.history import Row
from protocol.run.manifest import Manifest

NUM_STEPS = 300
CURVE_BATCHES = 4  # held-out batches at each point of a curve that is drawn

ManifestFile = Annotated[
    Path | None, typer.Argument(metavar="[MANIFEST]", help="What `peer init` wrote. Default: a small model on Python's own sources.")
]
Peers = Annotated[int, typer.Option("--peers", metavar="N", min=1, help="Peers in the swarm.")]
InnerSteps = Annotated[
    int | None,
    typer.Option(
        "--inner-steps",
        metavar="N",
        min=1,
        help="Inner steps between two exchanges of a fragment; on demand, a mean countdown that partners cut short.",
    ),
]
Speeds = Annotated[
    str | None,
    typer.Option("--speeds", metavar="LIST", help="Relative step rates, repeated until every peer has one; 4,1: every second is slow."),
]
Delay = Annotated[str | None, typer.Option("--delay", metavar="STEPS", help="How many steps at mean speed an exchange takes.")]
Matching = Annotated[
    str | None,
    typer.Option("--matching", metavar="NAME", help="How pairs come about: on-demand, or scheduled for all at once, as in the paper."),
]
TokenWeights = Annotated[
    bool | None, typer.Option("--token-weights/--no-token-weights", help="Let a peer's progress count by the tokens behind it; it does.")
]
DropOut = Annotated[
    str | None, typer.Option("--drop-out", metavar="SHARE", help="Chance that a peer is away for a period of --inner-steps.")
]
Skew = Annotated[
    str | None, typer.Option("--skew", metavar="SHARE", help="Share of each batch that comes from the peer's own part of the text.")
]
Set = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="NAME=VALUE", help="Any other setting, such as learning_rate or alpha. May repeat."),
]
Sweep = Annotated[
    list[str] | None,
    typer.Option("--sweep", metavar="NAME=V1,V2", help="Try each value, in every combination where repeated; ends with a table."),
]
Plot = Annotated[
    Path | None,
    typer.Option("--plot", metavar="FILE.png", help="Draw loss against tokens and bytes, and the spread of the weights. Needs matplotlib."),
]
SimulatedMethod = Annotated[
    str | None,
    typer.Option("--method", metavar="NAME", help="How peers pull their weights together, like noloco, streaming, ddp or local."),
]
EvalBatches = Annotated[int, typer.Option("--eval-batches", metavar="N", min=1, help="Held-out batches to measure each peer on.")]
NetworkOnly = Annotated[bool, typer.Option("--network", help="Train nothing: how long exchanges take, and what is left for computing.")]
Latency = Annotated[float, typer.Option("--latency", metavar="SECONDS", help="With --network: mean one-way latency.")]
Variation = Annotated[float, typer.Option("--variation", metavar="RATIO", help="With --network: its standard deviation over its mean.")]
Bandwidth = Annotated[float, typer.Option("--bandwidth", metavar="MBIT", help="With --network: Mbit/s of a link, each way.")]
Params = Annotated[float, typer.Option("--params", metavar="N", help="With --network: parameters of the model.")]
Layers = Annotated[int, typer.Option("--layers", metavar="N", min=1, help="With --network: layers of the model.")]
StepSeconds = Annotated[float, typer.Option("--step-seconds", metavar="SECONDS", help="With --network: how long an inner step computes.")]


def simulate(
    context: typer.Context,
    manifest: ManifestFile = None,
    home: HomeFolder = DEFAULT_HOME,
    method: SimulatedMethod = None,
    codec: Codec = None,
    peers: Peers = 8,
    steps: Steps = None,
    inner_steps: InnerSteps = None,
    speeds: Speeds = None,
    delay: Delay = None,
    matching: Matching = None,
    token_weights: TokenWeights = None,
    drop_out: DropOut = None,
    skew: Skew = None,
    settings: Set = None,
    sweep: Sweep = None,
    data: Data = None,
    seed: Seed = None,
    device: Device = "auto",
    threads: Threads = 0,
    eval_batches: EvalBatches = 256,
    plot: Plot = None,
    network: NetworkOnly = False,
    latency: Latency = 0.05,
    variation: Variation = 0.5,
    bandwidth: Bandwidth = 100.0,
    params: Params = 1.25e8,
    layers: Layers = 12,
    step_seconds: StepSeconds = 1.0,
    as_json: Json = False,
) -> None:
    """Try out a swarm on this machine, in virtual time.

    Trains replicas of the real model with the real outer steps and codecs, but no network.
    What it finds follows from the seed, the number of threads, and the text: by default the sources of this Python.
    """
    need_meaning(context, network=network)
    given = {"method": method, "codec": codec, "peers": peers, "inner_steps": inner_steps, "matching": matching, "seed": seed}
    given |= {"steps": NUM_STEPS if steps is None and manifest is None else steps, "token_weights": token_weights}
    texts = {"speeds": speeds, "delay": delay, "drop_out": drop_out, "skew": skew}
    asked = Asked(
        base=read_manifest(manifest, own_text=data is not None),
        given={name: value for name, value in given.items() if value is not None},
        settings=[f"{name}={text.replace(',', ':')}" for name, text in texts.items() if text is not None] + (settings or []),
        axes=sweep or [],
    )
    if network:
        links, workload = (latency, variation, bandwidth * 1e6), (params, layers, step_seconds)
        print(network_answer(asked, links, workload, as_json=as_json))
    else:
        machine = Machine(device, threads, eval_batches, Home(home).cache, data, plot)
        rows = train(asked, machine)
        print(rows_text(rows, as_json=as_json), flush=True)  # before the picture, which may fail
        if plot:
            draw(rows, plot)


@dataclass(frozen=True, slots=True)
class Asked:
    """What to simulate: a manifest, settings by name, and values to sweep over."""

    base: Manifest
    given: dict[str, Any]
    settings: list[str]  # NAME=VALUE
    axes: list[str]  # NAME=VALUE,VALUE


@dataclass(frozen=True, slots=True)
class Machine:
    """Where to simulate it."""

    device: str
    num_threads: int  # 0: torch chooses
    num_eval_batches: int
    cache: Path
    data: Path | None
    plot: Path | None


def train(asked: Asked, machine: Machine) -> list[Row]:
    """Train one swarm, or one for each combination of swept values. Raises BadSettings, BadManifest, Diverged."""
    import torch  # these are slow to import, and needed only now

    from peer.simulator.plot import need_plot
    from peer.simulator.sweep import Request, run
    from peer.simulator.training import Place, Progress

    if machine.num_threads:
        torch.set_num_threads(machine.num_threads)
    if machine.plot:
        need_plot(machine.plot)
    place = Place(machine.cache, machine.data, machine.device, machine.num_eval_batches, CURVE_BATCHES if machine.plot else 0)
    with meter(sys.stderr) as drawn:

        def follow(name: str, progress: Progress) -> None:
            drawn.show(name, progress.num_tokens, progress.total_tokens, progress.train_loss)

        return run(Request(asked.base, asked.given, asked.settings, asked.axes), place, follow)


def draw(rows: Sequence[Row], path: Path) -> None:
    """Draw the curves of all simulations that did not diverge. Raises BadSettings."""
    from peer.simulator.plot import plot

    plot({row.name: row.result for row in rows if row.result}, path)


def network_answer(asked: Asked, links: tuple[float, float, float], workload: tuple[float, int, float], *, as_json: bool) -> str:
    """Simulate a swarm's links alone and return what to print. Raises BadSettings or BadManifest."""
    from peer.simulator.links import Links
    from peer.simulator.network import Network, report
    from peer.simulator.sweep import Request
    from peer.simulator.utilization import Workload

    made = Request(asked.base, asked.given, asked.settings).scenario()
    need_network_settings(asked.settings)
    codec, inner_steps = made.manifest.codec.name, made.manifest.outer.inner_steps
    found = report(Network(made.num_peers, codec, inner_steps, Links(*links), Workload(*workload), made.seed))
    return json.dumps(found) if as_json else network_text(found)
