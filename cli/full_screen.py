"""The full-screen view of `peer watch`: one panel per peer, refreshed each second from the same status as the page."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from rich.table import Table
from rich.text import Text
from textual.app import App, ComposeResult
from textual.containers import Horizontal, Vertical, VerticalScroll
from textual.widgets import Footer, Header, ProgressBar, Sparkline, Static

from gossamer.cli.figures import loss_text
from gossamer.cli.page.peers import Peers

LOOK_S = 1.0
CHARTS = {"loss": "loss", "tokens_per_second": "a second", "meetings": "meetings a second", "sent": "bytes sent a second"}
COUNTS = ("meetings", "sent")  # drawn as the increase per second
ROWS = (
    "run",
    "program",
    "loss",
    "my part",
    "blocked",
    "meetings",
    "partners",
    "limits",
    "costs",
    "warnings",
)  # `peer status` shows the others


class PeerPanel(Vertical):
    """The panel of one peer."""

    DEFAULT_CSS = """
    PeerPanel { border: round $primary; padding: 0 1; height: auto; margin-bottom: 1; }
    PeerPanel .sentence { text-style: bold; }
    PeerPanel ProgressBar { width: 100%; margin-bottom: 1; }
    PeerPanel Bar { width: 1fr; }
    PeerPanel .charts { height: 5; }
    PeerPanel .chart { width: 1fr; margin-right: 2; height: 5; }
    PeerPanel Sparkline { height: 3; }
    PeerPanel .figures, PeerPanel .partners { margin-top: 1; height: auto; }
    """

    def __init__(self, home: Path) -> None:
        super().__init__()
        self.border_title = str(home)

    def compose(self) -> ComposeResult:
        """Lay out the panel."""
        yield Static("looking", classes="sentence", markup=False)
        yield ProgressBar(total=1, show_eta=False)
        with Horizontal(classes="charts"):
            for key, title in CHARTS.items():
                with Vertical(classes="chart"):
                    yield Static(title, id=f"title-{key}", markup=False)
                    yield Sparkline([], id=key, summary_function=mean)
        yield Static(classes="figures")
        yield Static(classes="partners")

    def draw(self, peer: dict[str, Any]) -> None:
        """Draw the data of the peer, as Peers.look returns it."""
        status = peer["status"]
        words = peer["sentence"] if peer["runs"] or not status else f"{peer['words']}; its last state: {peer['sentence']}"
        self.query_one(".sentence", Static).update(words)
        if not status:
            return
        self.border_title = " - ".join(filter(None, (status["run_name"], peer["home"])))
        progress, steps = status["progress"], (max(1, status["total_steps"]), status["step"])
        total, done = (1.0, progress["share"]) if progress else steps
        self.query_one(ProgressBar).update(total=total, progress=done)
        self.query_one("#title-tokens_per_second", Static).update(f"{status['unit']} {CHARTS['tokens_per_second']}")
        self._draw_charts(peer["history"].get("points", {}))
        self.query_one(".figures", Static).update(_grid([(name, peer["rows"][name]) for name in ROWS if name in peer["rows"]]))
        if peer["partners"]:
            self.query_one(".partners", Static).update(_grid(peer["partners"], peer["partner_columns"]))

    def _draw_charts(self, points: dict[str, list[float | None]]) -> None:
        self.query_one(".charts").display = bool(points)
        for key, title in CHARTS.items():
            values = [value for value in points.get(key, ()) if value is not None]
            self.query_one(f"#{key}", Sparkline).data = _rates(points["ts"], values) if key in COUNTS and points else values
            if key == "loss" and values:
                self.query_one(f"#title-{key}", Static).update(f"{title}: {loss_text(values[0])} to {loss_text(values[-1])}")


def _rates(times: Sequence[float | None], counts: Sequence[float]) -> list[float]:
    known = [(ts, count) for ts, count in zip(times, counts, strict=True) if ts is not None]
    return [(later[1] - sooner[1]) / max(1e-3, later[0] - sooner[0]) for sooner, later in itertools.pairwise(known)]


def _grid(rows: Sequence[Sequence[str]], columns: Sequence[str] = ()) -> Table:
    table = Table(box=None, pad_edge=False, show_header=bool(columns), header_style="dim")
    for column in columns or ("", ""):
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))
    return table


class FullScreen(App[None]):
    """The whole terminal: a panel for each home."""

    TITLE = "Gossamer"
    BINDINGS = [("q", "quit", "end")]  # noqa: RUF012 - textual's way
    ENABLE_COMMAND_PALETTE = False

    def __init__(self, homes: Sequence[Path]) -> None:
        super().__init__()
        self._peers = Peers(homes)

    def compose(self) -> ComposeResult:
        """Lay out the screen."""
        yield Header()
        with VerticalScroll():
            for home in self._peers.homes:
                yield PeerPanel(home)
        yield Footer()

    async def on_mount(self) -> None:
        """Start refreshing."""
        await self.look()
        self.set_interval(LOOK_S, self.look)

    async def look(self) -> None:
        """Ask all peers and draw them."""
        for panel, peer in zip(self.query(PeerPanel), await self._peers.look(), strict=True):
            panel.draw(peer)
