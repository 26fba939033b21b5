"""Fragment sync: one side's slow weights move to another peer's, which stays where it is; no meeting, and no fragment is locked.

The peer that lags behind sends a sketch of its slow weights; the source answers with its sketch and payload, coded as in a meeting. This
only reads slow weights, so it may run on a second thread; the model moves at one step boundary, by all fragments that were decoded until
then.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from gossamer.peer.link import messages
from gossamer.peer.link.messages import File, payload_name
from gossamer.peer.link.payload_folder import PayloadFolder
from gossamer.peer.trainer.fragment_state import FragmentState, bytes_on
from gossamer.peer.trainer.losses import Losses, try_change
from gossamer.peer.trainer.replica import Replica
from gossamer.peer.trainer.weights import Weights

SYNC_TOLERANCE: Final = 0.05  # times the size of our own loss: fragments that have not come yet hold these back


@dataclass(frozen=True, slots=True)
class FragmentShift:
    """The decoded gap of one fragment, until all of its round are there."""

    name: str  # of the fragment's sync, in the names of its files
    fragment: FragmentState
    values: Tensor  # f32[numel] at rest: from our slow weights to the source's
    failed_share: float  # of the blocks


@dataclass(slots=True)
class OpenSync:
    """A sync whose sketch is written, until the answer is decoded."""

    fragment: FragmentState
    slow: Tensor  # f32[numel] at rest, as it was sketched
    sketch: Tensor
    seed: int


class FragmentSyncs:
    """The fragment syncs of one replica, on either side. Every method but `move` may be called from a second thread."""

    def __init__(self, fragments: Sequence[FragmentState], payloads: PayloadFolder) -> None:
        self._fragments = fragments
        self._payloads = payloads
        self._open: dict[str, OpenSync] = {}
        self._decoded: dict[str, FragmentShift] = {}
        self._working = threading.Lock()

    def sketch(self, request: messages.SketchSlow) -> None:
        """Write a sketch of a fragment's slow weights. Raises OSError, and ValueError for weights that are not finite."""
        fragment = self._fragments[request.fragment]
        slow = fragment.slow
        sketch = fragment.codec.sketch(fragment.on_device(slow), request.seed)
        self._write(request.name, File.OWN_SKETCH, sketch)
        with self._working:  # an earlier sync of this fragment has ended without a result
            self._open = {name: sync for name, sync in self._open.items() if sync.fragment is not fragment}
            self._decoded = {name: shift for name, shift in self._decoded.items() if shift.fragment is not fragment}
            self._open[request.name] = OpenSync(fragment, slow, sketch, request.seed)

    def code(self, request: messages.CodeSlow) -> None:
        """Write sketch and payload of a fragment's slow weights, in one file, against another peer's sketch. Raises as `sketch`."""
        fragment = self._fragments[request.fragment]
        slow = fragment.on_device(fragment.slow)
        theirs = self._read(request.name, File.PARTNER_SKETCH, slow.device)
        sketch = fragment.codec.sketch(slow, request.seed)
        payload = fragment.codec.encode(slow, request.seed, sketch, theirs).payload
        self._write(request.name, File.OWN_PAYLOAD, torch.cat((sketch, payload)))

    def decode(self, request: messages.DecodeSlow) -> None:
        """Decode the source's answer, and keep it. Raises ValueError for an answer that no honest peer sends, and without a sketch."""
        with self._working:
            sync = self._open.pop(request.name, None)
        if sync is None:
            raise ValueError("there is no such sync here: the trainer was restarted")
        codec, fragment = sync.fragment.codec, sync.fragment
        answer = self._read(request.name, File.PARTNER_PAYLOAD, fragment.device)
        theirs, payload = answer[: codec.sketch_bytes], answer[codec.sketch_bytes :]
        gap = codec.gap(codec.encode(fragment.on_device(sync.slow), sync.seed, sync.sketch, theirs), payload)
        shift = FragmentShift(request.name, fragment, fragment.to_host(gap.values), float(gap.failed.float().mean()))
        with self._working:
            self._decoded[request.name] = shift

    def move(self, request: messages.MoveFragments, replica: Replica) -> messages.FragmentsMoved:
        """Move fragments, slow and fast weights alike, by what was decoded and `try_shifts` accepts. Call at a step boundary."""
        sources = [[shift for shift in self._take(names) if shift.fragment.meeting is None] for names in request.sources]
        moved, reason = try_shifts(list(filter(None, sources)), replica.weights, replica.program.losses)
        for shift in moved:
            fragment = shift.fragment
            fragment.slow = fragment.to_host(fragment.on_device(fragment.slow) + fragment.on_device(shift.values))
            fragment.num_writes += 1
        if moved:
            replica.global_step = max(replica.global_step, min(request.global_step, replica.manifest.run.total_steps))
        return messages.FragmentsMoved(request.name, {shift.name: shift.failed_share for shift in moved}, reason)

    def forget(self) -> None:
        """Forget every sync: the node that asked for them is gone."""
        with self._working:
            self._open.clear()
            self._decoded.clear()

    def _take(self, names: Iterable[str]) -> list[FragmentShift]:
        with self._working:
            return [self._decoded.pop(name) for name in names if name in self._decoded]

    def _write(self, name: str, file: File, data: Tensor) -> None:
        self._payloads.write(payload_name(name, file), data.cpu().numpy().data)

    def _read(self, name: str, file: File, device: torch.device) -> Tensor:
        return bytes_on(device, self._payloads.read(payload_name(name, file)))


def try_shifts(
    sources: Sequence[Sequence[FragmentShift]], weights: Weights, measure: Callable[[], Losses]
) -> tuple[list[FragmentShift], str]:
    """Move the fast weights by the shifts of each source in turn, if the loss on our own held-out data is then no worse than before.

    Return the shifts that count, and why others do not. Each source is measured alone: what one has bettered pays for no harm of the next.
    """
    best, moved, reasons = measure(), list[FragmentShift](), list[str]()
    for number, shifts in enumerate(sources, 1):

        def add_all(shifts: Sequence[FragmentShift] = shifts) -> None:
            for part in shifts:
                weights.add(part.fragment.codec.fragment, part.fragment.on_device(part.values))

        if reason := try_change(add_all, weights, best, measure, SYNC_TOLERANCE):
            reasons.append(reason)
            continue
        moved += shifts
        if number < len(sources) and not (now := measure()).mean >= best.mean:  # else tolerances would add up
            best = now
    return moved, next(iter(reasons), "")
