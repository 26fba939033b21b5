"""The model card of an export: Markdown that tells where the weights come from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from gossamer.peer.machine.events import EvalDone, Event, MeetingDone, StateTransferred, read_events
from gossamer.peer.machine.home import Home
from gossamer.peer.machine.run_view import RunView, kept_view, merged_views
from gossamer.peer.machine.status import VERSION
from gossamer.peer.model.weights import Trained
from gossamer.protocol.identity import Identity
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

{merged}

{contributors}"""

MERGED: Final = (
    "Peers whose weights were merged into this one's directly, as far as its log goes back. They carry the work of further peers:"
)
MERGED_STAGES: Final = (
    "The peers whose stages are put together here, and those whose weights were merged into theirs directly, as far as their logs go back. "
    "They carry the work of further peers:"
)
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
    return isinstance(manifest, Manifest) and manifest.model.has_adapter


@dataclass(frozen=True, slots=True)
class CardSource:
    """One peer whose checkpoint an export holds: of a staged run there are several."""

    trained: Trained
    events: Sequence[Event]  # of its log
    seen: RunView | None = None  # what it has seen of the run, for the members' shares
    peer_id: str = ""
    stage: int = 0  # that it holds, counted from one; 0: the whole model

    @classmethod
    def of(cls, home: Home, trained: Trained, stage: int = 0) -> CardSource:
        """Read a home's log. Raises BadSettings for a damaged key."""
        peer_id = str(Identity.load_or_create(home.identity).peer_id) if home.identity.exists() else ""
        return cls(trained, list(read_events(home.events)), kept_view(home), peer_id, stage)

    @property
    def work(self) -> str:
        """Return the work of this peer in words."""
        words = (
            f"{self.trained.checkpoint.step} inner steps, {self.trained.checkpoint.state['tokens']} {_plain(self.trained.manifest.unit)}"
        )
        return f"`{self.peer_id}`: {words}" if self.stage and self.peer_id else words


def model_card(sources: Sequence[CardSource], weights: str, measured: MeasuredLoss, *, merges: bool = False) -> str:
    """Write the card of an export; its contributors, and a program's loss, come from the event logs of the peers that it is made of.

    `merges`: the weights are those of the model into which the run's adapter is merged. The card of a text run has a Hugging Face header.
    Names from other people are plain text in it.
    """
    first = sources[0]
    manifest, events = first.trained.manifest, first.events
    met = contributors([event for source in sources for event in source.events])
    partners = [*dict.fromkeys((*(source.peer_id for source in sources if source.stage and source.peer_id), *met))]
    seen = merged_views([source.seen for source in sources if source.seen is not None])
    header, load = (HUGGING_FACE, LOAD_TEXT) if isinstance(manifest, Manifest) else ("", LOAD_PROGRAM)
    if is_adapter(manifest) and not merges:
        header, load = PEFT, LOAD_ADAPTER
    rows = {
        "run": f"{_plain(manifest.run.name)} `{manifest.run_id.hex()}` (the SHA-256 of its manifest)",
        **(_text_rows(manifest, measured) if isinstance(manifest, Manifest) else _program_rows(manifest, events)),
        "method": f"{manifest.outer.method}, codec {manifest.codec.name}, inner steps between meetings: {manifest.outer.inner_steps}",
        "clock": f"{_clocks(sources)} of {manifest.run.total_steps} steps",
        **_works(sources),
        "weights": weights,
        "peers met": f"{len(met)} at least" if met else "none",
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
        merged=MERGED_STAGES if first.stage else MERGED,
        contributors=named + more or "None in this peer's log.\n",
    )


def _clocks(sources: Sequence[CardSource]) -> str:
    clocks = sorted(source.trained.checkpoint.state["clock_steps"] for source in sources)
    return f"{clocks[0]}" if clocks[0] == clocks[-1] else f"{clocks[0]} to {clocks[-1]}"


def _works(sources: Sequence[CardSource]) -> dict[str, str]:
    """Return rows with the work of each peer: by stage, or of the one."""
    works: dict[str, list[str]] = {}
    for source in sorted(sources, key=lambda source: source.stage):
        works.setdefault(f"stage {source.stage}" if source.stage else "this peer", []).append(source.work)
    return {name: "; ".join(several) for name, several in works.items()}


def _text_rows(manifest: Manifest, measured: MeasuredLoss) -> dict[str, str]:
    return {
        "model": _plain(manifest.model.hub or manifest.model.architecture),
        **({"frozen weights": f"SHA-256 `{manifest.model.base}`"} if manifest.model.has_adapter else {}),
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
    lines = [f"| {_member(row)} | {row['counted']} | {100 * row['share']:.1f} % |" for row in rows[:MAX_NAMED]]
    more = [f"| {len(rows) - MAX_NAMED} more | {sum(row['counted'] for row in rows[MAX_NAMED:])} | |"] if len(rows) > MAX_NAMED else []
    return MEMBERS.format(unit=unit, rows="\n".join([*lines, *more]))


def _member(row: Mapping[str, Any]) -> str:
    return f"`{row['peer_id']}`" + (f", stage {row['stage']}" if row["stage"] else "")


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
