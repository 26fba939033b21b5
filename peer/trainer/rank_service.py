"""What a rank beside the first does: it carries out what it is ordered over stdin (orders.py), in the order in which it hears it."""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

import torch

from gossamer.optim.codecs.hadamard import keep_products_exact
from gossamer.peer.machine.units import size_bytes
from gossamer.peer.model.computing import Computing, compute_dtype
from gossamer.peer.model.evaluation import mask_as_run
from gossamer.peer.model.model import unset_model
from gossamer.peer.trainer import orders as order
from gossamer.peer.trainer.device import keep_within
from gossamer.peer.trainer.orders import ORDERS, Order, RankSettings
from gossamer.peer.trainer.rank import Rank, join
from gossamer.protocol.run.manifest import Manifest, SignedManifest


def _carry_out(rank: Rank, said: Order, dtype: torch.dtype) -> None:
    """Do what an order says, together with the other ranks."""
    match said:
        case order.Backward():
            computing = Computing(dtype, said.micro_batch, said.recompute, said.compiles)
            rank.backward(said.changed, torch.empty((said.batch_size, said.length), dtype=torch.int64), said.seed, computing)
        case order.Clip():
            rank.clip(said.most)
        case order.Step():
            rank.step(said.rate)
        case order.GiveState():
            rank.give_state()
        case order.TakeState():
            rank.take_state({})
        case order.BeginAnew():
            rank.own.forget()


def build(settings: RankSettings, manifest: Manifest, device: torch.device) -> Rank:
    """Make the model, with any weights, and meet the other ranks."""
    keep_products_exact()
    if settings.threads:
        torch.set_num_threads(settings.threads)
    keep_within(device, size_bytes(settings.gpu_memory))
    model = unset_model(manifest.model, device)
    mask_as_run(model, manifest)
    join(settings.store, settings.number, settings.count, device.type)
    return Rank(manifest, model, settings.number, settings.count)


def serve(hear: Callable[[], bytes]) -> NoReturn:
    """Be a rank: the first line has the settings, each other one an order. Raises RuntimeError where another rank is gone."""
    settings = RankSettings.model_validate_json(hear())
    manifest, device = SignedManifest.from_bytes(settings.manifest.read_bytes()).manifest(), torch.device(settings.device)
    rank = build(settings, manifest, device)
    dtype = compute_dtype(manifest.inner.precision, device)
    while True:
        _carry_out(rank, ORDERS.read(hear()), dtype)
