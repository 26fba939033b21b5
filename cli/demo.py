"""`peer demo`: a swarm of real peers on this machine, and one that trains alone for as many steps, side by side."""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated

import typer

from gossamer.cli.compare import ALONE, Comparison, comparison, measured_names
from gossamer.cli.curves import draw_curves, need_plot
from gossamer.cli.figures import StatusObject, fitted
from gossamer.cli.generated_options import Given, takes
from gossamer.cli.local_swarm import POLL_S, LocalSwarm, local_swarm
from gossamer.cli.manifests import RunOptions, changed, read_manifest
from gossamer.cli.options import Data, Json
from gossamer.cli.screen import Screen, screen
from gossamer.peer.machine.extras import need_extra
from gossamer.peer.machine.home import Home
from gossamer.peer.supervisor.children import ChildFailed
from gossamer.protocol.errors import ExitCode
from gossamer.protocol.run.manifest import Manifest

NUM_STEPS = 600
FIRST_SHARE = 0.05  # of the steps, after which the demo estimates its duration
MEASURED_STEPS = 64  # of a single peer take as long as the measurement of one model
ON_THIS_MACHINE = ("--listen", "127.0.0.1", "--port", "0", "--threads", "1")

DemoSteps = Annotated[int, typer.Option("--steps", metavar="N", min=1, help="Length of the run in inner steps.")]
Peers = Annotated[int, typer.Option("--peers", metavar="N", min=2, max=64, help="Peers in the swarm, without the one that trains alone.")]
KeptIn = Annotated[
    Path | None,
    typer.Option(
        "--home", metavar="DIR", help="Keep the peers' home folders here. Default: a temporary folder, removed unless a peer fails."
    ),
]

Devices = Annotated[str, typer.Option("--devices", metavar="NAME", help="Where all peers train, like cpu or gpu; they share it.")]
Plot = Annotated[
    Path | None, typer.Option("--plot", metavar="FILE.png", help="Draw the loss curves of all peers. Needs matplotlib.", show_default=False)
]


@takes("changes", RunOptions, "seed", "codec", "inner_steps", "method", "stages")
def demo(
    peers: Peers = 4,
    steps: DemoSteps = NUM_STEPS,
    data: Data = None,
    *,
    changes: Given,
    devices: Devices = "cpu",
    home: KeptIn = None,
    plot: Plot = None,
    as_json: Json = False,
) -> None:
    """Train a swarm of real peers on this machine and watch it.

    At the end it shows the held-out loss of each peer, of their average, and of a peer that trained alone for as many steps.
    """
    need_extra("text")
    if plot is not None:
        need_plot(plot)
    manifest = changed(read_manifest(None, own_text=data is not None), {"steps": steps, **changes})
    with demo_folder(home) as folder:
        found = trained(folder, manifest, peers, data, devices, is_drawn=not as_json)
        if plot is not None:
            draw_curves({home.name: home for home in sorted(path.parent for path in folder.glob("*/manifest.bin"))}, ALONE, plot)
    print(json.dumps(asdict(found)) if as_json else fitted(found.sentences(sys.stdout.encoding), 0))
    drawn = f"the loss curves are in {plot}" if plot is not None else "--plot FILE.png draws the loss curves of all, beside the one alone"
    print(drawn, file=sys.stderr)


@contextmanager
def demo_folder(kept: Path | None) -> Iterator[Path]:
    """Yield the folder for the peers' homes: the given one, or a temporary one that is removed at the end.

    The temporary folder is kept if a peer failed through a bug: it holds what to report.
    """
    if kept is not None:
        folder = Home(kept)
        folder.create()
        yield folder.path
        return
    temporary = Path(tempfile.mkdtemp(prefix="gossamer-demo-"))
    is_evidence = False
    try:
        yield temporary
    except ChildFailed as died:
        is_evidence = died.exit_code is ExitCode.OUR_FAULT
        raise
    finally:
        if not is_evidence:
            shutil.rmtree(temporary, ignore_errors=True)


def trained(folder: Path, manifest: Manifest, num_peers: int, data: Path | None, devices: str, *, is_drawn: bool) -> Comparison:
    """Train a swarm and a lone peer at the same time, then compare them. Raises ChildFailed, KeyboardInterrupt."""
    started_s = time.monotonic()
    with screen(sys.stderr) as drawn, local_swarm(folder) as swarm:
        drawn.print_line(f"starting {num_peers} peers, and one that trains alone, in {folder}")
        file = folder / "manifest.toml"
        file.write_text(manifest.to_toml())
        options = (*ON_THIS_MACHINE, "--devices", devices, *(("--data", str(data)) if data else ()))
        first = swarm.start("peer-1", ["host", str(file), *options, "--wait-for-peers", str(num_peers - 1), "--uses", str(num_peers)])
        lone_file = folder / "alone.toml"
        lone_file.write_text(whole(manifest).to_toml())
        lone = swarm.start(ALONE, ["host", str(lone_file), *options, "--alone"])
        invite = first.invite()
        members = [first, *(swarm.start(f"peer-{number}", ["join", invite, *options]) for number in range(2, num_peers + 1))]
        watch(swarm, drawn, Forecast(manifest.run.total_steps, num_peers, started_s, manifest.num_stages))
        drawn.print_line("trained; measuring the held-out loss of each")
    found = comparison([peer.home for peer in members], lone.home, [peer.status for peer in members], data, 0.0, is_drawn=is_drawn)
    return replace(found, wall_seconds=time.monotonic() - started_s)  # with the measurement


def whole(manifest: Manifest) -> Manifest:
    """Return the same run in which each peer holds the whole model."""
    if manifest.num_stages == 1:
        return manifest
    tables = manifest.model_dump(exclude={"stages"})
    return Manifest.checked(tables)


class Forecast:
    """Estimate once, after the first steps of all peers, how long the demo takes. Times are of time.monotonic."""

    def __init__(self, total_steps: int, num_peers: int, started_s: float, num_stages: int = 1) -> None:
        self._total_steps = total_steps
        self._num_peers = num_peers
        self._num_models = len(measured_names(num_peers, num_stages))
        self._started_s = started_s
        self._first: tuple[int, float] | None = None  # step of the slowest peer when all trained, and its time
        self._is_announced = False

    def sentence(self, statuses: Sequence[StatusObject], now_s: float) -> str:
        """Return the sentence; empty if it is too early or the sentence was already returned."""
        step = min((int(status["step"]) if status else 0 for status in statuses), default=0)
        if step and self._first is None:
            self._first = (step, now_s)
        if self._is_announced or self._first is None or step < self._first[0] + FIRST_SHARE * self._total_steps:
            return ""
        self._is_announced = True
        step_s = (now_s - self._first[1]) / (step - self._first[0])
        to_train_s = step_s * (self._total_steps - step)
        to_measure_s = step_s / (self._num_peers + 1) * MEASURED_STEPS * self._num_models
        minutes = (now_s - self._started_s + to_train_s + to_measure_s) / 60
        return f"about {minutes:.0f} minutes in all on this machine" if minutes > 1.5 else "about a minute in all on this machine"


def watch(swarm: LocalSwarm, drawn: Screen, forecast: Forecast) -> None:
    """Draw the status of each peer until all have ended. Raises ChildFailed."""
    while swarm.refresh():
        show_all(swarm, drawn)
        if sentence := forecast.sentence([peer.status for peer in swarm.peers], time.monotonic()):
            drawn.print_line(sentence)
        time.sleep(POLL_S)
    show_all(swarm, drawn)


def show_all(swarm: LocalSwarm, drawn: Screen) -> None:
    """Draw the status of each peer that has one."""
    for peer in swarm.peers:
        if peer.status:
            drawn.show(peer.name, peer.status)
