"""Checkpoints: a replica's tensors and state on disk, written atomically, and the fallback to an older one when one is damaged.

A checkpoint is a folder `step-00000800` with `state.safetensors` (every tensor) and `header.json` (all else, and the SHA-256 of both
files). It is written under a temporary name, synced to the disk and renamed, so a crash or a full disk leaves the earlier checkpoints as
they were. Two are kept. The safetensors library's own writer first copies every tensor into memory and can neither hash nor sync, so this
module writes the format, and the library reads it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from gossamer.peer.machine.home import finished_checkpoints, private, sync_path
from gossamer.protocol.errors import BadSettings
from gossamer.protocol.run.layout import Shapes

FORMAT: Final = 1
NUM_KEPT: Final = 2
TENSORS: Final = "state.safetensors"
HEADER: Final = "header.json"
UNFINISHED: Final = ".writing-"
ALIGNMENT: Final = 8
PIECE_BYTES = 1 << 24  # hashed and written together, so that both read it from the processor's cache
DTYPES: Final = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


Reading = Callable[[int, int], None]  # called with the bytes read so far and the total


@dataclass(frozen=True, slots=True)
class CheckpointContents:
    """The contents of a checkpoint. `save` only reads the tensors; loaded tensors are new, on the CPU, and belong to the caller."""

    run_id: bytes
    step: int  # own inner steps; names the checkpoint
    tensors: Mapping[str, Tensor]
    state: Mapping[str, Any]  # JSON-able


@dataclass(frozen=True, slots=True)
class Loaded:
    """A checkpoint that was read and verified, and the newer ones that were skipped because they are damaged."""

    contents: CheckpointContents
    path: Path
    rejected: tuple[tuple[Path, str], ...]  # each with the reason


class _Damaged(Exception):
    """The checkpoint differs from what was written."""


def save(folder: Path, contents: CheckpointContents) -> Path:
    """Write a checkpoint into `folder`, remove all but the newest two, and return its path.

    Raises BadSettings when the disk refuses; then the earlier checkpoints are untouched and nothing of this one is left.
    Only one process at a time may call it; the home's lock ensures that.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for path in folder.glob(f"{UNFINISHED}*"):
            shutil.rmtree(path, ignore_errors=True)
        # Checkpoints of one step differ by a meeting: a rename must not replace one.
        number = max((number + 1 for at, number in finished_checkpoints(folder) if at == contents.step), default=0)
        path = folder / (f"step-{contents.step:08d}" + (f".{number}" if number else ""))
        unfinished = folder / f"{UNFINISHED}{path.name}"
        unfinished.mkdir(mode=0o700)
        try:
            _write(unfinished, contents)
            unfinished.rename(path)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
        sync_path(folder)
    except OSError as error:
        raise BadSettings(
            f"the checkpoint of step {contents.step} could not be written to {folder}: {error.strerror}",
            hint="free some space there; the earlier checkpoints are untouched",
        ) from error
    _prune(folder, (contents.step, number))
    return path


def load_latest(folder: Path, run_id: bytes, reading: Reading = lambda done_bytes, total_bytes: None) -> Loaded | None:
    """Read the newest undamaged checkpoint; None if there is no checkpoint. `reading` is called with the progress.

    Raises BadSettings if all are damaged, or if the newest undamaged one belongs to another run.
    """
    rejected: list[tuple[Path, str]] = []
    for path in finished_checkpoints(folder).values():
        try:
            contents = _read(path, reading)
        except _Damaged as error:
            rejected.append((path, str(error)))
            continue
        if contents.run_id != run_id:
            raise BadSettings(
                f"the checkpoint {path} belongs to run {contents.run_id.hex()[:12]}, not to {run_id.hex()[:12]}",
                hint="give each run a folder of its own with --home DIR",
            )
        return Loaded(contents, path, tuple(rejected))
    if rejected:
        reasons = "; ".join(f"{path.name}: {reason}" for path, reason in rejected)
        raise BadSettings(
            f"no checkpoint in {folder} can be used: {reasons}", hint="move that folder away to start from a partner's weights"
        )
    return None


def latest_shapes(folder: Path) -> tuple[Shapes, int] | None:
    """Return the shapes of the newest checkpoint's tensors by name, and its bytes. None if none can be read.

    It is neither verified nor loaded.
    """
    for path in finished_checkpoints(folder).values():
        with contextlib.suppress(OSError, SafetensorError), safe_open(path / TENSORS, framework="pt") as file:
            names = list(file.keys())
            return {name: tuple(file.get_slice(name).get_shape()) for name in names}, (path / TENSORS).stat().st_size
    return None


def _write(folder: Path, contents: CheckpointContents) -> None:
    digest = write_tensors(folder / TENSORS, contents.tensors)
    header = {"format": FORMAT, "run_id": contents.run_id.hex(), "step": contents.step, "state": dict(contents.state), "tensors": digest}
    body = json.dumps(header).encode()
    _write_file(folder / HEADER, [hashlib.sha256(body).hexdigest().encode(), b"\n", body])
    sync_path(folder)


def _read(path: Path, reading: Reading) -> CheckpointContents:
    try:
        digest, _, body = (path / HEADER).read_bytes().partition(b"\n")
        if hashlib.sha256(body).hexdigest().encode() != digest:
            raise _Damaged(f"{HEADER} does not match its hash")
        header = json.loads(body)
        if header["format"] != FORMAT:
            raise _Damaged(f"it has format {header['format']}, this build reads {FORMAT}")
        if _file_digest(path / TENSORS, reading) != header["tensors"]:
            raise _Damaged(f"{TENSORS} does not match its hash")
        tensors = load_file(path / TENSORS)
    except OSError as error:
        raise _Damaged(f"{Path(error.filename or path).name}: {error.strerror}") from error
    except (SafetensorError, ValueError, KeyError, TypeError) as error:  # the hashes match, so another build wrote it
        raise _Damaged(f"unreadable: {error}") from error
    return CheckpointContents(bytes.fromhex(header["run_id"]), header["step"], tensors, header["state"])


def _file_digest(path: Path, reading: Reading) -> str:
    """Return the SHA-256 of a file in hex, and report the progress to `reading`."""
    digest, piece = hashlib.sha256(), memoryview(bytearray(PIECE_BYTES))
    with path.open("rb", buffering=0) as file:
        total_bytes = os.fstat(file.fileno()).st_size
        while num_bytes := file.readinto(piece):
            digest.update(piece[:num_bytes])
            reading(file.tell(), total_bytes)
    return digest.hexdigest()


def _prune(folder: Path, newest: tuple[int, int]) -> None:
    """Keep the newest two. Remove those of a later step too: they are damaged or abandoned, and must not win over `newest`."""
    found = finished_checkpoints(folder)
    kept = [order for order in found if order <= newest][:NUM_KEPT]
    for order in found.keys() - kept:
        shutil.rmtree(found[order], ignore_errors=True)


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> str:
    """Write a new file, sync it, and return the SHA-256 of its content in hex. Tensors on any device; they are only read.

    Raises OSError when the disk refuses (the file is then incomplete), FileExistsError if the file is there.
    """
    return _write_file(path, _pieces(tensors))


def _write_file(path: Path, pieces: Iterable[bytes | memoryview]) -> str:
    digest = hashlib.sha256()
    with open(path, "xb", opener=private) as file:
        for piece in pieces:
            digest.update(piece)
            file.write(piece)
        file.flush()
        os.fsync(file.fileno())
    return digest.hexdigest()


def _pieces(tensors: Mapping[str, Tensor]) -> Iterator[memoryview]:
    ordered = dict(sorted(tensors.items(), key=lambda item: -item[1].element_size()))  # so that each tensor is aligned in the file
    yield memoryview(_header(ordered))
    for tensor in ordered.values():
        data = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data
        for start in range(0, len(data), PIECE_BYTES):
            yield data[start : start + PIECE_BYTES]


def _header(tensors: Mapping[str, Tensor]) -> bytes:
    entries: dict[str, Any] = {}
    end = 0
    for name, tensor in tensors.items():
        start, end = end, end + tensor.numel() * tensor.element_size()
        entries[name] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    return len(text).to_bytes(8, "little") + text
