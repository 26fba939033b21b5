from __future__ import annotations

from pathlib import Path

from gossamer.peer.machine.events import Event, ProcessReported, ProgressMade
from gossamer.peer.text.documents import read_texts, text_files
from gossamer.peer.text.token_cache import on_disk
from gossamer.peer.text.tokenizer import load_tokenizer
from gossamer.peer.trainer.boundary import WorkProgress
from gossamer.protocol.run.sections import TokenizerSection


def test_progress_on_a_large_text_is_reported_once_a_second() -> None:
    emitted: list[Event] = []
    now_s = [0.0]
    progress = WorkProgress(emitted.append, "tokenizing the text", lambda: now_s[0])
    for tenth in range(1, 31):
        now_s[0] = tenth / 10
        progress(tenth * 1_000_000, 40_000_000)
    assert [event.share for event in emitted if isinstance(event, ProgressMade)] == [0.25, 0.5, 0.75]
    assert emitted[0] == ProcessReported("starting", "tokenizing the text: 25 % of 40.0 MB, 3 s left")


def test_tokenizing_reports_how_many_bytes_are_done(tmp_path: Path) -> None:
    (tmp_path / "text").mkdir()
    for name in "ab":
        (tmp_path / "text" / f"{name}.txt").write_text("word " * 100)
    emitted: list[int] = []
    files = text_files(tmp_path / "text")
    on_disk(files, read_texts(files), load_tokenizer(TokenizerSection()), tmp_path / "cache", emitted.append)
    assert emitted == sorted(emitted)
    assert emitted[-1] >= 1000
