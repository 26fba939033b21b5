"""Create the pictures of the pages: each scene at three widths, light and dark; fails on warnings of the browser's console."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

from benchmarks.pictures.browser import Browser, browser
from benchmarks.pictures.scenes import RUNS, SCENES, play

MACHINES = "machines"  # the peer of one home, and those of two further machines, of which one does not answer
WIDTHS = {"wide": 1280, "middle": 768, "narrow": 390}
DRAWN_S = 15.0
READY_S = 120.0
DRAWN = "return document.querySelectorAll('.card').length > 0 && document.getElementById('connection').textContent === 'live'"
OVERFLOW = "return document.documentElement.scrollWidth > innerWidth"


def main() -> None:
    """Create all pictures, or those of some scenes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="where to put them")
    names = [f"{scene}-{size}-{scheme}" for scene in (*SCENES, *RUNS, MACHINES) for size in WIDTHS for scheme in ("light", "dark")]
    parser.add_argument("names", nargs="*", default=names, help="which, like training-wide-light; without: all")
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as homes, playing(Path(homes)), browser() as window:
        complaints = [words for name in (*SCENES, *RUNS) for words in pictures(window, Path(homes) / name, given.folder, given.names)]
        with dashboard(Path(homes) / "paused", Path(homes) / "failed") as there:
            others = ["--with", there, "--with", "http://127.0.0.1:9/?token=closed"]
            complaints += pictures(window, Path(homes) / "training", given.folder, given.names, MACHINES, others)
    sys.exit("\n".join(complaints) or None)


@contextlib.contextmanager
def playing(folder: Path) -> Iterator[None]:
    """Serve all scenes inside the context."""
    loop, ready = asyncio.new_event_loop(), threading.Event()
    work = loop.create_task(play(folder, ready))
    thread = threading.Thread(target=lambda: loop.run_until_complete(asyncio.wait([work])))
    thread.start()
    try:
        if not ready.wait(READY_S):
            raise SystemExit("the scenes are not served: their pictures would show no peer")
        yield
    finally:
        loop.call_soon_threadsafe(work.cancel)
        thread.join()


def pictures(window: Browser, home: Path, folder: Path, names: Collection[str], scene: str = "", options: Sequence[str] = ()) -> list[str]:
    """Create the requested pictures of a peer; return the console's messages."""
    scene, complaints = scene or home.name, list[str]()
    with dashboard(home, *(["--run"] if home.name in RUNS else []), *options) as url:
        for size, width in WIDTHS.items():
            for scheme in ("light", "dark"):
                if (name := f"{scene}-{size}-{scheme}") not in names:
                    continue
                window.look(width, scheme == "dark")
                window.open(url)
                wait(window)
                if window.run(OVERFLOW):
                    complaints.append(f"{name} is wider than the screen")
                window.picture(folder / f"{name}.png")
        complaints += window.complaints()
        window.open("about:blank")  # or it would complain that its server ends
    return complaints


@contextlib.contextmanager
def dashboard(home: Path, *arguments: str | Path) -> Iterator[str]:
    """Serve the page of a home inside the context, with further homes or options; yield its address."""
    command = [sys.executable, "-m", "gossamer.cli.main", "dashboard", str(home), *map(str, arguments)]
    with subprocess.Popen(command, env=os.environ | {"HOME": str(home.parent)}, stdout=subprocess.PIPE, text=True) as page:
        try:
            assert page.stdout is not None
            yield page.stdout.readline().strip()
        finally:
            page.terminate()


def wait(window: Browser) -> None:
    """Wait until the page has drawn its data."""
    deadline_s = time.monotonic() + DRAWN_S
    while not window.run(DRAWN):
        if time.monotonic() > deadline_s:
            raise SystemExit("the page has drawn nothing")
        time.sleep(0.1)
    time.sleep(1.0)  # for the charts to come to rest


if __name__ == "__main__":
    main()
