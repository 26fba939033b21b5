"""`peer generate`: what it writes, and where it must refuse. A run on chats is in test_fine_tuning.py."""

from __future__ import annotations

import unicodedata
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from tests.cli.shell import Shell
from tests.peer.trained_homes import tiny_manifest, trained_home


def test_the_model_of_the_newest_checkpoint_continues_the_prompt(shell: Shell, tmp_path: Path) -> None:
    trained_home(shell.home, tiny_manifest(), fast_seed=2)
    assert shell("export", tmp_path / "model", "--tokens", "0").code == 0
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model").eval()
    prompt = torch.tensor([[0, *b"def "]])
    with torch.no_grad():
        expected = model.generate(prompt, max_new_tokens=8, do_sample=False)[0, prompt.shape[1] :]
    assert bytes(expected.tolist()).isascii(), "else another seed: the text below is made of bytes"
    written = shell("generate", "def ", "--tokens", "8", "--temperature", "0").out
    assert written == "".join(letter for letter in bytes(expected.tolist()).decode() if letter.isprintable() or letter == "\n") + "\n"


def test_chance_follows_from_the_seed_and_a_terminal_obeys_nothing_of_it(shell: Shell) -> None:
    trained_home(shell.home, tiny_manifest(), fast_seed=2)
    first, again, other = (shell("generate", "--seed", seed, "--temperature", "2").out for seed in ("1", "1", "2"))
    assert first == again != other and len(first) > 5
    assert {letter for letter in first + other if unicodedata.category(letter) == "Cc"} <= {"\n", "\t"}


def test_a_prompt_that_fills_a_sequence_is_refused(shell: Shell) -> None:
    trained_home(shell.home, tiny_manifest(), fast_seed=2)
    result = shell("generate", 40 * "x")
    assert (result.code, result.out) == (2, "")
    assert "the prompt has 41 tokens, and a sequence of the run 32" in result.complaint[0]
