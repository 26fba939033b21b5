"""Pulls: one side's slow weights move to another's, which moves nowhere; no meeting, and nobody is locked.

The one who pulls sends a sketch of its slow weights; the other codes its own against that, as in a meeting, and sends sketch and payload.
Everything here reads slow weights, which are replaced and never changed, so it may run on a second thread; what gaps do to the model is
the replica's affair, at one step boundary for all that were decoded until then.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gossamer.peer.link import records as ask
from gossamer.peer.link.payload_folder import PayloadFolder
from gossamer.peer.link.records import File, payload_name
from gossamer.peer.trainer.fragment_state import FragmentState
from gossamer.peer.trainer.shared_state import FragmentShift, payload_tensor


@dataclass(slots=True)
class OpenPull:
    """What was sketched."""

    fragment: FragmentState
    slow: Tensor  # f32[numel] at rest, as it was then
    sketch: Tensor
    seed: int


class Pulls:
    """The pulls of one replica, on either side. Every method may be called from a second thread."""

    def __init__(self, fragments: Sequence[FragmentState], payloads: PayloadFolder) -> None:
        self._fragments = fragments
        self._payloads = payloads
        self._open: dict[str, OpenPull] = {}
        self._decoded: dict[str, FragmentShift] = {}
        self._working = threading.Lock()

    def sketch(self, request: ask.SketchSlow) -> None:
        """Write a sketch of a fragment's slow weights. Raises OSError, ValueError for weights that are none any more."""
        fragment = self._fragments[request.fragment]
        slow = fragment.slow
        sketch = fragment.codec.sketch(fragment.here(slow), request.seed)
        self._write(request.name, File.OWN_SKETCH, sketch)
        with self._working:  # an earlier one of this fragment has come to nothing
            self._open = {name: pull for name, pull in self._open.items() if pull.fragment is not fragment}
            self._decoded = {name: shift for name, shift in self._decoded.items() if shift.fragment is not fragment}
            self._open[request.name] = OpenPull(fragment, slow, sketch, request.seed)

    def code(self, request: ask.CodeSlow) -> None:
        """Write sketch and payload of a fragment's slow weights, in one file, against another's sketch. Raises as `sketch`."""
        fragment = self._fragments[request.fragment]
        slow = fragment.here(fragment.slow)
        theirs = self._read(request.name, File.PARTNER_SKETCH, slow.device)
        sketch = fragment.codec.sketch(slow, request.seed)
        payload = fragment.codec.encode(slow, request.seed, sketch, theirs).payload
        self._write(request.name, File.OWN_PAYLOAD, torch.cat((sketch, payload)))

    def decode(self, request: ask.DecodeSlow) -> None:
        """Decode what came, and keep it. Raises ValueError for what no honest peer sends, or for a pull that is not open."""
        with self._working:
            pull = self._open.pop(request.name, None)
        if pull is None:
            raise ValueError("there is no such pull here: the trainer was restarted")
        codec, fragment = pull.fragment.codec, pull.fragment
        answer = self._read(request.name, File.PARTNER_PAYLOAD, fragment.device)
        theirs, payload = answer[: codec.sketch_bytes], answer[codec.sketch_bytes :]
        gap = codec.gap(codec.encode(fragment.here(pull.slow), pull.seed, pull.sketch, theirs), payload)
        shift = FragmentShift(request.name, fragment, fragment.at_rest(gap.values), float(gap.failed.float().mean()))
        with self._working:
            self._decoded[request.name] = shift

    def take(self, names: Iterable[str]) -> list[FragmentShift]:
        """Return what was decoded of these pulls, once."""
        with self._working:
            return [self._decoded.pop(name) for name in names if name in self._decoded]

    def forget(self) -> None:
        """Forget every pull: the node that wanted them is gone."""
        with self._working:
            self._open.clear()
            self._decoded.clear()

    def _write(self, name: str, file: File, data: Tensor) -> None:
        self._payloads.write(payload_name(name, file), data.cpu().numpy().data)

    def _read(self, name: str, file: File, device: torch.device) -> Tensor:
        return payload_tensor(self._payloads, payload_name(name, file), device)
