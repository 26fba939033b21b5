"""Builds the trainer process from the home folder and the newest checkpoint in it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from gossamer.optim.codecs.hadamard import keep_products_exact
from gossamer.peer.machine.child import Child
from gossamer.peer.machine.config import PeerConfig
from gossamer.peer.machine.events import RunKnown
from gossamer.peer.machine.held_stage import need_stage
from gossamer.peer.machine.home import Home
from gossamer.peer.machine.room import held_bytes
from gossamer.peer.machine.units import size_bytes
from gossamer.peer.model.abilities import need_abilities
from gossamer.peer.model.accelerator import choose_devices
from gossamer.peer.model.computing import Computing
from gossamer.peer.model.evaluation import mask_as_run
from gossamer.peer.model.model import check_fit, frozen_shapes, placed
from gossamer.peer.model.start import base_folder, initial_model, keep_base, need_base
from gossamer.peer.model.throughput import flops_per_token, peak_flops
from gossamer.peer.model.trainable import shapes_of
from gossamer.peer.text.tokenizer import BYTES, load_tokenizer
from gossamer.peer.trainer.boundary import open_boundary
from gossamer.peer.trainer.device import keep_within
from gossamer.peer.trainer.fit import computing_here
from gossamer.peer.trainer.own_text import load_text
from gossamer.peer.trainer.replica import peer_seed
from gossamer.peer.trainer.text_training import TextProgram, TextReplica, TextTrainer, emit_built
from gossamer.protocol.identity import PeerId
from gossamer.protocol.run.manifest import Manifest, SignedManifest, StagedManifest, need_text

if TYPE_CHECKING:
    from gossamer.peer.trainer.ranks import RankProcesses  # loaded only for several devices


def _build_program(child: Child, home: Home, manifest: Manifest) -> TextProgram:
    """Build the model with its initial weights, and its text. Raises OperatorError, before any download, for a run that does not fit."""
    need_abilities(manifest)
    need_base(manifest.model, folder := base_folder(home, child.settings.config.model))
    settings = child.settings
    devices, _ = choose_devices(settings.config.devices)
    device = devices[0]
    computing = computing_here(manifest, settings.config, settings.runtime, held_bytes(os.getppid()))
    processes = _start_ranks(child, home, devices, computing) if len(devices) > 1 else None
    keep_within(device, size_bytes(settings.config.gpu_memory))
    tokenizer = load_tokenizer(manifest.tokenizer, settings.config.model, home.tokenizer, folder)
    if settings.config.model is not None and tokenizer.name != BYTES:
        home.tokenizer.mkdir(mode=0o700, exist_ok=True)
        tokenizer.save(home.tokenizer)  # for `peer eval` and `peer export`, and the next start
    model = initial_model(manifest, folder)
    if manifest.model.has_adapter and folder is not None:
        keep_base(home, folder)
    check_fit(model.config, tokenizer.vocab_size, manifest.inner.sequence_length)
    mask_as_run(model, manifest, home.tokenizer)
    corpus = load_text(child, home, manifest, tokenizer)
    model = placed(model, device)
    ranks = processes.joined(manifest, model) if processes is not None else None
    return TextProgram(manifest, model, corpus, child.emit, computing, ranks)


def _start_ranks(child: Child, home: Home, devices: Sequence[torch.device], computing: Computing) -> RankProcesses:
    """Start a process for each device but the first; if one dies while the trainer cannot notice it, this process exits."""
    from gossamer.peer.trainer.ranks import RankProcesses, threads_each

    config = child.settings.config
    store, on_host = child.settings.runtime / "ranks", computing.optimizer_on_host
    processes = RankProcesses(home.manifest, devices, store, lambda error: os._exit(child.end(error)), config, on_host)
    if (threads := threads_each(config, devices)) != 0:
        torch.set_num_threads(threads)
    return processes


def _reason_for(computing: Computing, config: PeerConfig, manifest: Manifest) -> str:
    if computing.micro_batch == config.micro_batch:
        return "as the settings say"
    return "the whole batch fits" if computing.micro_batch == computing.rows(manifest.inner.batch_size) else "what fits, by the count"


def build(child: Child) -> TextTrainer:
    """Build the trainer, from its checkpoint if there is one, and emit what it trains."""
    config = child.settings.config
    home = Home(config.home)
    keep_products_exact()
    if config.threads:
        torch.set_num_threads(config.threads)
    manifest = need_text(SignedManifest.from_bytes(home.manifest.read_bytes()).manifest())
    child.emit(RunKnown.of(manifest))
    need_stage(manifest, home, config.stage)
    if isinstance(manifest, StagedManifest):
        from gossamer.peer.trainer.stage_process import build_staged  # a run without stages loads nothing of them

        return build_staged(child, home, manifest)
    program = _build_program(child, home, manifest)
    replica = TextReplica(manifest, program, peer_seed(manifest.run.seed, PeerId.from_text(child.settings.peer_id)))
    shapes, frozen = shapes_of(replica.parameters), frozen_shapes(manifest.model)
    flops = flops_per_token(program.model.config, shapes, manifest.inner.sequence_length, frozen)
    computing = program.inner.computing
    counts_all = not manifest.data.has_prompts  # else tokens are not all the work
    peak = peak_flops(program.device, computing.dtype) * computing.num_devices if counts_all else 0.0
    emit_built(child, replica, flops, peak)
    program.inner.emit_computing(_reason_for(computing, config, manifest))
    return TextTrainer(child, replica, open_boundary(child, home, replica))
