"""The `peer` command: its verbs, and how it ends.

Verbs import what is slow (torch, hivemind, the manifest's checks) only when they run, so that `peer --help` answers at once.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from cli.bootstrap import bootstrap
from cli.demo import demo
from cli.eval import evaluate
from cli.export import export
from cli.host import host
from cli.id import identity
from cli.init import init
from cli.invite import invite
from cli.join import join
from cli.leash import follow_parent
from cli.leave import leave
from cli.report import report_failure
from cli.simulate import simulate
from cli.status import status
from peer.machine.status import VERSION
from protocol.errors import ExitCode

app = typer.Typer(
    name="peer",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("demo")(demo)
app.command("init")(init)
app.command("host")(host)
app.command("join")(join)
app.command("invite")(invite)
app.command("bootstrap")(bootstrap)
app.command("status")(status)
app.command("leave")(leave)
app.command("export")(export)
app.command("eval")(evaluate)
app.command("simulate")(simulate)
app.command("id")(identity)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(VERSION)
        raise typer.Exit


@app.callback(invoke_without_command=True)
def peer(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")] = False,
) -> None:
    """Train one language model with other machines, pair by pair, with no coordinator."""
    if context.invoked_subcommand is None:
        print(context.get_help(), file=sys.stderr)
        raise typer.Exit(ExitCode.BAD_INPUT)


def run(arguments: Sequence[str]) -> int:
    """Carry out one command line and return its exit code."""
    try:
        returned = app(args=list(arguments), prog_name="peer", standalone_mode=False)
    except (Exception, KeyboardInterrupt) as failure:
        return int(report_failure(failure))
    return returned if isinstance(returned, int) else int(ExitCode.DONE)


def main() -> int:
    """Run the console script."""
    follow_parent()
    return run(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
