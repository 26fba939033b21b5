"""A peer that runs, as far as the control socket shows: for the verbs that speak to one."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from gossamer.peer.machine.control_socket import serving
from gossamer.peer.machine.home import Home
from gossamer.peer.machine.partners import Partner
from gossamer.peer.machine.runtime_folder import runtime_folder
from gossamer.peer.machine.status import Status
from tests.cli.shell import CommandResult, Shell

ADDRESS = "/ip4/127.0.0.1/tcp/4001"


class Running:
    """Answers requests with its status, and notes what it was asked."""

    def __init__(self, shell: Shell) -> None:
        self.status = Status(state="training", run_id="ab" * 32, peer_id=shell("id").out.strip(), step=5, total_steps=9, loss=2.5)
        self.trouble = ""
        self.run: dict[str, Any] = {}
        self.partners: list[Partner] = []
        self.asked: list[dict[str, Any]] = []
        self._home = Home(shell.home)

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        self.asked.append(request)
        answers = {
            "status": self.status.to_json(),
            "health": {"trouble": self.trouble},
            "peers": {"peers": [asdict(partner) for partner in self.partners]},
            "history": self.status.history.to_json(),
            "run": self.run,
            "leave": {"leaving": True},
        }
        return answers[request["verb"]]

    def stop(self, *, is_killed: bool) -> None:
        """Look as if it had ended: in good order, or by a signal that left its traces in the home."""
        if is_killed:
            record = json.loads(self._home.running.read_text())
            Path(record["control"]).unlink()
        else:
            self._home.running.unlink()

    def during(self, command: Callable[[], CommandResult]) -> CommandResult:
        """Run the command while this peer runs."""

        async def both() -> CommandResult:
            with runtime_folder(0) as runtime:
                async with serving(self._home, runtime, self.answer):
                    return await asyncio.to_thread(command)

        return asyncio.run(both())
