"""A trainer without tensors: to its node it is a real one, but it counts steps by the time and answers with random bytes."""

from __future__ import annotations

import asyncio
import hashlib
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from gossamer.peer.link import messages
from gossamer.peer.link.messages import File, payload_name
from gossamer.peer.link.payload_folder import PayloadFolder
from gossamer.peer.link.socket import NodeEnd
from gossamer.protocol.messages.messages import RunPhase
from gossamer.protocol.messages.terms import FragmentTerms, ModelPlan
from gossamer.protocol.tasks import loop_s

PLAN = ModelPlan(codec_id=16, fragments=(FragmentTerms(128, 8192, 16), FragmentTerms(128, 8192, 16)), state_bytes=32768)
STEP_S = 1.0
DUE_S = (30.0, 90.0)  # between two countdowns of a fragment
PROGRESS_S = 5.0
TOKENS = 512  # of a step


class StandInTrainer(NodeEnd):
    """The link to a simulated trainer. `joins`: it starts only on `Start`, or with the weights of other peers."""

    def __init__(self, payloads: PayloadFolder, rng: random.Random, *, joins: bool) -> None:
        super().__init__(Path())
        self.applied: Counter[str] = Counter()
        self._payloads = payloads
        self._rng = rng
        self._has_begun = not joins
        self._global_step = 0
        self._clock_s = 0.0  # loop time at which it stood so
        self._open: dict[int, int] = {}  # meetings by fragment

    async def connect(self) -> ModelPlan:
        """Return the plan at once."""
        return PLAN

    async def run(self, on_report: Callable[[messages.TrainerReport], None]) -> None:
        """Train, as far as the node can observe, until cancelled."""
        self._set_global_step(self._global_step)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._report_progress(on_report))
            for fragment in range(len(PLAN.fragments)):
                tasks.create_task(self._count_down(on_report, fragment))

    async def _report_progress(self, on_report: Callable[[messages.TrainerReport], None]) -> None:
        while True:
            on_report(messages.Progress(self._clock, RunPhase.TRAIN, self._has_begun))
            await asyncio.sleep(PROGRESS_S if self._has_begun else 1.0)

    async def _count_down(self, on_report: Callable[[messages.TrainerReport], None], fragment: int) -> None:
        while True:
            await asyncio.sleep(self._rng.uniform(*DUE_S))
            if self._has_begun:
                on_report(messages.Due(fragment, RunPhase.TRAIN))

    @property
    def _clock(self) -> int:
        if not self._has_begun:
            return 0
        return self._global_step + int((loop_s() - self._clock_s) / STEP_S)

    def _set_global_step(self, global_step: int) -> None:
        self._global_step, self._clock_s = global_step, loop_s()

    async def request(self, request: messages.AnsweredRequest) -> messages.Reply:
        """Answer at once."""
        match request:
            case messages.Open(number, fragment):
                if fragment in self._open:
                    return messages.Unavailable(number, "the fragment is in another meeting")
                self._open[fragment] = number
                return messages.Opened(number, TOKENS, self._clock, RunPhase.TRAIN)
            case messages.Prepare(number):
                return messages.SketchReady(number, self._write(number, File.OWN_SKETCH))
            case messages.Encode(number):
                return messages.PayloadReady(number, self._write(number, File.OWN_PAYLOAD))
            case messages.Check(number):
                return messages.Checked(number, True, "", "")
            case messages.Apply(number, meeting_id):
                self.applied[meeting_id] += 1
                self._forget(number)
                return messages.Applied(number)
            case messages.Adopt(name, global_step):
                self._set_global_step(global_step)
                self._has_begun = True
                return messages.Adopted(name, True, "")
            case messages.CopyState(name):
                self._payloads.write(name, bytes(PLAN.state_bytes))
                return messages.Written(name, "")
            case messages.MoveFragments(name):
                return messages.FragmentsMoved(name, {}, "nothing is trained here")
        return messages.Written(request.name, "nothing is trained here")

    def notify(self, request: messages.Notification) -> None:
        """Handle a request that has no reply."""
        match request:
            case messages.Drop(number):
                self._forget(number)
            case messages.Start():
                self._set_global_step(0)
                self._has_begun = True
            case messages.StepBack(global_step):
                self._set_global_step(global_step)

    def _forget(self, number: int) -> None:
        self._open = {fragment: meeting for fragment, meeting in self._open.items() if meeting != number}

    def _write(self, number: int, file: File) -> str:
        sizes = PLAN.fragments[next((fragment for fragment, meeting in self._open.items() if meeting == number), 0)]
        data = self._rng.randbytes(sizes.sketch_bytes if file is File.OWN_SKETCH else sizes.payload_bytes)
        self._payloads.write(payload_name(number, file), data)
        return hashlib.sha256(data).hexdigest()
