"""How a command tells the operator that something is wrong: `error: ...`, then `hint: ...`, on stderr, and the exit code for the shell."""

from __future__ import annotations

import sys
import traceback

import typer

from protocol.errors import ExitCode, GossamerError


def report(message: str, hint: str = "") -> None:
    """Print the error and, if there is one, the hint."""
    print(f"error: {message}", file=sys.stderr)
    if hint:
        print(f"hint: {hint}", file=sys.stderr)


def report_failure(failure: BaseException) -> ExitCode:
    """Print what went wrong and return the exit code that says whose fault it was."""
    match failure:
        case GossamerError():
            report(str(failure), failure.hint)
            return failure.exit_code
        case typer.TyperException():
            report(_sentence(failure.format_message()), "`peer --help` lists the verbs, `peer VERB --help` the options of one")
            return ExitCode.BAD_INPUT
        case KeyboardInterrupt() | typer.Abort():
            report("interrupted")
            return ExitCode.INTERRUPTED
        case _:
            traceback.print_exception(failure, file=sys.stderr)
            report(f"internal error: {failure!r}", "this is our fault; please report it with the lines above")
            return ExitCode.OUR_FAULT


def _sentence(message: str) -> str:
    first = message.strip().removesuffix(".")
    return first[:1].lower() + first[1:]
