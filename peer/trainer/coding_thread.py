"""The trainer's second thread: it reads the link, and codes messages beside the inner steps.

What a meeting computes between its snapshot and its merge needs no step boundary (meeting.py), so it is done here as soon as the
node asks; snapshot, merge and end too, while the weights are only read; all else is kept for the trainer's next boundary, in its order. An
inner step spends its time in torch, which lets other Python threads run meanwhile.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from gossamer.peer.link import records as ask
from gossamer.peer.link.socket import TrainerEnd
from gossamer.peer.trainer.fragment_state import behind
from gossamer.peer.trainer.outer_loop import OuterLoop

WAIT_S = 0.1  # after so long the thread sees that it is to end


@dataclass(frozen=True, slots=True)
class Batch:
    """Requests of one node, or the news that the node has changed: `session` is the link's."""

    session: int
    requests: tuple[ask.Request, ...]


class CodingThread:
    """Serve the link until closed. `take`, `wait` and `close` belong to the trainer's own thread and return at once but `wait`."""

    def __init__(
        self,
        link: TrainerEnd,
        outer: OuterLoop,
        answer_now: Callable[[ask.BesideRequest, torch.cuda.Stream | None], tuple[ask.Reply, ...] | None],
        hear: Callable[[ask.NodeReport], None],
    ) -> None:
        self._link = link
        self._outer = outer
        self._answer_now = answer_now  # None: not now
        self._hear = hear  # at once: it comes every other second, and what waits for a boundary makes calls wait for it too
        self._session = 0
        self._batches: deque[Batch] = deque()
        self._has_news = threading.Event()
        self.cpu_s = 0.0  # processor time that the thread has taken
        self._is_closing = False
        self._bug: BaseException | None = None
        device = outer.fragments[0].device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._thread = threading.Thread(target=self._run, name="coding")

    def start(self) -> None:
        """Begin to listen to the node."""
        self._thread.start()

    def take(self) -> list[Batch]:
        """Return what is to be done at this step boundary, in the order in which it came. Raises what went wrong in the thread: our bug."""
        if self._bug is not None:
            raise self._bug
        self._has_news.clear()
        return [self._batches.popleft() for _ in range(len(self._batches))]

    def wait(self, seconds: float) -> None:
        """Wait until there is something to take or `seconds` pass: only for a trainer that has nothing to train."""
        self._has_news.wait(seconds)

    def close(self) -> None:
        """End the thread, and the link with it."""
        self._is_closing = True
        if self._thread.ident is not None:
            self._thread.join()
        self._link.close()

    def _run(self) -> None:
        try:
            while not self._is_closing:
                self._link.wait(WAIT_S)
                requests = self._link.poll()
                later: list[ask.Request] = []
                for request in requests:
                    if not self._done_now(request, is_first=not later):
                        later.append(request)
                self._keep(Batch(self._link.session, tuple(later)))
                self.cpu_s = time.thread_time()
        except BaseException as error:
            self._bug = error
            self._has_news.set()

    def _keep(self, batch: Batch) -> None:
        if batch.requests or batch.session != self._session:
            self._session = batch.session
            self._batches.append(batch)
            self._has_news.set()

    def _done_now(self, request: ask.Request, *, is_first: bool) -> bool:
        """Answer a request that needs no step boundary; do ahead what can be done of one that does.

        `is_first`: nothing that came with it waits for the boundary.
        """
        match request:
            case ask.NodeReport():
                self._hear(request)
                return True
            case ask.Open() | ask.Drop() | ask.Solo() | ask.Defer():
                return is_first and self._answered(request)
            case ask.Prepare() | ask.Encode() | ask.Check():
                with self._beside_training(request.meeting):
                    reply = self._outer.code(request)
                self._link.send(reply, self._link.session)
                return True
            case ask.CopyState() | ask.SketchSlow() | ask.CodeSlow() | ask.DecodeSlow():
                with self._beside_training():
                    written = self._outer.write(request)
                self._link.send(written, self._link.session)
                return True
            case ask.Apply():
                with (
                    self._beside_training(request.meeting),
                    contextlib.suppress(ValueError, torch.OutOfMemoryError),
                ):  # found again at the boundary
                    self._outer.step_ahead(request)
                return is_first and self._answered(request)
        return False

    def _answered(self, request: ask.BesideRequest) -> bool:
        """Carry out a request in the middle of an inner step, unless what came before still waits: an Adopt, news of another node."""
        if self._batches or self._link.session != self._session:
            return False
        replies = self._answer_now(request, self._stream)
        for reply in replies or ():
            self._link.send(reply, self._session)
        return replies is not None

    @contextlib.contextmanager
    def _beside_training(self, meeting: int | None = None) -> Iterator[None]:
        """Run what is inside on a GPU beside the inner steps, after a meeting's snapshot; finish it. Slow weights rest on the host."""
        taken = None if meeting is None else self._outer.snapshot_taken(meeting)
        with behind(taken, self._stream):
            yield
