"""Tensors to a safetensors file: hashed while they are written, one tensor in flight at a time, synced to the disk.

The library's own writer first copies every tensor into memory and cannot hash or sync. The format is eight bytes of header length, a JSON
header, and the raw values (https://github.com/huggingface/safetensors); the library reads it back.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

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
ALIGNMENT = 8
PIECE_BYTES = 1 << 24  # between hashing and writing, so that both read it from the processor's cache or near it


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> str:
    """Write a new file, sync it, and return the SHA-256 of its content in hex. Tensors on any device; they are only read.

    Raises OSError when the disk refuses (the file is then incomplete), FileExistsError if the file is there.
    """
    digest = hashlib.sha256()
    with path.open("xb", buffering=0) as file:
        for data in _pieces(tensors):
            digest.update(data)
            _write_whole(file.fileno(), data)
        os.fsync(file.fileno())
    return digest.hexdigest()


def _pieces(tensors: Mapping[str, Tensor]) -> Iterator[memoryview]:
    ordered = dict(sorted(tensors.items(), key=lambda item: -item[1].element_size()))  # so that each one is aligned in the file
    yield memoryview(_header(ordered))
    for tensor in ordered.values():
        data = _bytes(tensor)
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


def _bytes(tensor: Tensor) -> memoryview:
    """See a tensor's values as bytes, without a copy if it is contiguous and on the CPU."""
    flat = tensor.detach().cpu().contiguous().view(-1)
    return flat.view(torch.uint8).numpy().data


def _write_whole(descriptor: int, data: memoryview) -> None:
    while data:
        data = data[os.write(descriptor, data) :]
