"""A randomized Hadamard rotation of blocks of 1024 values, and the randomness that two partners share.

rotate(x) = H (signs * x) with H = H32 (x) H32 (Sylvester), not normalized: divide by 32 for a rotation. H is its own inverse up to 1024.
On integers the result is exact on every device as long as it stays below 2^24. Signs and dither come from SHAKE-128 of the shared seed, so
they are the same on every machine. Each block reads a window of one pool, STRIDE further than its neighbour's. Idea: Moniqua (arXiv
2002.11787) over rotated blocks, as in the randomized Hadamard quantizers (e.g. arXiv 1611.00429).
"""

from __future__ import annotations

import hashlib
from functools import cache
from typing import Final

import torch
from torch import Tensor

BLOCK_VALUES = 1024
SIDE = 32
STRIDE = 16
_PRODUCTS: Final = (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)  # type: ignore[attr-defined] # set at import, unseen by mypy


@cache
def hadamard_matrix(device: torch.device) -> Tensor:
    """Return the 32 x 32 Sylvester-Hadamard matrix of +1 and -1 in f32."""
    matrix = torch.ones(1, 1, dtype=torch.float32, device="cpu")
    while len(matrix) < SIDE:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    return matrix.to(device)


def transform(rows: Tensor, scratch: Tensor) -> Tensor:
    """Multiply each row of f32[blocks, 1024] by H, in place, through `scratch` of the same shape; return `rows`."""
    side = hadamard_matrix(rows.device)
    squares = (len(rows), SIDE, SIDE)
    torch.mm(rows.view(-1, SIDE), side, out=scratch.view(-1, SIDE))
    torch.bmm(side.expand(squares), scratch.view(squares), out=rows.view(squares))
    return rows


def leading_columns(rows: Tensor, count: int) -> Tensor:
    """Return the first `count` <= 32 columns of `transform(rows)` without computing the others."""
    return rows.view(-1, SIDE, SIDE).sum(1) @ hadamard_matrix(rows.device)[:, :count]


def keep_products_exact() -> None:
    """Compute the f32 products of this process in f32 from now on, without TF32 or bf16, whatever the environment asks for."""
    torch.set_float32_matmul_precision("highest")
    for products in _PRODUCTS:
        products.fp32_precision = "ieee"


def need_exact_products() -> None:
    """Raise RuntimeError where this process may compute f32 products in fewer bits, which would spoil the rotation."""
    if any(products.fp32_precision not in ("ieee", "none") for products in _PRODUCTS):
        raise RuntimeError("this process allows f32 products in TF32 or bf16; call keep_products_exact() before using the codec")


def sign_pool(seed: int, num_blocks: int, device: torch.device) -> Tensor:
    """Return the shared signs for `num_blocks` blocks, +1 or -1 in f32; read each block's with `window`."""
    count = _pool_size(num_blocks)
    octets = _shared_bytes(b"signs", seed, -(-count // 8)).to(device)  # bytes: less to copy and to compute here than f32; all exact
    bits = (octets[:, None] >> torch.arange(8, dtype=torch.uint8, device=device)) & 1
    return 1.0 - 2.0 * bits.view(-1)[:count].float()


def dither_pool(seed: int, num_blocks: int, device: torch.device) -> Tensor:
    """Return the shared dither for `num_blocks` blocks, uniform in (-1/2, 1/2) in f32; read each block's with `window`."""
    count = _pool_size(num_blocks)
    octets = _shared_bytes(b"dither", seed, 2 * count).to(device).view(-1, 2).float()
    return (octets[:, 0] + 256.0 * octets[:, 1] + 0.5) / 65536.0 - 0.5  # multiples of 2^-17: exact


def window(pool: Tensor, part: slice) -> Tensor:
    """Return the parts of a pool for a slice of blocks, f32[blocks, 1024]: an overlapping view, not to be written to."""
    return pool.as_strided((part.stop - part.start, BLOCK_VALUES), (STRIDE, 1), part.start * STRIDE)


def _pool_size(num_blocks: int) -> int:
    return num_blocks * STRIDE + BLOCK_VALUES - STRIDE


def _shared_bytes(purpose: bytes, seed: int, count: int) -> Tensor:
    digest = hashlib.shake_128(b"gossamer-modulo-" + purpose + seed.to_bytes(8, "little"))
    return torch.frombuffer(bytearray(digest.digest(count)), dtype=torch.uint8)
