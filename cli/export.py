"""`peer export` and `peer eval`: the model of the newest checkpoint as a folder, and its held-out loss."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from gossamer.cli.options import DEFAULT_HOME, HomeFolder, Json, origin
from gossamer.peer.machine.home import Home

Folder = Annotated[Path, typer.Argument(metavar="FOLDER", help="Target folder: new, empty, or an earlier export.")]
Slow = Annotated[
    bool, typer.Option("--slow", help="Write the slow weights instead of the fast weights; after the end of a run both are equal.")
]

Text = Annotated[
    Path | None,
    typer.Option("--data", metavar="PATH", exists=True, help="Text for the held-out loss. Default: the text that this peer trained on."),
]
Tokens = Annotated[
    int | None,
    typer.Option(
        "--tokens",
        metavar="N",
        min=0,
        help="Held-out tokens to measure the loss on, as far as there are so many; 0 measures nothing. Default: 131072.",
    ),
]
EvalTokens = Annotated[
    int | None,
    typer.Option("--tokens", metavar="N", min=1, help="Held-out tokens to measure, as far as there are so many. Default: 131072."),
]
Merge = Annotated[bool, typer.Option("--merge", help="In a run with an adapter: write the whole model, with the adapter merged into it.")]

OtherHomes = Annotated[
    list[Path] | None,
    typer.Option(
        "--with", metavar="HOME", help="In a staged run: a home with another stage; repeat for each. Homes of one stage are averaged."
    ),
]


def export(
    folder: Folder,
    home: HomeFolder = DEFAULT_HOME,
    others: OtherHomes = None,
    slow: Slow = False,
    data: Text = None,
    tokens: Tokens = None,
    merge: Merge = False,
) -> None:
    """Write the trained model as a Hugging Face folder.

    The folder holds the newest checkpoint in a form that transformers loads, and a model card with its origin and held-out loss. Of a run
    with an adapter, it holds the adapter in a form that peft loads; of a program run, the trained tensors by name. Of a staged run, it
    is put together from the homes of peers that hold the stages.
    """
    from gossamer.cli.screen import meter  # rich
    from gossamer.peer.model.export import export_model  # torch: slow to import, and needed only now

    with meter(sys.stderr, "held-out loss", unit="batches") as show:
        held_out = export_model(Home(home), folder, slow, data, tokens, show, merge, [Home(other) for other in others or []])
    print(f"wrote {folder}; held-out loss: {held_out}" + (f" ({held_out.reason})" if held_out.reason else ""), file=sys.stderr)


def evaluate(home: HomeFolder = DEFAULT_HOME, data: Text = None, tokens: EvalTokens = None, as_json: Json = False) -> None:
    """Measure the held-out loss of the newest checkpoint.

    The text was not used for training.
    """
    from gossamer.cli.screen import meter  # rich
    from gossamer.peer.model.evaluation import evaluate_home  # torch: slow to import, and needed only now

    with meter(sys.stderr, "held-out loss", unit="batches") as show:
        found = evaluate_home(Home(home), data, tokens, show)
    if as_json:
        print(json.dumps(asdict(found) | origin()))
    else:
        print(f"after {found.step} steps of this peer: held-out loss {found.loss:.4f} nats per token")
        by_token, by_byte = ("over 1e308" if value is None else f"{value:.3f}" for value in (found.perplexity, found.byte_perplexity))
        print(f"perplexity {by_token} per token, {by_byte} per byte, over {found.num_tokens} tokens")
