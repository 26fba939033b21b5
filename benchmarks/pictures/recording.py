"""Record a command in a terminal as a small animated SVG: `python -m benchmarks.pictures.recording FILE.svg -- peer demo`.

Needs no browser. The picture shows moments spread evenly over the run, then the last screen; without animation it shows the last screen.
"""

from __future__ import annotations

import argparse
import bisect
import codecs
import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import textwrap
import time
from collections.abc import Sequence
from html import escape
from pathlib import Path

COLUMNS, ROWS = 88, 15
TERMINAL_ROWS = 40
CELL_WIDTH, LINE_HEIGHT = 8.0, 18
MARGIN, TITLE_HEIGHT = 16, 44
NUM_MOMENTS, MOMENT_S, LAST_S = 14, 0.7, 9.0
TEXT_STYLE = (
    "text{font:13.3px ui-monospace,SFMono-Regular,Menlo,Consolas,'DejaVu Sans Mono',monospace;fill:#e4e8ef;white-space:pre}.t{fill:#4cc38a}"
)
CONTROL = re.compile(r"\x1b\[([?\d;]*)([A-Za-z])|\r\n|[\r\n]|[^\x1b\r\n]+")
CUT_SEQUENCE = re.compile(r"\x1b[^A-Za-z]*$")

Frame = tuple[str, ...]


class Terminal:
    """As much of a terminal as a progress table needs: text, line ends, the cursor moved up, a line erased. Colours are dropped."""

    def __init__(self) -> None:
        self._lines = [""]
        self._row = 0
        self._column = 0

    def feed(self, text: str) -> None:
        """Take what the command has written. An escape sequence must not be cut in two."""
        for match in CONTROL.finditer(text):
            if match[2] == "A":
                self._row = max(0, self._row - int(match[1] or 1))
            elif match[2] == "K":
                self._lines[self._row] = ""
            elif match[2] is None:
                self._write(match[0])

    def screen(self) -> Frame:
        """Return the last ROWS lines, long ones folded, without empty ones at the end."""
        lines = [part for line in self._lines for part in (textwrap.wrap(line, COLUMNS) if len(line) > COLUMNS else [line.rstrip()])]
        while lines and not lines[-1]:
            lines.pop()
        return tuple(lines[-ROWS:])

    def _write(self, text: str) -> None:
        if text in ("\r", "\n", "\r\n"):
            self._row += text.endswith("\n")
            self._column = 0
            self._lines += [""] * (self._row + 1 - len(self._lines))
            return
        line = self._lines[self._row].ljust(self._column)
        self._lines[self._row] = line[: self._column] + text + line[self._column + len(text) :]
        self._column += len(text)


def record(command: Sequence[str]) -> list[tuple[float, Frame]]:
    """Run a command in a terminal of its own; return its screens, each with the second since the start. Raises SystemExit if it fails."""
    control, child = pty.openpty()
    fcntl.ioctl(child, termios.TIOCSWINSZ, struct.pack("HHHH", TERMINAL_ROWS, COLUMNS, 0, 0))
    environment = os.environ | {"TERM": "xterm", "COLUMNS": str(COLUMNS), "LINES": str(TERMINAL_ROWS), "NO_COLOR": "1"}
    started_s, screens, terminal, text = time.monotonic(), [], Terminal(), ""
    decoder = codecs.getincrementaldecoder("utf-8")()
    with subprocess.Popen(command, stdin=child, stdout=child, stderr=child, env=environment) as process:
        os.close(child)
        while read := _read(control):
            text += decoder.decode(read)
            whole = text[: text.rfind("\x1b")] if CUT_SEQUENCE.search(text) else text
            terminal.feed(whole)
            text = text[len(whole) :]
            screens.append((time.monotonic() - started_s, terminal.screen()))
    os.close(control)
    if process.returncode != 0:
        raise SystemExit(f"{command[0]} ended with {process.returncode}:\n" + "\n".join(screens[-1][1] if screens else ()))
    return screens


def _read(control: int) -> bytes:
    try:
        return os.read(control, 65536)
    except OSError:  # what Linux answers when the last process of the terminal has ended
        return b""


def moments(screens: Sequence[tuple[float, Frame]], first: str) -> list[Frame]:
    """Return NUM_MOMENTS screens, spread evenly over the time since a screen showed `first`, and the last screen."""
    begin_s = next((at_s for at_s, frame in screens if any(first in line for line in frame)), 0.0)
    last_s, last = screens[-1]
    times_s = [at_s for at_s, _ in screens]
    wanted_s = (begin_s + (last_s - begin_s) * number / NUM_MOMENTS for number in range(NUM_MOMENTS))
    return [*(screens[max(0, bisect.bisect_right(times_s, at_s) - 1)][1] for at_s in wanted_s), last]


def svg(frames: Sequence[Frame], title: str) -> str:
    """Return the animation: each frame for MOMENT_S, the last for LAST_S, then again."""
    height = TITLE_HEIGHT + LINE_HEIGHT * max(map(len, frames)) + MARGIN
    width = 2 * MARGIN + COLUMNS * CELL_WIDTH
    total_s = MOMENT_S * (len(frames) - 1) + LAST_S
    drawn, style = [], []
    for number, frame in enumerate(frames):
        rows = "".join(_row(row, line) for row, line in enumerate(frame) if line)
        drawn.append(f'<g id="f{number}">{rows}</g>')
        start, end = 100 * MOMENT_S * number / total_s, 100 * MOMENT_S * (number + 1) / total_s
        is_last = number == len(frames) - 1
        before = "" if number == 0 else f"0%,{start:.2f}%{{visibility:hidden}}"
        after = "100%{visibility:visible}" if is_last else f"{end:.2f}%,100%{{visibility:hidden}}"
        style.append(f"@keyframes k{number}{{{before}{start + 0.01:.2f}%{{visibility:visible}}{after}}}")
        style.append(f"#f{number}{{animation:k{number} {total_s:.1f}s step-end infinite;visibility:{'visible' if is_last else 'hidden'}}}")
    style.append("@media(prefers-reduced-motion){g{animation:none!important}}")
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height}" width="{width:g}" height="{height}" role="img">'
        f"<title>{escape(title)}</title><style>{TEXT_STYLE}{''.join(style)}</style>"
        f'<rect width="100%" height="100%" rx="8" fill="#10141b"/><text class="t" x="{MARGIN}" y="23">$ {escape(title)}</text>'
        f"{''.join(drawn)}</svg>\n"
    )


def _row(row: int, line: str) -> str:
    length = f'textLength="{len(line) * CELL_WIDTH:g}"'  # so that columns stand under each other in any font
    return f'<text x="{MARGIN}" y="{TITLE_HEIGHT + LINE_HEIGHT * row + 8}" {length} xml:space="preserve">{escape(line)}</text>'


def main() -> None:
    """Record the command and write the picture."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path, help="where to write the SVG")
    parser.add_argument("--title", default="", help="text of the title bar; default: the command")
    parser.add_argument("--first", default="", help="begin with the first screen that shows this text")
    parser.add_argument("command", nargs="+", help="the command, after --")
    given = parser.parse_args()
    frames = moments(record(given.command), given.first)
    given.file.write_text(svg(frames, given.title or " ".join(given.command)))
    print(f"{given.file}: {given.file.stat().st_size} bytes", file=sys.stderr)


if __name__ == "__main__":
    main()
