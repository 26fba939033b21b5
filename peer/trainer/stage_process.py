"""Builds the trainer process of a staged run: it asks its node which of the stages that fit it is to hold."""

from __future__ import annotations

import os
import shutil
from collections.abc import Set
from functools import partial
from pathlib import Path

from gossamer.peer.link.messages import Fits
from gossamer.peer.link.payload_folder import PayloadFolder
from gossamer.peer.link.socket import TrainerEnd
from gossamer.peer.machine.child import Child
from gossamer.peer.machine.held_stage import has_moved
from gossamer.peer.machine.home import Home
from gossamer.peer.machine.room import held_bytes
from gossamer.peer.machine.units import size_bytes
from gossamer.peer.model.accelerator import choose_devices
from gossamer.peer.model.checkpoint import latest_shapes
from gossamer.peer.model.model import check_fit, placed
from gossamer.peer.model.stages import build_stage, manifest_cuts, mask_stage, stage_flops_per_token
from gossamer.peer.model.throughput import peak_flops
from gossamer.peer.model.weights import FAST
from gossamer.peer.text.tokenizer import load_tokenizer
from gossamer.peer.trainer.boundary import open_boundary
from gossamer.peer.trainer.device import keep_within
from gossamer.peer.trainer.fit import stages_here
from gossamer.peer.trainer.hop_queue import HopQueue
from gossamer.peer.trainer.own_text import load_text
from gossamer.peer.trainer.replica import peer_seed
from gossamer.peer.trainer.stage_loop import StageLoop
from gossamer.peer.trainer.stage_training import StagedExchange, StageProgram, StageReplica
from gossamer.peer.trainer.text_training import TextTrainer, emit_built
from gossamer.protocol.identity import PeerId
from gossamer.protocol.run.manifest import StagedManifest


def build_staged(child: Child, home: Home, manifest: StagedManifest) -> TextTrainer:
    """Build the trainer of one stage, from its checkpoint if there is one. Waits for a node, which chooses the stage.

    Raises BadSettings, before anything is built, where no stage fits.
    """
    settings, config, inner = child.settings, child.settings.config, manifest.inner
    fitting = stages_here(manifest, config, settings.runtime, held_bytes(os.getppid()))
    device = choose_devices(config.devices)[0][0]
    keep_within(device, size_bytes(config.gpu_memory))
    tokenizer = load_tokenizer(manifest.tokenizer, config.model, home.tokenizer, None)

    link = TrainerEnd(settings.runtime)
    fits = tuple(fitting)
    cut = manifest_cuts(manifest)[link.wait_for_stage(Fits(fits))]
    computing = fitting[cut.stage]
    model = build_stage(manifest.model, cut, manifest.run.seed)
    check_fit(model.config, tokenizer.vocab_size, inner.sequence_length)
    if manifest.data.mask_documents:
        mask_stage(model, cut, tokenizer.document_end)
    corpus = load_text(child, home, manifest, tokenizer) if cut.is_first else None
    hops = HopQueue(link.send)
    payloads = PayloadFolder(settings.runtime / "payloads")
    loop = StageLoop(manifest, placed(model, device), cut, corpus, computing, child.emit, payloads, hops)
    program = StageProgram(loop, corpus)
    replica = StageReplica(manifest, program, peer_seed(manifest.run.seed, PeerId.from_text(settings.peer_id)))

    exchange_checkpoints(home, loop.parameters.keys())
    emit_built(child, replica, stage_flops_per_token(model, cut, inner.sequence_length), peak_flops(device, computing.dtype))
    loop.emit_computing("one micro-batch at a time")
    return TextTrainer(child, replica, open_boundary(child, home, replica, link, partial(StagedExchange, hops=hops, fits=fits)))


def exchange_checkpoints(home: Home, parameters: Set[str]) -> None:
    """Set the checkpoints of a stage that this peer has left aside. On its way back, put those of the stage with these parameters back.

    Other peers hold the stage that was left, so its checkpoints are for the worst case, or for the way back. A peer that moves to a stage
    that it held long ago takes the weights of other peers, which are newer. After a crash, the next start completes the exchange.
    """
    own, left, leaving = home.checkpoints, home.left_checkpoints, home.left_checkpoints.with_name("checkpoints-leaving")
    if (names := _trained(own)) and not names & parameters:
        _finish(leaving, left)
        own.rename(leaving)
    if not _trained(own):
        for aside in (leaving,) if has_moved(home) else (leaving, left):
            if _trained(aside) & parameters:
                shutil.rmtree(own, ignore_errors=True)  # nothing there can be read
                aside.rename(own)
                break
    _finish(leaving, left)


def _finish(leaving: Path, left: Path) -> None:
    if leaving.exists():
        shutil.rmtree(left, ignore_errors=True)
        leaving.rename(left)


def _trained(folder: Path) -> set[str]:
    """Return the names of the parameters in the newest checkpoint of a folder."""
    found = latest_shapes(folder)
    return {name.removeprefix(FAST) for name in (found[0] if found else ()) if name.startswith(FAST)}
