"""`python -m peer.trainer`: the trainer process, put together from the home folder and the checkpoint in it."""

from __future__ import annotations

import hashlib
import os
import sys
import traceback

import torch

from peer.link.payload_folder import PayloadFolder
from peer.link.records import Writer
from peer.link.socket import TrainerEnd
from peer.machine.child import Child, Supervised
from peer.machine.events import EventLog
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
from protocol.errors import GossamerError
from protocol.identity import Identity
from protocol.run.manifest import Manifest, SignedManifest


def peer_seed(run_seed: int, identity: Identity) -> int:
    """Derive this peer's own seed, for its countdown, from the run's."""
    return int.from_bytes(hashlib.sha256(run_seed.to_bytes(8, "little") + identity.peer_id.raw).digest()[:6], "little")


def build_replica(child: Supervised, home: Home, manifest: Manifest) -> Replica:
    """Build the model with its initial weights, and its text. Raises OperatorError for what cannot be."""
    need_abilities(manifest)
    config, inner, identity = child.settings.config, manifest.inner, Identity.load_or_create(home.identity)
    device, _ = choose_device(config.device)
    tokenizer = load_tokenizer(manifest.tokenizer.name)
    model = build_model(manifest.model, manifest.run.seed)
    check_fit(model.config, tokenizer.vocab_size, inner.sequence_length)
    draw = Draw(manifest.run.seed, identity.peer_id.raw, inner.batch_size, inner.sequence_length)
    corpus: Corpus = load_corpus(manifest.data, tokenizer, draw, config.data, home.cache)
    payloads = PayloadFolder(child.settings.runtime / "payloads")
    payloads.clear(Writer.TRAINER)
    replica = Replica(manifest, model.to(device), corpus, payloads, peer_seed(manifest.run.seed, identity))
    replica.alone = config.alone
    return replica


def build(child: Supervised) -> Trainer:
    """Put the trainer together, from its checkpoint where there is one."""
    config = child.settings.config
    home = Home(config.home)
    if config.num_threads:
        torch.set_num_threads(config.num_threads)
    manifest = SignedManifest.from_bytes(home.manifest.read_bytes()).manifest()
    events = EventLog(home.events)
    replica = build_replica(child, home, manifest)
    saver = Saver(home, config, events)
    loaded = load_latest(home.checkpoints, manifest.run_id)
    if loaded is not None:
        saver.restore(replica, loaded)
    child.report("trainer", describe(replica))
    return Trainer(child, replica, TrainerEnd(child.settings.runtime), saver, events)


def describe(replica: Replica) -> dict[str, object]:
    """Say what is trained, for the status."""
    codecs = [fragment.codec for fragment in replica.outer.fragments]
    params = sum(codec.fragment.numel for codec in codecs)
    sent = sum(codec.sketch_bytes + codec.payload_bytes for codec in codecs)
    return {
        "run_id": replica.manifest.run_id.hex(),
        "total_steps": replica.manifest.run.total_steps,
        "params": params,
        "bits_per_param": 8 * sent / params,
    }


def main() -> int:
    """Run the trainer process."""
    child = Child()
    try:
        build(child).run()
        return 0
    except Exception as error:
        if not isinstance(error, GossamerError):
            traceback.print_exc()
        return child.fail(error)


if __name__ == "__main__":
    exit_code = main()
    sys.stderr.flush()
    os._exit(exit_code)  # all is saved and closed; taking torch down would cost another second or two
