"""The finished runs of a sweep on disk, so that an interrupted sweep continues with the next one."""

from __future__ import annotations

import hashlib
import json
import os
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from gossamer.peer.machine.status import VERSION
from gossamer.peer.simulator.results import Result, Row
from gossamer.peer.simulator.scenario import Scenario
from gossamer.peer.text.documents import text_files


class KeptRuns:
    """The rows of one sweep. It is found again by everything that its figures depend on; a sweep that ends removes it."""

    def __init__(self, folder: Path, scenarios: list[Scenario], data: Path | None, *settings: Any) -> None:
        """`settings`: where and how the sweep is measured. Other scenarios, settings or text make other kept runs."""
        files = [(str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in text_files(data)] if data is not None else []
        runs = [[made.manifest.run_id.hex(), str(made)] for made in scenarios]
        digest = hashlib.sha256(json.dumps([VERSION, runs, files, *settings], default=str).encode()).hexdigest()
        self._file = folder / f"sweep-{digest[:32]}.jsonl"

    def read(self) -> dict[int, tuple[Result | None, str]]:
        """Return each finished run's result, or None and its failure, by its number."""
        found: dict[int, tuple[Result | None, str]] = {}
        with suppress(OSError):  # there is none
            for line in self._file.read_text().splitlines():
                with suppress(ValueError, KeyError, TypeError):  # a line that an interruption has cut
                    kept = json.loads(line)
                    result = Result.from_kept(kept["result"]) if kept["result"] is not None else None
                    found[int(kept["number"])] = result, str(kept["failure"])
        return found

    def add(self, number: int, row: Row) -> None:
        """Keep a finished run. Raises OSError."""
        self._file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        line = {"number": number, "result": asdict(row.result) if row.result else None, "failure": row.failure}
        with self._file.open("a") as out:
            out.write("\n" + json.dumps(line))  # also behind a line that an interruption has cut
            out.flush()
            os.fsync(out.fileno())

    def remove(self) -> None:
        """Forget the runs: the sweep has ended."""
        with suppress(OSError):
            self._file.unlink()
