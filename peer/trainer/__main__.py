"""`python -m peer.trainer`: the trainer process, put together from the home folder and the checkpoint in it."""

from __future__ import annotations

import hashlib
import os
import sys

import torch

from peer.link.payload_folder import PayloadFolder
from peer.link.records import Writer
from peer.link.socket import TrainerEnd
from peer.machine.child import Supervised, run_child
from peer.machine.events import ModelBuilt, RunKnown
from peer.machine.home import Home
from peer.model.checkpoint import load_latest
from peer.model.model import build_model, check_fit, choose_device
from peer.model.plan import need_abilities
from peer.text.batches import Draw
from peer.text.corpus import Corpus, load_corpus
from peer.text.tokenizer import load_tokenizer
from peer.trainer.replica import Replica
from peer.trainer.saver import Saver
from peer.trainer.trainer import Trainer
from protocol.identity import PeerId
from protocol.run.manifest import Manifest, SignedManifest


def peer_seed(run_seed: int, peer_id: PeerId) -> int:
    """Derive this peer's own seed, for its countdown, from the run's."""
    return int.from_bytes(hashlib.sha256(run_seed.to_bytes(8, "little") + peer_id.raw).digest()[:6], "little")


def build_replica(child: Supervised, home: Home, manifest: Manifest) -> Replica:
    """Build the model with its initial weights, and its text. Raises OperatorError for what cannot be."""
    need_abilities(manifest)
    config, inner, peer_id = child.settings.config, manifest.inner, PeerId.from_text(child.settings.peer_id)
    device, _ = choose_device(config.device)
    tokenizer = load_tokenizer(manifest.tokenizer.name)
    model = build_model(manifest.model, manifest.run.seed)
    check_fit(model.config, tokenizer.vocab_size, inner.sequence_length)
    draw = Draw(manifest.run.seed, peer_id.raw, inner.batch_size, inner.sequence_length)
    corpus: Corpus = load_corpus(manifest.data, tokenizer, draw, config.data, home.cache)
    payloads = PayloadFolder(child.settings.runtime / "payloads")
    payloads.clear(Writer.TRAINER)
    replica = Replica(manifest, model.to(device), corpus, payloads, peer_seed(manifest.run.seed, peer_id))
    replica.alone = config.alone
    return replica


def build(child: Supervised) -> Trainer:
    """Put the trainer together, from its checkpoint where there is one."""
    config = child.settings.config
    home = Home(config.home)
    if config.num_threads:
        torch.set_num_threads(config.num_threads)
    manifest = SignedManifest.from_bytes(home.manifest.read_bytes()).manifest()
    child.emit(RunKnown(manifest.run_id.hex(), manifest.run.total_steps))
    replica = build_replica(child, home, manifest)
    child.emit(ModelBuilt(*size(replica)))
    saver = Saver(home, config, child.emit)
    loaded = load_latest(home.checkpoints, manifest.run_id)
    if loaded is not None:
        saver.restore(replica, loaded)
    return Trainer(child, replica, TrainerEnd(child.settings.runtime), saver)


def size(replica: Replica) -> tuple[int, float]:
    """Return the number of parameters, and the bits that the codec sends for each."""
    codecs = [fragment.codec for fragment in replica.outer.fragments]
    params = sum(codec.fragment.numel for codec in codecs)
    sent = sum(codec.sketch_bytes + codec.payload_bytes for codec in codecs)
    return params, 8 * sent / params


if __name__ == "__main__":
    exit_code = run_child(lambda child: build(child).run())
    sys.stderr.flush()
    os._exit(exit_code)  # all is saved and closed; taking torch down would cost another second or two
