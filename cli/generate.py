"""`peer generate`: text that the model of the newest checkpoint writes."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from gossamer.cli.options import DEFAULT_HOME, HomeFolder
from gossamer.peer.machine.extras import need_extra
from gossamer.peer.machine.home import Home

Prompt = Annotated[
    str, typer.Argument(metavar="PROMPT", help="Text to continue; in a run on chats, what the user says.", show_default=False)
]
Tokens = Annotated[int, typer.Option("--tokens", metavar="N", min=1, help="Tokens to write, at most as many as a sequence of the run has.")]
Temperature = Annotated[
    float,
    typer.Option("--temperature", metavar="T", min=0.0, help="0 takes the likeliest token each time; above 1, unlikely ones more often."),
]
Seed = Annotated[int, typer.Option("--seed", metavar="N", min=0, help="Seed of the random choice: another one, another text.")]


def generate(
    prompt: Prompt = "", home: HomeFolder = DEFAULT_HOME, tokens: Tokens = 200, temperature: Temperature = 0.8, seed: Seed = 0
) -> None:
    """Write text with the model of the newest checkpoint.

    The text goes to stdout as it is written. The peer may run meanwhile.
    """
    need_extra("text")
    from gossamer.cli.screen import meter  # rich
    from gossamer.peer.model.generation import write_on  # torch: slow to import, and needed only now

    with meter(sys.stderr, unit="MB") as show:
        write_on(Home(home), prompt, tokens, temperature, seed, lambda text: print(text, end="", flush=True), show)
    print()
