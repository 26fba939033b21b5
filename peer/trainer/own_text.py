"""The text of a trainer process, loaded with reports on its progress."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Final

from gossamer.peer.machine.child import Child
from gossamer.peer.machine.events import TextRead
from gossamer.peer.machine.home import Home
from gossamer.peer.text.batches import Draw
from gossamer.peer.text.corpus import Corpus, TextReading, load_corpus
from gossamer.peer.text.tokenizer import Tokenizer
from gossamer.peer.trainer.boundary import WorkProgress
from gossamer.protocol.identity import PeerId
from gossamer.protocol.run.manifest import Manifest

MAX_SKIPPED: Final = 20  # files that an event names


def load_text(child: Child, home: Home, manifest: Manifest, tokenizer: Tokenizer) -> Corpus:
    """Load this peer's text, and report what is read. Raises BadSettings as load_corpus."""
    settings, inner = child.settings, manifest.inner
    draw = Draw(manifest.run.seed, PeerId.from_text(settings.peer_id).raw, inner.batch_size, inner.sequence_length)
    progress, data = WorkProgress(child.emit, "tokenizing the text"), settings.config.data
    return load_corpus(manifest.data, tokenizer, draw, data, home.cache, progress, partial(_emit_read, child, data), child.stop_requested)


def _emit_read(child: Child, data: Path | None, read: TextReading) -> None:
    child.emit(TextRead(str(data), read.num_files, read.num_bytes, len(read.skipped), read.skipped[:MAX_SKIPPED]))
