"""`peer simulate`: swarms in one process and virtual time, to compare methods, codecs and networks before a real run."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gossamer.cli.curves import need_plot
from gossamer.cli.manifests import read_manifest
from gossamer.cli.options import DEFAULT_HOME, Codec, Data, Device, HomeFolder, InnerSteps, Json, Seed, Steps, Threads
from gossamer.cli.screen import meter
from gossamer.cli.simulation_report import network_text, plot_rows, rows_text, swarm_text
from gossamer.peer.machine.home import Home
from gossamer.peer.simulator.results import Row
from gossamer.protocol.errors import BadSettings

if TYPE_CHECKING:
    from gossamer.peer.simulator.choices import SimulationRequest
    from gossamer.peer.simulator.training import Venue

NUM_STEPS = 300
CURVE_BATCHES = 4  # held-out batches at each point of a curve that is drawn
# The simulations that an option applies to: training (""), --network, --swarm. An option that is not listed applies to training only.
APPLIES_TO: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("manifest", "home", "peers", "seed", "network", "swarm", "as_json", "bandwidth"), ("", "--network", "--swarm")),
    **dict.fromkeys(("codec", "inner_steps", "settings", "step_seconds"), ("", "--network")),
    "latency": ("--network", "--swarm"),
    **dict.fromkeys(("variation", "params", "layers"), ("--network",)),
    **dict.fromkeys(("cut", "churn", "loss", "clock_error", "reachable"), ("--swarm",)),
}
OF_A_MODEL = frozenset({"params", "layers"})  # given by a manifest
NETWORK_SETTINGS = ("codec", "peers", "inner_steps", "seed")  # settings of --set that apply to --network
WITH = "leave it out; --network takes its own options in `peer simulate --help` and --peers, --codec, --inner-steps and --seed"
WITH_SWARM = "leave it out; --swarm takes its own options in `peer simulate --help` and --peers, --seed, --latency and --bandwidth"
SWARM_PEERS = 2, 500

ManifestFile = Annotated[
    Path | None,
    typer.Argument(metavar="[MANIFEST]", help="A manifest, as from `peer init`. Default: a small model on Python's own sources."),
]
Peers = Annotated[int, typer.Option("--peers", metavar="N", min=1, help="Peers in the swarm.")]
Speeds = Annotated[
    str | None,
    typer.Option("--speeds", metavar="LIST", help="Relative step rates, repeated for all peers. 4,1: every second peer is slow."),
]
Delay = Annotated[str | None, typer.Option("--delay", metavar="STEPS", help="Duration of an exchange, in steps at mean speed.")]
Matching = Annotated[
    str | None,
    typer.Option("--matching", metavar="NAME", help="How pairs form: on-demand, or scheduled for all peers at once as in the paper."),
]
TokenWeights = Annotated[
    bool | None, typer.Option("--token-weights/--no-token-weights", help="Weight a peer's progress by its number of tokens. Default: yes.")
]
DropOut = Annotated[
    str | None, typer.Option("--drop-out", metavar="SHARE", help="Probability that a peer is away for a period of --inner-steps.")
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
    typer.Option("--sweep", metavar="NAME=V1,V2", help="Run each value, and all combinations if repeated; prints a table."),
]
Plot = Annotated[
    Path | None,
    typer.Option("--plot", metavar="FILE.png", help="Draw loss against tokens and bytes, and the spread of the weights. Needs matplotlib."),
]
SimulatedMethod = Annotated[
    str | None,
    typer.Option("--method", metavar="NAME", help="How peers synchronize: noloco, diloco, diloco-heavy-ball, streaming, ddp or local."),
]
EvalBatches = Annotated[int, typer.Option("--eval-batches", metavar="N", min=1, help="Held-out batches to measure each peer on.")]
NetworkOnly = Annotated[
    bool, typer.Option("--network", help="Without training: the duration of exchanges, and the share of time left for computing.")
]
SwarmOnly = Annotated[
    bool,
    typer.Option("--swarm", help="Without training: 2 to 500 real nodes, from their start through a network partition to its healing."),
]
Cut = Annotated[
    float, typer.Option("--cut", metavar="SECONDS", min=0.0, help="With --swarm: duration of a partition into two halves; 0: none.")
]
Churn = Annotated[
    float,
    typer.Option("--churn", metavar="SHARE", min=0.0, max=10.0, help="With --swarm: share of the peers killed per ten minutes."),
]
Loss = Annotated[
    float, typer.Option("--loss", metavar="SHARE", min=0.0, max=0.9, help="With --swarm: share of messages lost and sent again.")
]
ClockError = Annotated[
    float, typer.Option("--clock-error", metavar="SECONDS", min=0.0, help="With --swarm: clock error of every tenth peer.")
]
Reachable = Annotated[
    float,
    typer.Option("--reachable", metavar="SHARE", min=0.0, max=1.0, help="With --swarm: share of the peers that accept connections."),
]
Latency = Annotated[float, typer.Option("--latency", metavar="SECONDS", help="With --network or --swarm: mean one-way latency.")]
Variation = Annotated[
    float, typer.Option("--variation", metavar="RATIO", help="With --network: standard deviation of the latency over its mean.")
]
Bandwidth = Annotated[
    float,
    typer.Option("--bandwidth", metavar="MBIT", help="Line rate in Mbit/s, each way: with --network, --swarm, or --inner-steps auto."),
]
Params = Annotated[float, typer.Option("--params", metavar="N", help="With --network, without a manifest: parameters of the model.")]
Layers = Annotated[int, typer.Option("--layers", metavar="N", min=1, help="With --network, without a manifest: layers of the model.")]
StepSeconds = Annotated[
    float, typer.Option("--step-seconds", metavar="SECONDS", help="Computing time of an inner step: with --network, or --inner-steps auto.")
]


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
    swarm: SwarmOnly = False,
    cut: Cut = 300.0,
    churn: Churn = 0.0,
    loss: Loss = 0.0,
    clock_error: ClockError = 0.0,
    reachable: Reachable = 1.0,
    latency: Latency = 0.05,
    variation: Variation = 0.5,
    bandwidth: Bandwidth = 100.0,
    params: Params = 1.25e8,
    layers: Layers = 12,
    step_seconds: StepSeconds = 1.0,
    as_json: Json = False,
) -> None:
    """Simulate a swarm on this machine, in virtual time.

    Trains replicas of the real model with the real outer steps and codecs, without a network. With --swarm it runs real nodes without
    training. The results depend on the seed, the number of threads, and the text: by default the sources of this Python.
    """
    _refuse_ignored_options(context)
    if swarm:
        happens = {"cut_s": cut, "churn": churn, "loss": loss, "skew_s": clock_error, "reachable": reachable}
        lines = {"latency_s": latency, "bandwidth": bandwidth * 1e6, "seed": seed or 0}
        print(swarm_answer(manifest, peers, happens | lines, as_json=as_json))
        return
    given = {"method": method, "codec": codec, "peers": peers, "inner_steps": inner_steps, "matching": matching, "seed": seed}
    given |= {"line_mbit": bandwidth, "step_s": step_seconds}
    given |= {"steps": NUM_STEPS if steps is None and manifest is None else steps, "token_weights": token_weights}
    texts = {"speeds": speeds, "delay": delay, "drop_out": drop_out, "skew": skew}
    base = read_manifest(manifest, own_text=data is not None)

    from gossamer.peer.simulator.choices import SimulationRequest  # slow to import, like all that needs torch

    request = SimulationRequest(
        base,
        {name: value for name, value in given.items() if value is not None},
        [f"{name}={text.replace(',', ':')}" for name, text in texts.items() if text is not None] + (settings or []),
        sweep or [],
    )
    if network:
        links, workload = (latency, variation, bandwidth * 1e6), (params, layers, step_seconds)
        print(network_answer(request, links, workload, is_of_a_run=manifest is not None, as_json=as_json))
        return

    from gossamer.peer.simulator.training import Venue

    if plot:
        need_plot(plot)
    rows = train(request, Venue(Home(home).cache, data, device or "auto", eval_batches, CURVE_BATCHES if plot else 0), threads or 0)
    print(rows_text(rows, as_json=as_json), flush=True)  # before the picture, which may fail
    if plot:
        plot_rows(rows, plot)


def train(request: SimulationRequest, venue: Venue, num_threads: int) -> list[Row]:
    """Train one swarm, or one for each combination of swept values. Raises BadSettings, BadManifest, Diverged."""
    import torch

    from gossamer.optim.codecs.hadamard import keep_products_exact
    from gossamer.peer.simulator.training import Headway, run

    keep_products_exact()
    if num_threads:
        torch.set_num_threads(num_threads)
    with meter(sys.stderr) as show:

        def follow(name: str, headway: Headway) -> None:
            show(name, headway.num_tokens, headway.total_tokens, headway.train_loss)

        return run(request, venue, follow)


def network_answer(
    request: SimulationRequest, links: tuple[float, float, float], workload: tuple[float, int, float], *, is_of_a_run: bool, as_json: bool
) -> str:
    """Simulate a swarm's links alone and return what to print. Raises BadSettings or BadManifest.

    With `is_of_a_run` the model is that of the request's manifest, and the answer has estimates for a peer of that run.
    """
    from gossamer.peer.model.model import model_config
    from gossamer.peer.simulator.network import Links, Network, Workload, report
    from gossamer.peer.trainer.interval import afforded_steps, estimate
    from gossamer.peer.trainer.need import needs, places

    [(_, made)] = request.scenarios()
    for name in (text.partition("=")[0] for text in request.settings):
        if name not in NETWORK_SETTINGS:
            raise BadSettings(f"--set {name} has no effect with --network", hint=WITH)
    found_needs = needs(made.manifest) if is_of_a_run else {}
    if is_of_a_run:
        num_layers = model_config(made.manifest.model).get_text_config().num_hidden_layers
        workload = (found_needs["cpu"].num_params, num_layers, workload[2])
    network = Network(made.num_peers, made.manifest.codec.name, made.period, Links(*links), Workload(*workload), made.seed)
    if made.manifest.outer.inner_steps == "auto":
        network = replace(network, inner_steps=afforded_steps(network.round_bytes, links[2] / 8, workload[2]))
    found = report(network)
    if is_of_a_run:
        found["estimate"] = asdict(estimate(found_needs["cpu"].plan, made.manifest.outer.max_clock_gap_steps, links[2] / 8, workload[2]))
        found["bytes_needed"] = {device: places(need) for device, need in found_needs.items()}
    return json.dumps(found) if as_json else network_text(found)


def swarm_answer(manifest: Path | None, peers: int, given: dict[str, Any], *, as_json: bool) -> str:
    """Simulate a swarm of real nodes and return what to print. Raises BadSettings or BadManifest."""
    least, most = SWARM_PEERS
    if not least <= peers <= most:
        raise BadSettings(f"--peers must lie between {least} and {most} with --swarm", hint="for larger swarms see --network")
    from gossamer.peer.simulator.swarm import SwarmScene, simulate_swarm

    tenths = 0

    def follow(done_s: float, total_s: float) -> None:
        nonlocal tenths
        if int(10 * done_s / total_s) > tenths:
            tenths = int(10 * done_s / total_s)
            print(f"{done_s:.0f} of about {total_s:.0f} s simulated", file=sys.stderr, flush=True)

    result = simulate_swarm(SwarmScene(peers=peers, **given), read_manifest(manifest, own_text=False), follow)
    return json.dumps(result.to_json()) if as_json else swarm_text(result)


def _refuse_ignored_options(context: typer.Context) -> None:
    """Raise BadSettings for the first option of the command line that the chosen simulation would ignore."""
    network, swarm = context.params["network"], context.params["swarm"]
    if network and swarm:
        raise BadSettings("--network and --swarm exclude each other", hint="give one of them")
    mode = "--network" if network else "--swarm" if swarm else ""
    for parameter in context.command.params:
        name = parameter.name or ""
        source = context.get_parameter_source(name)
        if source is None or source.name != "COMMANDLINE":
            continue
        if network and name in OF_A_MODEL and context.params["manifest"] is not None:
            raise BadSettings(f"{parameter.opts[0]} has no effect with a manifest, which defines the model", hint="leave one of them out")
        modes = APPLIES_TO.get(name, ("",))
        if mode in modes:
            continue
        spelling = (parameter.secondary_opts if context.params[name] is False else parameter.opts)[0]
        if mode:
            raise BadSettings(f"{spelling} has no effect with {mode}", hint=WITH if network else WITH_SWARM)
        needed = " or ".join(modes)
        raise BadSettings(f"{spelling} has no effect without {needed}", hint=f"leave it out, or add {needed}")
