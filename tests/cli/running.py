"""A peer that runs, as far as the control socket shows: for the verbs that speak to one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from peer.control import serving
from peer.home import Home
from peer.runtime import runtime_folder
from peer.status import Status
from tests.cli.shell import Said, Shell

ADDRESS = "/ip4/127.0.0.1/tcp/4001"


class Running:
    """Answers requests with its status, and notes what it was asked; after `stops_after` answers it looks as if it had stopped."""

    def __init__(self, shell: Shell, stops_after: int = 100) -> None:
        self._stops_after = stops_after
        self.status = Status(state="training", run_id="ab" * 32, peer_id=shell("id").out.strip(), step=5, total_steps=9, loss=2.5)
        self.asked: list[dict[str, Any]] = []
        self._home = Home(shell.home)

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        self.asked.append(request)
        if len(self.asked) == self._stops_after:
            self._home.running.unlink()
        return self.status.to_json() if request["verb"] == "status" else {"leaving": True}

    def during(self, command: Callable[[], Said]) -> Said:
        """Run the command while this peer runs."""

        async def both() -> Said:
            with runtime_folder(0) as runtime:
                async with serving(self._home, runtime, self.answer):
                    return await asyncio.to_thread(command)

        return asyncio.run(both())
