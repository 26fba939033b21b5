"""What fine-tuning together costs and brings: an adapter on conversations, with one peer and with two, from the command line alone.

    python -m benchmarks.fine_tuning [--steps 200] [--rank 32] [--conversations 200] [--seeds 0,1,2]

First it trains a small base to repeat what it is asked. Then peers fine-tune that to sort it, each on its own conversations, as real
processes on this machine. Prints what the peers exchange beside what they would exchange for all weights, and the loss on answers that
nobody trained on, before and after.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from gossamer.optim.inner import num_state_values
from gossamer.peer.machine.events import MeetingDone, read_events
from gossamer.peer.machine.home import Home
from gossamer.peer.model.computing import next_token_loss
from gossamer.peer.model.evaluation import held_out_loss, mask_as_run, measured_size
from gossamer.peer.model.model import parameter_shapes
from gossamer.peer.model.plan import fragment_codecs, model_plan
from gossamer.peer.model.start import fine_tuned, initial_model, started_from
from gossamer.peer.text.batches import Draw
from gossamer.peer.text.corpus import load_corpus
from gossamer.peer.text.tokenizer import byte_tokenizer, load_tokenizer
from gossamer.peer.trainer.need import VALUE_BYTES
from gossamer.protocol.run.manifest import Manifest

TEMPLATE: Final = (
    "{% for message in messages %}<|{{ message.role }}|>{% if message.role == 'assistant' %}{% generation %}{{ message.content }}<|end|>"
    "{% endgeneration %}{% else %}{{ message.content }}<|end|>{% endif %}{% endfor %}"
)
LLAMA: Final[dict[str, Any]] = {
    "vocab_size": 260,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
}
BILLION: Final[dict[str, Any]] = {
    "vocab_size": 128_256,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}
INNER: Final = {"batch_size": 8, "sequence_length": 63, "learning_rate": 3e-3}
BASE_STEPS: Final = 500
LOCAL: Final = ("--listen", "127.0.0.1", "--devices", "cpu", "--threads", "1")


def conversations(path: Path, number: int, seed: int, *, sorts: bool = True) -> Path:
    """Write questions with their answers: the same letters, sorted or as they are."""
    rng = random.Random(seed)
    with path.open("w") as file:
        for _ in range(number):
            letters = "".join(rng.choices("abcdefghijklmnop", k=rng.randrange(6, 13)))
            answer = "".join(sorted(letters)) if sorts else letters
            chat = [{"role": "user", "content": letters}, {"role": "assistant", "content": answer}]
            file.write(json.dumps({"messages": chat}) + "\n")
    return path


def manifest_of(base: Path, rank: int, steps: int, seed: int = 0) -> Manifest:
    """Return the manifest that `peer init --from BASE --lora RANK --format chat` writes, for this size of conversations."""
    tables = fine_tuned(started_from(base, steps, 1e-2), base, rank, "chat").model_dump(exclude_unset=True)
    tables["run"] |= {"total_steps": steps, "seed": seed}
    tables["inner"] |= INNER
    return Manifest.checked(tables)


def make_base(folder: Path) -> Path:
    """Train the base on all of its conversations' answers; save it as transformers does."""
    base, tokenizer = folder / "base", byte_tokenizer()
    tokenizer.add_special_tokens({"eos_token": "<|end|>", "additional_special_tokens": ["<|user|>", "<|assistant|>", "<|system|>"]})
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(base)
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**LLAMA)).save_pretrained(base)
    manifest = manifest_of(base, 0, BASE_STEPS)
    model = initial_model(manifest, base)
    mask_as_run(model, manifest)
    draw = Draw(0, b"base", INNER["batch_size"], INNER["sequence_length"])  # type: ignore[arg-type]
    text = conversations(folder / "repeat.jsonl", 20_000, 0, sorts=False)
    corpus = load_corpus(manifest.data, load_tokenizer(manifest.tokenizer, base), draw, text, folder / "cache")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(BASE_STEPS):
        loss = next_token_loss(model, corpus.batch(step))
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
    print(f"base: {sum(p.numel() for p in model.parameters()):,} parameters, loss {float(loss):.3f} on what it repeats", flush=True)
    model.save_pretrained(base)
    return base


def peer(*arguments: str | Path) -> subprocess.Popen[str]:
    """Start `peer ARGUMENTS`."""
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1]), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-P", "-m", "gossamer.cli.main", *map(str, arguments)]
    return subprocess.Popen(command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)


def done(process: subprocess.Popen[str]) -> str:
    """Wait for a peer; return what it printed."""
    out, _ = process.communicate()
    if process.returncode:
        raise SystemExit(f"{process.args!r}: exit code {process.returncode}")
    return out


def row(num_peers: int, seed: int, folder: Path, base: Path, manifest: Manifest, given: argparse.Namespace) -> str:
    """Fine-tune with so many peers; return the row of the table."""
    folder.mkdir()
    file, invite = folder / "run.toml", folder / "invite"
    file.write_text(manifest.to_toml())
    homes = [folder / f"home-{number}" for number in range(num_peers)]
    texts = [conversations(folder / f"{number}.jsonl", given.conversations, 10 * seed + number + 1) for number in range(num_peers)]
    common = [("--model", base, "--data", text, "--home", home, *LOCAL) for text, home in zip(texts, homes, strict=True)]
    waits = ("--alone",) if num_peers == 1 else ("--wait-for-peers", num_peers - 1, "--write-invite", invite)
    peers = [peer("host", file, *common[0], *map(str, waits)), *(peer("join", "--invite-file", invite, *each) for each in common[1:])]
    for each in peers:
        done(each)
    unseen = conversations(folder / "unseen.jsonl", 5000, 999)
    found = [json.loads(done(peer("eval", "--json", "--home", home, "--data", unseen))) for home in homes]
    met = [event for home in homes for event in read_events(Home(home).events) if isinstance(event, MeetingDone)]
    met = [event for event in met if event.outcome == "completed"]
    ends = [Home(home).last_status() for home in homes]
    sent = f"{statistics.median(event.bytes_sent for event in met):,.0f}" if met else ""
    blocked = statistics.mean(end["blocked_seconds"] / end["train_seconds"] for end in ends)
    losses = ", ".join(f"{each['loss']:.3f}" for each in found)
    return f"| {num_peers} | {seed} | {losses} | {len(met) // num_peers} | {sent} | {100 * blocked:.1f} % |"


def counted(rank: int) -> Manifest:
    """Return the manifest of a run with a Llama of 1.2 billion parameters, from which sizes follow without its weights."""
    model = {"config": BILLION} | ({"base": "0" * 64, "lora_rank": rank} if rank else {"weights": "0" * 64})
    return Manifest.checked({"model": model, "inner": {"optimizer": "adamw"}})


def exchange_row(name: str, manifest: Manifest) -> str:
    """Return what peers of a run exchange and keep."""
    shapes = parameter_shapes(manifest.model)
    plan = model_plan(fragment_codecs(manifest, shapes), manifest.outer.alpha)
    num_values = sum(map(math.prod, shapes.values()))
    trains = "all weights" if not manifest.model.has_adapter else "adapter"
    checkpoint = VALUE_BYTES * (2 * num_values + num_state_values(manifest.inner.optimizer, shapes))
    return f"| {name} | {trains} | {num_values:,} | {plan.round_bytes:,} | {checkpoint:,} |"


def loss_before(base: Path, manifest: Manifest, folder: Path) -> float:
    """Return the loss of the base on the answers that nobody trains on."""
    model = initial_model(manifest, base)
    mask_as_run(model, manifest)
    draw = Draw(0, b"", manifest.inner.batch_size, manifest.inner.sequence_length)
    unseen = conversations(folder / "unseen.jsonl", 5000, 999)
    corpus = load_corpus(manifest.data, load_tokenizer(manifest.tokenizer, base), draw, unseen, folder / "cache")
    return held_out_loss(model, corpus, measured_size(manifest, corpus).num_batches)


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for option, default in (("--steps", 200), ("--rank", 32), ("--conversations", 200)):
        parser.add_argument(option, type=int, default=default)
    parser.add_argument("--seeds", default="0,1,2")
    given = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        base = make_base(folder)
        print("| model | what trains | values | bytes each way to exchange all of it | checkpoint, bytes |\n|---|---|---|---|---|")
        for rank in (given.rank, 0):
            print(exchange_row("this one", manifest_of(base, rank, given.steps)))
        for rank in (16, 0):
            print(exchange_row("1.2 billion parameters, counted", counted(rank)))
        print(f"\nbefore: loss {loss_before(base, manifest_of(base, given.rank, given.steps), folder):.3f} on unseen answers\n")
        print("| peers | seed | loss on unseen answers, each peer | meetings of a peer | bytes sent in a meeting | blocked |")
        print("|---|---|---|---|---|---|")
        for num_peers in (1, 2):
            for seed in map(int, given.seeds.split(",")):
                manifest = manifest_of(base, given.rank, given.steps, seed)
                print(row(num_peers, seed, folder / f"{num_peers}-{seed}", base, manifest, given), flush=True)


if __name__ == "__main__":
    main()
