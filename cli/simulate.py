"""`peer simulate`: swarms in one process and virtual time, to compare methods, codecs and networks before a real run."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from pydantic import Field

from gossamer.cli.curves import need_plot
from gossamer.cli.generated_options import Given, takes
from gossamer.cli.manifests import RunOptions, changed, read_manifest
from gossamer.cli.options import DEFAULT_HOME, HomeFolder, Json, origin
from gossamer.cli.screen import meter
from gossamer.cli.simulation_report import network_text, plot_rows, rows_text, staged_network_text, swarm_text
from gossamer.peer.machine.config import Setting
from gossamer.peer.machine.extras import need_extra
from gossamer.peer.machine.home import Home
from gossamer.peer.machine.units import mbit_per_s, seconds
from gossamer.peer.simulator.results import Row, value_text
from gossamer.protocol.errors import BadSettings
from gossamer.protocol.run.manifest import StagedManifest

if TYPE_CHECKING:
    from gossamer.peer.simulator.choices import SimulationRequest
    from gossamer.peer.simulator.training import Venue

NUM_STEPS = 300
CURVE_BATCHES = 4  # held-out batches at each point of a curve that is drawn
STAGED = "--network --stages"
# The simulations that an option applies to: training (""), --network, alone or of a staged run, --swarm. Others apply to training only.
APPLIES_TO: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("manifest", "home", "network", "swarm", "as_json", "bandwidth"), ("", "--network", STAGED, "--swarm")),
    **dict.fromkeys(("peers", "seed"), ("", "--network", "--swarm")),
    **dict.fromkeys(("codec", "inner_steps"), ("", "--network", STAGED)),
    **dict.fromkeys(("settings", "step_seconds"), ("", "--network")),
    "latency": ("--network", "--swarm"),
    "variation": ("--network",),
    **dict.fromkeys(("params", "layers"), ("--network", STAGED)),
    "hidden_size": (STAGED,),
    **dict.fromkeys(("stages", "activations"), ("", STAGED)),
    **dict.fromkeys(("cut", "churn", "loss", "clock_error", "reachable"), ("--swarm",)),
}
# The options that are settings of a simulation. NAMES: the setting's name where the option has another. LISTS: read as --set reads them.
SETTINGS = (
    *("method", "codec", "peers", "steps", "inner_steps", "matching", "seed", "token_weights", "attack", "attackers"),
    *("stages", "routing", "activations", "hop_delay", "bandwidth", "step_seconds"),
)
NAMES = {"bandwidth": "line_mbit", "step_seconds": "step_s"}
LISTS = ("speeds", "delay", "drop_out", "skew")
OF_A_MODEL = frozenset({"params", "layers", "hidden_size"})  # given by a manifest
NETWORK_SETTINGS = ("codec", "peers", "inner_steps", "seed")  # settings of --set that apply to --network
WITH = "leave it out; --network takes its own options in `peer simulate --help` and --peers, --codec, --inner-steps and --seed"
WITH_STAGES = (
    "leave it out; with --stages it takes --bandwidth, --activations, --codec, --inner-steps, --params, --layers and --hidden-size"
)
WITH_SWARM = "leave it out; --swarm takes its own options in `peer simulate --help` and --peers, --seed, --latency and --bandwidth"
SWARM_PEERS = 2, 500

ManifestFile = Annotated[
    Path | None,
    typer.Argument(metavar="MANIFEST", help="A manifest, as from `peer init`. Default: a small model on Python's own sources."),
]


class SimulationOptions(RunOptions):
    """What the options of `peer simulate` choose. Its defaults are those of a simulation of a small swarm."""

    method: Annotated[str | None, Setting("NAME")] = None
    """How peers synchronize: noloco, diloco, diloco-heavy-ball, streaming, ddp or local."""
    peers: Annotated[int, Setting("N")] = Field(8, ge=1)
    """Peers in the swarm."""
    speeds: Annotated[str | None, Setting("LIST")] = None
    """Relative step rates, repeated for all peers. 4,1: every second peer is slow."""
    delay: Annotated[str | None, Setting("STEPS")] = None
    """Duration of an exchange, in steps at mean speed."""
    matching: Annotated[str | None, Setting("NAME")] = None
    """How pairs form: on-demand, or scheduled for all peers at once as in the paper."""
    token_weights: Annotated[bool | None, Setting()] = None
    """Weight a peer's progress by its number of tokens. Default: yes."""
    drop_out: Annotated[str | None, Setting("SHARE")] = None
    """Probability that a peer is away for a period of --inner-steps."""
    skew: Annotated[str | None, Setting("SHARE")] = None
    """Share of each batch that comes from the peer's own part of the text."""
    stages: Annotated[int | None, Setting("N")] = Field(None, ge=1)
    """Cut the model into so many stages; a micro-batch takes each stage from one of the peers. --method noloco or local, or --network."""
    routing: Annotated[str | None, Setting("NAME")] = None
    """With --stages: from which peer. random, or fixed: always the same one."""
    activations: Annotated[str | None, Setting("NAME")] = None
    """With --stages: number format of what passes between two stages: fp32, bf16, int8 or int4."""
    hop_delay: Annotated[int | None, Setting("STEPS")] = Field(None, ge=0)
    """With --stages: inner steps that a gradient takes back to the stage before."""
    attack: Annotated[str | None, Setting("NAME")] = None
    """What the attackers do from the middle of the run on: ascent, sign-flip, stale and others; away: they meet nobody."""
    attackers: Annotated[int | None, Setting("N")] = Field(None, ge=1)
    """Peers that attack. All figures are of the honest peers."""
    settings: Annotated[tuple[str, ...], Setting("NAME=VALUE", "--set")] = ()
    """Any other setting, such as learning_rate or alpha."""
    sweep: Annotated[tuple[str, ...], Setting("NAME=V1,V2")] = ()
    """Run each value, and all combinations of several lists; prints a table."""
    data: Annotated[Path | None, Setting("PATH")] = None
    """Text file, or folder of text files. Default: the data that the manifest names."""
    device: Annotated[str, Setting("NAME")] = "auto"
    """Where to train: auto, gpu, cpu, mps, cuda, xpu or cuda:N."""
    threads: Annotated[int, Setting("N")] = Field(0, ge=0)
    """Processor threads; 0 lets torch choose."""
    tokens: Annotated[int | None, Setting("N")] = Field(None, ge=1)
    """Held-out tokens to measure each peer on, as far as there are so many. Default: what takes an eighth of the training."""
    eval_batches: Annotated[int | None, Setting("N")] = Field(None, ge=1)
    """The same as a number of held-out batches, which overlap if the text is short."""
    plot: Annotated[Path | None, Setting("FILE.png")] = None
    """Draw loss against tokens and bytes, and the spread of the weights. Needs matplotlib."""
    network: Annotated[bool, Setting()] = False
    """Without training: duration of exchanges, time left for computing. With --stages: where a staged run pays, from formulas."""
    swarm: Annotated[bool, Setting()] = False
    """Without training: 2 to 500 real nodes, from their start through a network partition to its healing."""
    cut: Annotated[float, Setting("TIME", parser=seconds)] = Field(300.0, ge=0.0)
    """With --swarm: duration of a partition into two halves, in seconds or like 5min; 0: none."""
    churn: Annotated[float, Setting("SHARE")] = Field(0.0, ge=0.0, le=10.0)
    """With --swarm: share of the peers killed per ten minutes."""
    loss: Annotated[float, Setting("SHARE")] = Field(0.0, ge=0.0, le=0.9)
    """With --swarm: share of messages lost and sent again."""
    clock_error: Annotated[float, Setting("TIME", parser=seconds)] = Field(0.0, ge=0.0)
    """With --swarm: clock error of every tenth peer."""
    reachable: Annotated[float, Setting("SHARE")] = Field(1.0, ge=0.0, le=1.0)
    """With --swarm: share of the peers that accept connections."""
    latency: Annotated[float, Setting("TIME", parser=seconds)] = 0.05
    """With --network or --swarm: mean one-way latency."""
    variation: Annotated[float, Setting("RATIO")] = 0.5
    """With --network: standard deviation of the latency over its mean."""
    bandwidth: Annotated[float, Setting("RATE", parser=mbit_per_s)] = 100.0
    """Line rate, each way, in Mbit/s or like "12 MB/s": with --network, --swarm, or --inner-steps auto. With --stages: else three."""
    params: Annotated[float, Setting("N")] = 1.25e8
    """With --network, without a manifest: parameters of the model."""
    layers: Annotated[int, Setting("N")] = Field(12, ge=1)
    """With --network, without a manifest: layers of the model."""
    hidden_size: Annotated[int | None, Setting("N")] = Field(None, ge=1)
    """With --network --stages, without a manifest: width of the model. Not set: what its parameters and layers suggest."""
    step_seconds: Annotated[float, Setting("TIME", parser=seconds)] = 1.0
    """Computing time of an inner step: with --network, or --inner-steps auto."""


@takes("given", SimulationOptions)
def simulate(manifest: ManifestFile = None, home: HomeFolder = DEFAULT_HOME, *, given: Given, as_json: Json = False) -> None:
    """Simulate a swarm on this machine, in virtual time.

    Trains replicas of the real model with the real outer steps and codecs, without a network. With --swarm it runs real nodes without
    training. The results depend on the seed, the number of threads, and the text: by default the sources of this Python.
    """
    options = SimulationOptions.model_construct(**given)  # the command line has checked them
    num_stages = options.stages or (read_manifest(manifest).num_stages if manifest is not None else 1)
    _refuse_ignored_options(given, has_manifest=manifest is not None, is_staged=num_stages > 1)
    if options.swarm:
        print(swarm_answer(manifest, options, as_json=as_json))
        return
    need_extra("text")
    if options.network and num_stages > 1:
        print(staged_network_answer(manifest, options, num_stages, given, as_json=as_json))
        return
    if options.plot:
        need_plot(options.plot)
    if options.tokens and options.eval_batches:
        raise BadSettings("--tokens and --eval-batches say the same in two ways", hint="leave one of them out")
    request = simulation_request(manifest, options)
    if options.network:
        print(network_answer(request, options, is_of_a_run=manifest is not None, as_json=as_json))
        return

    from gossamer.peer.simulator.training import Venue

    venue = Venue(
        Home(home).cache, options.data, options.device, options.eval_batches, options.tokens, CURVE_BATCHES if options.plot else 0
    )
    rows = train(request, venue, options.threads)
    settings = {"settings": settings_json(request)} if as_json else {}
    print(rows_text(rows, as_json=as_json, origin=settings | origin()), flush=True)  # before the picture, which may fail
    if options.plot:
        plot_rows(rows, options.plot)


def simulation_request(manifest: Path | None, options: SimulationOptions) -> SimulationRequest:
    """Return the manifest, changed by the options, as a request. Raises BadManifest."""
    from gossamer.peer.simulator.choices import SimulationRequest  # slow to import, like all that needs torch

    base = read_manifest(manifest, own_text=options.data is not None)
    if manifest is None:
        base = changed(base, {"steps": NUM_STEPS})
    given = {NAMES.get(name, name): getattr(options, name) for name in SETTINGS if name in options.model_fields_set}
    texts = [f"{name}={text.replace(',', ':')}" for name in LISTS if (text := getattr(options, name)) is not None]
    return SimulationRequest(base, given, [*texts, *options.settings], options.sweep)


def settings_json(request: SimulationRequest) -> dict[str, Any]:
    """Return every setting of the first simulation: its manifest, its scenario, and the values that a sweep varies."""
    [(_, made), *_] = request.scenarios()
    scenario = {field.name: value_text(getattr(made, field.name)) for field in fields(made) if field.name != "manifest"}
    return {"manifest": made.manifest.model_dump(mode="json"), "scenario": scenario, "sweep": list(request.axes)}


def train(request: SimulationRequest, venue: Venue, num_threads: int) -> list[Row]:
    """Train one swarm, or one for each combination of swept values. Raises BadSettings, BadManifest, Diverged."""
    import torch

    from gossamer.optim.codecs.hadamard import keep_products_exact
    from gossamer.peer.simulator.training import run

    keep_products_exact()
    if num_threads:
        torch.set_num_threads(num_threads)
    with meter(sys.stderr) as show:
        return run(request, venue, show, lambda line: print(line, file=sys.stderr))


def network_answer(request: SimulationRequest, options: SimulationOptions, *, is_of_a_run: bool, as_json: bool) -> str:
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
    links = Links(options.latency, options.variation, options.bandwidth * 1e6)
    workload = Workload(options.params, options.layers, options.step_seconds)
    found_needs = needs(made.manifest) if is_of_a_run else {}
    if is_of_a_run:
        num_layers = model_config(made.manifest.model).get_text_config().num_hidden_layers
        workload = Workload(found_needs["cpu"].num_params, num_layers, options.step_seconds)
    line = links.bandwidth / 8, options.step_seconds
    network = Network(made.num_peers, made.manifest.codec.name, made.period, links, workload, made.seed)
    if made.manifest.outer.inner_steps == "auto":
        network = replace(network, inner_steps=afforded_steps(network.round_bytes, *line))
    found = report(network)
    if is_of_a_run:
        found["estimate"] = asdict(estimate(found_needs["cpu"].plan, made.manifest.outer.max_clock_gap_steps, *line))
        found["bytes_needed"] = {device: places(need) for device, need in found_needs.items()}
    return json.dumps(found) if as_json else network_text(found)


def staged_network_answer(manifest: Path | None, options: SimulationOptions, num_stages: int, given: Given, *, as_json: bool) -> str:
    """Return what to print on where a staged run pays: of a manifest, or of a model of the given size. Raises BadSettings, BadManifest."""
    from gossamer.peer.model.model import model_config, parameter_shapes
    from gossamer.peer.model.stages import manifest_cuts
    from gossamer.peer.simulator.network import Links, Network, Workload
    from gossamer.peer.simulator.stage_network import LINES_MBIT, StagedModel, hidden_size_of, report

    run = changed(read_manifest(manifest), {name: given[name] for name in ("codec", "inner_steps", "stages") if name in given and manifest})
    codec, work = options.codec or run.codec.name, Workload(options.params, options.layers, options.step_seconds)
    bits = Network(codec=codec, links=Links(bandwidth=options.bandwidth * 1e6), workload=work).bits_per_param  # refuses impossible sizes
    if isinstance(run, StagedManifest):
        manifest_cuts(run)  # refuses what cannot be cut
        text = model_config(run.model).get_text_config()
        num_params = sum(map(math.prod, parameter_shapes(run.model).values()))
        shape, batch = (num_params, text.num_hidden_layers, text.hidden_size), (run.step_tokens, run.outer.nominal_steps)
        model = StagedModel(*shape, num_stages, bits, *batch)
    else:
        width = options.hidden_size or hidden_size_of(options.params, options.layers)
        interval = options.inner_steps if isinstance(options.inner_steps, int) else run.outer.nominal_steps
        model = StagedModel(options.params, options.layers, width, num_stages, bits, interval_steps=interval)
    lines = (options.bandwidth,) if "bandwidth" in given else LINES_MBIT
    found = report(model, lines, options.activations or (run.stages.activations if isinstance(run, StagedManifest) else "int8"))
    return json.dumps(found | origin()) if as_json else staged_network_text(found)


def swarm_answer(manifest: Path | None, options: SimulationOptions, *, as_json: bool) -> str:
    """Simulate a swarm of real nodes and return what to print. Raises BadSettings or BadManifest."""
    least, most = SWARM_PEERS
    if not least <= options.peers <= most:
        raise BadSettings(f"--peers must lie between {least} and {most} with --swarm", hint="for larger swarms see --network")
    if not options.bandwidth > 0.0:
        raise BadSettings("--bandwidth must be above 0 with --swarm", hint="a number without a unit is in Mbit/s")
    from gossamer.peer.simulator.swarm import SwarmScene, simulate_swarm

    tenths = 0

    def follow(done_s: float, total_s: float) -> None:
        nonlocal tenths
        if int(10 * done_s / total_s) > tenths:
            tenths = int(10 * done_s / total_s)
            print(f"{done_s:.0f} of about {total_s:.0f} s simulated", file=sys.stderr, flush=True)

    scene = SwarmScene(
        peers=options.peers, cut_s=options.cut, churn=options.churn, loss=options.loss, skew_s=options.clock_error,
        reachable=options.reachable, latency_s=options.latency, bandwidth=options.bandwidth * 1e6, seed=options.seed or 0,
    )  # fmt: skip
    run = read_manifest(manifest)
    if run.num_stages > 1:
        raise BadSettings("--swarm simulates peers that hold the whole model", hint="leave the manifest of the staged run out")
    result = simulate_swarm(scene, run, follow)
    return json.dumps(asdict(result)) if as_json else swarm_text(result)


def _refuse_ignored_options(given: Given, *, has_manifest: bool, is_staged: bool) -> None:
    """Raise BadSettings for the first given option that the chosen simulation would ignore."""
    network, swarm = "network" in given, "swarm" in given
    if network and swarm:
        raise BadSettings("--network and --swarm exclude each other", hint="give one of them")
    mode = STAGED if network and is_staged else "--network" if network else "--swarm" if swarm else ""
    for name, value in given.items():
        spelling = SimulationOptions.spelling(name)
        if network and name in OF_A_MODEL and has_manifest:
            raise BadSettings(f"{spelling} has no effect with a manifest, which defines the model", hint="leave one of them out")
        modes = APPLIES_TO.get(name, ("",))
        if mode in modes:
            continue
        if value is False:
            spelling = f"--no-{spelling.removeprefix('--')}"
        if mode:
            raise BadSettings(
                f"{spelling} has no effect with {mode}", hint=WITH_STAGES if mode == STAGED else WITH if network else WITH_SWARM
            )
        needed = " or ".join(mode for mode in modes if mode != STAGED or len(modes) == 1)
        raise BadSettings(f"{spelling} has no effect without {needed}", hint=f"leave it out, or add {needed}")
