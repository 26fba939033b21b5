"""What a fine-tuning run takes: a small model with a tokenizer and a chat template in a folder, and conversations in files."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from gossamer.peer.model.start import fine_tuned, started_from
from gossamer.peer.text.tokenizer import byte_tokenizer
from gossamer.protocol.run.manifest import Manifest

END = "<|end|>"
ROLES = ("<|system|>", "<|user|>", "<|assistant|>")
PLAIN = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
MARKED = (
    "{% for message in messages %}<|{{ message.role }}|>{% if message.role == 'assistant' %}{% generation %}{{ message.content }}<|end|>"
    "{% endgeneration %}{% else %}{{ message.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
LLAMA: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2,
    "vocab_size": 260, "max_position_embeddings": 64, "tie_word_embeddings": False,
    "initializer_range": 0.1,  # an adapter of random weights learns more if they do more
}  # fmt: skip


def chat_tokenizer(template: str | None = MARKED) -> Any:
    """The byte tokenizer with tokens for roles and the end of a message."""
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"eos_token": END, "additional_special_tokens": list(ROLES)})
    tokenizer.chat_template = template
    return tokenizer


def base_model(folder: Path, seed: int = 5, template: str | None = MARKED, **config: Any) -> Path:
    """Save a small llama and its tokenizer as transformers saves them."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        LlamaForCausalLM(LlamaConfig(**LLAMA | config)).save_pretrained(folder)
    chat_tokenizer(template).save_pretrained(folder)
    return folder


def conversation(rng: random.Random) -> list[dict[str, str]]:
    """A question and its answer: the same letters, sorted."""
    letters = rng.choices("abcdef", k=rng.randrange(2, 7))
    return [{"role": "user", "content": "".join(letters)}, {"role": "assistant", "content": "".join(sorted(letters))}]


def conversations(path: Path, number: int, seed: int) -> Path:
    """Write conversations as jsonl."""
    rng = random.Random(seed)
    path.write_text("".join(json.dumps({"messages": conversation(rng)}) + "\n" for _ in range(number)))
    return path


def pairs(path: Path, number: int, seed: int) -> Path:
    """Write the same as prompts and completions."""
    rng = random.Random(seed)
    rows = ([message["content"] for message in conversation(rng)] for _ in range(number))
    path.write_text("".join(json.dumps({"prompt": prompt, "completion": completion}) + "\n" for prompt, completion in rows))
    return path


def tuned_manifest(folder: Path, rank: int = 4, data_format: str = "chat", **sections: dict[str, Any]) -> Manifest:
    """Make the manifest that `peer init` would, for short sequences; a section's keys given here replace its keys."""
    made = fine_tuned(started_from(folder, 60, 1e-2), folder, rank, data_format).model_dump(exclude_unset=True)
    changes: dict[str, dict[str, Any]] = {
        "run": {"total_steps": 60, "access": "open"},
        "inner": {"batch_size": 4, "sequence_length": 31, "learning_rate": 1e-2, "warmup_steps": 2, "rewarm_steps": 2},
    }
    for name, keys in [*changes.items(), *sections.items()]:
        made[name] = made.get(name, {}) | keys
    return Manifest.checked(made)
