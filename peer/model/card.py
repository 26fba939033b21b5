"""The model card of an export: Markdown that tells where the weights come from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from gossamer.peer.machine.events import EvalDone, Event, MeetingDone, StateTransferred
from gossamer.peer.machine.run_view import RunView
from gossamer.peer.machine.status import VERSION
from gossamer.peer.model.adapter import has_adapter
from gossamer.peer.model.weights import Trained
from gossamer.protocol.run.manifest import AnyManifest, Manifest, ProgramManifest

MAX_NAMED: Final = 64  # contributors
HUGGING_FACE: Final = """library_name: transformers
pipeline_tag: text-generation
"""
PEFT: Final = """library_name: peft
pipeline_tag: text-generation
"""
LOAD_ADAPTER: Final = (
    "It is a LoRA adapter. Load it with `peft.PeftModel.from_pretrained(base, FOLDER)`; `base` is the model that it was trained on, as "
    "`AutoModelForCausalLM.from_pretrained` loads it."
)
LOAD_TEXT: Final = "Load it with `AutoModelForCausalLM.from_pretrained`."
LOAD_PROGRAM: Final = (
    "`model.safetensors` holds the trained tensors by name: `model.load_state_dict(safetensors.torch.load_file(FILE), strict=False)`."
)
CARD: Final = """---
{header}tags:
- gossamer
- decentralized-training
---

# {title}

Trained by a swarm of peers that meet in pairs, without a coordinator. {load}

| | |
|---|---|
{table}

{members}## Contributors

Peers whose weights were merged into this one's directly, as far as its log goes back. They carry the work of further peers:

{contributors}"""

MEMBERS: Final = """## Members

What each member says that it has trained, as far as this peer has seen the run. A member signs its own figure, and counts for no more than
the steps of the run allow.

| member | {unit} | share |
|---|---|---|
{rows}

"""


@dataclass(frozen=True, slots=True)
class MeasuredLoss:
    """The held-out loss of the exported weights."""

    loss: float | None  # nats per token; None if it was not measured
    num_tokens: int = 0  # predicted
    reason: str = ""  # why there is no loss

    def __str__(self) -> str:
        return "not measured" if self.loss is None else f"{self.loss:.4f} nats per token, over {self.num_tokens} tokens"


def is_adapter(manifest: AnyManifest) -> bool:
    """Return whether what a run trains is an adapter."""
    return isinstance(manifest, Manifest) and has_adapter(manifest.model)


def model_card(
    trained: Trained, events: Sequence[Event], weights: str, measured: MeasuredLoss, *, merges: bool = False, seen: RunView | None = None
) -> str:
    """Write the card of a checkpoint; its contributors, and a program's loss, come from the peer's event log.

    `seen`: what this peer has seen of the run, for the members' shares. `merges`: the weights are those of the model into which the run's
    adapter is merged. The card of a text run has a Hugging Face header. Names from other people are plain text in it.
    """
    manifest, state = trained.manifest, trained.checkpoint.state
    partners = contributors(events)
    header, load = (HUGGING_FACE, LOAD_TEXT) if isinstance(manifest, Manifest) else ("", LOAD_PROGRAM)
    if is_adapter(manifest) and not merges:
        header, load = PEFT, LOAD_ADAPTER
    rows = {
        "run": f"{_plain(manifest.run.name)} `{manifest.run_id.hex()}` (the SHA-256 of its manifest)",
        **(_text_rows(manifest, measured) if isinstance(manifest, Manifest) else _program_rows(manifest, events)),
        "method": f"{manifest.outer.method}, codec {manifest.codec.name}, inner steps between meetings: {manifest.outer.inner_steps}",
        "clock": f"{state['clock_steps']} of {manifest.run.total_steps} steps",
        "this peer": f"{trained.checkpoint.step} inner steps, {state['tokens']} {_plain(manifest.unit)}",
        "weights": weights,
        "peers met": f"{len(partners)} at least" if partners else "none",
        "trained with": f"gossamer {VERSION}",
    }
    table = "\n".join(f"| {name} | {value} |" for name, value in rows.items())
    named = "".join(f"- `{partner}`\n" for partner in partners[:MAX_NAMED])
    more = f"- and {len(partners) - MAX_NAMED} more\n" if len(partners) > MAX_NAMED else ""
    return CARD.format(
        header=header,
        title=_plain(manifest.run.name),
        load=load,
        table=table,
        members=members_table(seen, _plain(manifest.unit)) if seen is not None and seen.run_id == manifest.run_id.hex() else "",
        contributors=named + more or "None in this peer's log.\n",
    )


def _text_rows(manifest: Manifest, measured: MeasuredLoss) -> dict[str, str]:
    return {
        "model": _plain(manifest.model.hub or manifest.model.architecture),
        **(
            {"frozen weights": f"SHA-256 `{manifest.model.base}`"} if isinstance(manifest, Manifest) and has_adapter(manifest.model) else {}
        ),
        "tokenizer": _plain(manifest.tokenizer.name),
        "data": _plain(manifest.data.name or manifest.data.source),
        "held-out loss": str(measured),
    }


def _program_rows(manifest: ProgramManifest, events: Sequence[Event]) -> dict[str, str]:
    program = manifest.program
    losses = [f"{event.loss:.4f}, as the program last measured it, at step {event.step}" for event in events if isinstance(event, EvalDone)]
    return {
        "program": _plain(program.name),
        "source": _plain(program.source) or "not stated",
        "revision": _plain(program.revision) or "not stated",
        "frozen parameters": f"SHA-256 `{program.base}`, not in this folder" if program.base else "none",
        "held-out loss": losses[-1] if losses else "not measured",
    }


def members_table(seen: RunView, unit: str) -> str:
    """Return a section with what each member says that it has trained, the largest part first; empty if none says so."""
    rows = [row for row in seen.to_json(seen.points[-1].ts if seen.points else 0.0)["members"] if row["counted"]]
    if not rows:
        return ""
    rows.sort(key=lambda row: -row["counted"])
    lines = [f"| `{row['peer_id']}` | {row['counted']} | {100 * row['share']:.1f} % |" for row in rows[:MAX_NAMED]]
    more = [f"| {len(rows) - MAX_NAMED} more | {sum(row['counted'] for row in rows[MAX_NAMED:])} | |"] if len(rows) > MAX_NAMED else []
    return MEMBERS.format(unit=unit, rows="\n".join([*lines, *more]))


def contributors(events: Sequence[Event]) -> list[str]:
    """Return the peers whose weights were merged into this one's directly, each once, in the order of meeting."""
    met: dict[str, None] = {}
    for event in events:
        match event:
            case MeetingDone(partner=partner, outcome="completed"):
                met[partner] = None
            case StateTransferred(sources=sources):
                met.update(dict.fromkeys(sources))
    return list(met)


def _plain(name: str) -> str:
    """Replace characters that Markdown could read as markup: names come from other people."""
    return "".join(letter if letter.isalnum() or letter in " -_./" else "?" for letter in name)
