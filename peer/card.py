"""The model card of an export: what was trained, on what, by whom, as far as this peer knows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from peer.events import Entry, MeetingDone, StateCloned
from peer.status import VERSION
from peer.weights import Trained

MAX_NAMED = 64  # contributors


@dataclass(frozen=True, slots=True)
class HeldOut:
    """How well exactly the exported weights predict held-out text."""

    loss: float | None  # nats per token; None if it was not measured
    num_tokens: int = 0  # predicted
    reason: str = ""  # why not measured

    def __str__(self) -> str:
        return "not measured" if self.loss is None else f"{self.loss:.4f} nats per token, over {self.num_tokens} tokens"


def model_card(trained: Trained, entries: Sequence[Entry], weights: str, held_out: HeldOut) -> str:
    """Write the card (Markdown with a Hugging Face header) of a checkpoint; its contributors come from the peer's event log."""
    manifest, state = trained.manifest, trained.checkpoint.state
    partners = contributors(entries)
    rows = {
        "run": f"{_plain(manifest.run.name)} `{manifest.run_id.hex()}` (the SHA-256 of its manifest)",
        "model": _plain(manifest.model.hub or manifest.model.architecture),
        "tokenizer": _plain(manifest.tokenizer.name),
        "data": _plain(manifest.data.name or manifest.data.source),
        "method": f"{manifest.outer.method}, codec {manifest.codec.name}, {manifest.outer.inner_steps} inner steps between meetings",
        "clock": f"{state['clock_steps']} of {manifest.run.total_steps} steps",
        "this peer": f"{trained.checkpoint.step} inner steps, {state['tokens']} tokens",
        "weights": weights,
        "held-out loss": str(held_out),
        "peers met": f"{len(partners)} at least" if partners else "none",
        "trained with": f"gossamer {VERSION}",
    }
    table = "\n".join(f"| {name} | {value} |" for name, value in rows.items())
    named = "".join(f"- `{partner}`\n" for partner in partners[:MAX_NAMED])
    more = f"- and {len(partners) - MAX_NAMED} more\n" if len(partners) > MAX_NAMED else ""
    return _CARD.format(title=_plain(manifest.run.name), table=table, contributors=named + more or "None that this peer knows of.\n")


def contributors(entries: Sequence[Entry]) -> list[str]:
    """Name the peers whose weights went into this one's directly, each once, the first met first."""
    met: dict[str, None] = {}
    for entry in entries:
        match entry.event:
            case MeetingDone(partner=partner, outcome="completed") | StateCloned(donor=partner):
                met[partner] = None
    return list(met)


def _plain(name: str) -> str:
    """Keep a stranger's names from being read as markup."""
    return "".join(letter if letter.isalnum() or letter in " -_./" else "?" for letter in name)


_CARD = """---
library_name: transformers
pipeline_tag: text-generation
tags:
- gossamer
- decentralized-training
---

# {title}

Trained by a swarm of peers that meet in pairs, without a coordinator. Load it with `AutoModelForCausalLM.from_pretrained`.

| | |
|---|---|
{table}

## Contributors

Peers whose weights were merged into this one's directly, as far as its log goes back (they brought others' work with them):

{contributors}"""
