"""`peer compare`: the comparison that ends a demo, for any home folders on this machine."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer

from gossamer.cli.figures import MEETING_KINDS, StatusObject, bar_text, fitted, loss_text, meetings_text, share_text
from gossamer.cli.options import Data, Json
from gossamer.peer.machine.events import read_events
from gossamer.peer.machine.held_manifest import need_manifest
from gossamer.peer.machine.home import Home
from gossamer.peer.machine.units import bytes_text
from gossamer.protocol.errors import BadSettings

ALONE = "alone"

KeptIn = Annotated[
    Path,
    typer.Option(
        "--home", metavar="DIR", help="Folder that holds the peers' home folders, as `peer demo --home DIR` leaves it.", show_default=False
    ),
]


def compare(home: KeptIn, data: Data = None, as_json: Json = False) -> None:
    """Compare the peers of a run, their average, and a peer that trained alone.

    The comparison uses the held-out loss of the newest checkpoints; other figures are of each peer's last start. The home of the peer
    that trained alone is named `alone`.
    """
    homes, alone = sorted(path.parent for path in home.glob("*/manifest.bin") if path.parent.name != ALONE), home / ALONE
    if not homes:
        raise BadSettings(
            f"{home} holds no home folder of a peer", hint="`peer demo --home DIR` leaves such a folder; or copy home folders there"
        )
    sessions = [last_session(home) for home in homes]
    wall_s = max(ended_s for _, _, ended_s in sessions) - min(began_s for _, began_s, _ in sessions)
    found = comparison(homes, alone, [status for status, _, _ in sessions], data, wall_s, is_drawn=not as_json)
    print(json.dumps(asdict(found)) if as_json else fitted(found.sentences(sys.stdout.encoding), 0))


def measured_names(num_peers: int, num_stages: int) -> list[str]:
    """Return what is measured, in order: the initial weights, the peers, their average, and the peer that trained alone.

    Of a staged run, the stages put together in place of the peers and their average.
    """
    peers = [f"peer-{number}" for number in range(1, num_peers + 1)] if num_stages == 1 else []
    whole = "average of the peers" if num_stages == 1 else f"{num_stages} stages together"
    return ["before training", *peers, whole, "alone, as many steps"]


@dataclass(frozen=True, slots=True)
class Comparison:
    """The figures of one demo; the names are the keys of `peer demo --json`."""

    peers: int
    steps: int
    params: int
    eval_loss_start: float
    eval_loss: tuple[float, ...]
    eval_loss_averaged: float
    eval_loss_alone: float
    meetings: dict[str, int]
    bytes_sent: int
    bits_per_param: float
    blocked_seconds: tuple[float, ...]
    train_seconds: tuple[float, ...]
    own_steps: tuple[int, ...]
    processor_seconds: tuple[Mapping[str, float], ...]  # of each peer, by what for, as in its status
    wall_seconds: float
    stages: int = 1

    def sentences(self, encoding: str) -> str:
        """Return the closing statement of the demo, with a chart of the losses in characters that the encoding has."""
        losses = (self.eval_loss_start, *self.eval_loss, self.eval_loss_averaged, self.eval_loss_alone)
        rows = [
            f"  {name:<22}{loss_text(loss)}  {bar_text(loss / max(losses), encoding)}"
            for name, loss in zip(measured_names(self.peers, self.stages), losses, strict=True)
        ]
        return "\n".join(["held-out loss, nats per token", *rows, "", self._verdict(), self._cost()])

    def _verdict(self) -> str:
        ahead = self.eval_loss_alone - self.eval_loss_averaged
        other = f"one peer that trained alone for the same {self.steps} steps"
        swarm = f"swarm of {self.peers}" + (f", of which each peer holds one of {self.stages} stages," if self.stages > 1 else "")
        if ahead > 0:
            return f"The {swarm} is {ahead:.3f} nats ahead of {other}."
        return f"The {swarm} is not ahead: it is {-ahead:.3f} nats behind {other}."

    def _cost(self) -> str:
        blocked = share_text(sum(self.blocked_seconds), sum(self.train_seconds))
        return (
            f"Meetings: {meetings_text(self.meetings)}. Sent: {bytes_text(self.bytes_sent)}, {self.bits_per_param:.2f} bits per value. "
            f"Blocked by synchronization: {blocked} of training time. {self._processor()} From start to end: {self.wall_seconds:.0f} s."
        )

    def _processor(self) -> str:
        training, coding, node = (sum(spent[what] for spent in self.processor_seconds) for what in ("training", "coding", "node"))
        whole = training + coding + node
        return (
            f"Processor time per inner step: {1000 * whole / max(1, sum(self.own_steps)):.0f} ms, {share_text(coding + node, whole)} of it "
            f"synchronization (coding {share_text(coding, whole)}, node {share_text(node, whole)})."
        )


def total_meetings(statuses: Sequence[StatusObject]) -> dict[str, int]:
    """Return how many meetings there were. Both partners count a completed one; here it counts once."""
    total = {kind: sum(int(status["meetings"][kind]) for status in statuses) for kind in MEETING_KINDS}
    return total | {"completed": total["completed"] // 2}


def last_session(home: Path) -> tuple[StatusObject, float, float]:
    """Return the last status of this home's peer, and when its last start began and ended (Unix seconds).

    Raises BadSettings if no peer has trained there.
    """
    from gossamer.peer.machine import status  # folds events: only where there are some

    events = list(read_events(Home(home).events))
    last = status.of_events(events)
    if not last.own_steps:
        raise BadSettings(f"no peer has trained in {home}", hint="pass home folders of peers that trained in the run")
    began_s = max(event.ts for event in events if event.event == "PeerStarted")
    return last.to_json(), began_s, events[-1].ts


def comparison(
    members: Sequence[Path], lone: Path, statuses: Sequence[StatusObject], data: Path | None, wall_s: float, *, is_drawn: bool
) -> Comparison:
    """Measure the held-out loss of each, drawn on stderr if asked for, and put the figures together."""
    from gossamer.cli.screen import meter  # rich
    from gossamer.peer.model.evaluation import compare_homes  # torch: slow to import, and needed only now

    num_stages = need_manifest(Home(members[0])).manifest().num_stages
    names = measured_names(len(members), num_stages)
    with meter(sys.stderr, "held-out loss", num_lines=1) if is_drawn else nullcontext(lambda *progress: None) as show:
        losses = compare_homes(members, lone, data, follow=lambda model, *progress: show(names[model], *progress))
    return Comparison(
        peers=len(members),
        steps=int(statuses[0]["total_steps"]),
        params=sum({str(status["stage"]): int(status["params"]) for status in statuses}.values()),
        eval_loss_start=losses.start,
        eval_loss=losses.peers,
        eval_loss_averaged=losses.averaged,
        eval_loss_alone=losses.alone,
        meetings=total_meetings(statuses),
        bytes_sent=sum(int(status["bytes"]["sent"]) for status in statuses),
        bits_per_param=float(statuses[0]["bits_per_param"]),
        blocked_seconds=tuple(float(status["blocked_seconds"]) for status in statuses),
        train_seconds=tuple(float(status["train_seconds"]) for status in statuses),
        own_steps=tuple(int(status["own_steps"]) for status in statuses),
        processor_seconds=tuple(status["processor_seconds"] for status in statuses),
        wall_seconds=wall_s,
        stages=num_stages,
    )
