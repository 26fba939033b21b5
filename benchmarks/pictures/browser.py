"""A headless browser, driven over WebDriver: opens a page, takes pictures, and returns the console's messages."""

from __future__ import annotations

import base64
import contextlib
import io
import json
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from PIL import Image

FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage", "--hide-scrollbars",
)  # fmt: skip
START_S = 20.0


class Browser:
    """One session of the browser."""

    def __init__(self, driver: str, session: str) -> None:
        self._place = f"{driver}/session/{session}"

    def open(self, url: str) -> None:
        """Go to a page and wait until it is loaded."""
        _post(f"{self._place}/url", {"url": url})

    def run(self, script: str) -> Any:
        """Run a script in the page and return its result."""
        return _post(f"{self._place}/execute/sync", {"script": script, "args": []})

    def look(self, width: int, is_dark: bool) -> None:
        """Set the width, and light or dark mode."""
        screen = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
        self._cdp("Emulation.setDeviceMetricsOverride", screen)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if is_dark else "light"}
        self._cdp("Emulation.setEmulatedMedia", {"features": [scheme]})

    def picture(self, file: Path) -> None:
        """Save the whole page as a PNG of few colours, which is a third of the size."""
        shot = self._cdp("Page.captureScreenshot", {"format": "png", "captureBeyondViewport": True})
        Image.open(io.BytesIO(base64.b64decode(shot["data"]))).convert("RGB").quantize(64).save(file, optimize=True)

    def complaints(self) -> list[str]:
        """Return the warnings and errors on the console since the last call."""
        entries = _post(f"{self._place}/se/log", {"type": "browser"})
        return [entry["message"] for entry in entries if entry["level"] in ("WARNING", "SEVERE")]

    def _cdp(self, command: str, parameters: dict[str, Any]) -> Any:
        return _post(f"{self._place}/goog/cdp/execute", {"cmd": command, "params": parameters})


@contextlib.contextmanager
def browser() -> Iterator[Browser]:
    """Run a browser with an empty profile inside the context."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory() as profile, subprocess.Popen(["chromedriver", f"--port={port}", "--log-level=OFF"]) as driver:
        try:
            place = f"http://127.0.0.1:{port}"
            _wait(place)
            options = {"args": [*FLAGS, f"--user-data-dir={profile}"]}
            wanted = {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
            session = _post(f"{place}/session", {"capabilities": {"alwaysMatch": wanted}})["sessionId"]
            try:
                yield Browser(place, session)
            finally:
                _ask(urllib.request.Request(f"{place}/session/{session}", method="DELETE"))
        finally:
            driver.terminate()


def _wait(place: str) -> None:
    deadline_s = time.monotonic() + START_S
    while True:
        try:
            _ask(urllib.request.Request(f"{place}/status"))
            return
        except urllib.error.URLError:
            if time.monotonic() > deadline_s:
                raise
            time.sleep(0.1)


def _post(url: str, body: dict[str, Any]) -> Any:
    return _ask(urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"}))


def _ask(request: urllib.request.Request) -> Any:
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.loads(answer.read())["value"]
    except urllib.error.HTTPError as error:
        raise RuntimeError(json.loads(error.read())["value"]["message"]) from error
