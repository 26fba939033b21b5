"""The `peer` command: its verbs, and its exit codes.

The file of a verb is imported on demand. Slow packages (torch, hivemind) are imported only where they are used, so that `peer status` and
`peer --help` answer at once.
"""

from __future__ import annotations

import errno
import gc
import importlib
import io
import itertools
import os
import re
import signal
import sys
import traceback
from collections.abc import Iterable, Sequence
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from gossamer.cli.options import INVITE_VARIABLE
from gossamer.cli.parent_exit import follow_parent
from gossamer.protocol.errors import ExitCode, GossamerError

GROUPS = {  # of verbs, in the order of `--help`
    "Try it": ("demo", "simulate", "compare"),
    "Start a run": ("init", "host", "invite", "revoke", "bootstrap"),
    "Take part": ("join", "pause", "resume", "leave", "config", "service", "backup", "restore"),
    "Watch": ("status", "run", "peers", "logs", "watch", "dashboard", "doctor"),
    "Use the model, show your part": ("generate", "eval", "export", "credit"),
    "Other": ("id", "man"),
}
VERBS = tuple(itertools.chain(*GROUPS.values()))
TAKE_INVITES = ("join", "bootstrap", "service", "doctor")  # from the environment too
OF_THE_MACHINE = {  # errors that its owner can correct
    **dict.fromkeys(
        (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES), "free some space, or name a place that you may write to"
    ),
    errno.EISDIR: "move this folder away: a file belongs there",
}
_PASTED = re.compile(r"[^A-Za-z0-9]")  # what mail programs, chats and shells add to an invite
_NEGATIVE = re.compile(r"-[\d.]")  # no option begins so
_INVITE = re.compile(r"(gossamer)?gossamer1[a-z2-7]{100,}")  # long enough to be no other word; a link has the scheme before it
FUNCTIONS = {  # file and function of a verb; any other verb is the function of its name in the file of its name
    "pause": ("control", "pause"), "resume": ("control", "resume"), "leave": ("control", "leave"), "watch": ("dashboard", "watch"),
    "run": ("whole_run", "whole_run"), "eval": ("export", "evaluate"), "restore": ("backup", "restore"), "id": ("id", "identity"),
}  # fmt: skip


class Verbs(TyperGroup):
    """The command with its verbs; `--help` lists them in groups, each with its whole first paragraph."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the verbs as definition lists, which wrap at the width of the terminal."""
        width = max(map(len, self.commands))
        for title, verbs in GROUPS.items():
            rows = [(verb.ljust(width), summary(self.commands[verb])) for verb in verbs if verb in self.commands]
            if rows:
                with formatter.section(title):
                    formatter.write_dl(rows)


class Verb(TyperCommand):
    """One verb; `--help` names its arguments without their types in Python, such as `list[Path]`, and a negative number is a value."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the words after the verb; the check of an argument says what is wrong with a negative number."""
        pairs = [*itertools.pairwise(["", *args])]
        values = [word for before, word in pairs if _is_number(before, word)]
        if values and "--" not in args:
            args = [*(word for before, word in pairs if not _is_number(before, word)), "--", *values]
        return super().parse_args(ctx, args)

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the options and arguments."""
        found = super().get_params(ctx)
        for argument in (parameter for parameter in found if parameter.param_type_name == "argument"):
            vars(argument)["display_type_rich"] = lambda ctx: ""
        return found


def _is_number(before: str, word: str) -> bool:
    """Return whether a word is a negative number, and not the value of an option before it."""
    return _NEGATIVE.match(word) is not None and not before.startswith("-")


def summary(command: Any) -> str:
    """Return the first paragraph of a verb's help on one line."""
    return " ".join(str(command.help or "").split("\n\n")[0].split())


def command_line(verbs: Iterable[str] = VERBS) -> typer.Typer:
    """Import these verbs and return the command with them."""
    app = typer.Typer(
        name="peer",
        cls=Verbs,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback(invoke_without_command=True)(peer)
    for verb in verbs:
        file, function = FUNCTIONS.get(verb, (verb, verb))
        app.command(verb, cls=Verb)(getattr(importlib.import_module(f"gossamer.cli.{file}"), function))
    return app


def _print_version(wanted: bool) -> None:
    if wanted:
        from gossamer.peer.machine.status import VERSION  # with the events that a status is folded from: not for every verb

        print(VERSION)
        raise typer.Exit


def peer(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")] = False,
) -> None:
    """Train one language model with other machines, pair by pair, with no coordinator."""
    if context.invoked_subcommand is None:
        print(context.get_help(), file=sys.stderr)
        raise typer.Exit(ExitCode.BAD_INPUT)


def run(arguments: Sequence[str]) -> int:
    """Run one command line and return its exit code. Raises BrokenPipeError where the reader of its output has ended."""
    asked = [verb for verb in arguments[:1] if verb in VERBS]
    try:
        returned = command_line(asked or VERBS)(args=list(arguments), prog_name="peer", standalone_mode=False)
        print(end="", flush=True)  # an output that takes no more is the command's error
    except BrokenPipeError:
        raise
    except SystemExit as end:
        if isinstance(end.__context__, BrokenPipeError):  # typer makes code 1 of it
            raise end.__context__ from None
        raise
    except (Exception, KeyboardInterrupt) as failure:
        return int(report_failure(failure))
    return returned if isinstance(returned, int) else int(ExitCode.DONE)


def report_failure(failure: BaseException) -> ExitCode:
    """Print the error and its hint on stderr, and return the exit code of the error's owner."""
    match failure:
        case GossamerError():
            _report(str(failure), failure.hint)
            return failure.exit_code
        case typer.TyperException():
            message = failure.format_message().strip().removesuffix(".").replace("Value error, ", "", 1)  # pydantic's prefix
            _report(message[:1].lower() + message[1:], _usage_hint(failure))
            return ExitCode.BAD_INPUT
        case KeyboardInterrupt() | typer.Abort():
            _report("interrupted")
            return ExitCode.INTERRUPTED
        case OSError() if failure.errno in OF_THE_MACHINE:
            _report(": ".join(filter(None, (failure.filename, failure.strerror))), OF_THE_MACHINE[failure.errno])
            return ExitCode.BAD_INPUT
        case _:
            traceback.print_exception(failure, file=sys.stderr)
            _report(f"internal error: {failure!r}", "this is a bug; please report it with the lines above")
            return ExitCode.OUR_FAULT


def _usage_hint(failure: Any) -> str:
    """Return what the parameter takes that a command line has wrong, if it has one, and where the options are listed."""
    context, parameter = getattr(failure, "ctx", None), getattr(failure, "param", None)
    if context is None or context.parent is None:
        return "`peer --help` lists the verbs, `peer VERB --help` the options of one"
    where = f"`{context.command_path} --help` lists the options"
    if parameter is None or not getattr(parameter, "help", ""):
        return where
    return f"{parameter.help.removesuffix('.')}; {where}"


def _report(message: str, hint: str = "") -> None:
    print(f"error: {message}", file=sys.stderr)
    if hint:
        print(f"hint: {hint}", file=sys.stderr)


def hide_invite() -> None:
    """Start this command again with its invite in the environment: other users can read a command line for as long as it runs.

    Only this user can read the environment. The process keeps its id. A command line without an invite is left alone.
    """
    shown, invite = without_invite(sys.orig_argv[1:])
    if invite and sys.argv[1] in TAKE_INVITES:
        os.execve(sys.executable, [sys.executable, *shown], os.environ | {INVITE_VARIABLE: invite})


def without_invite(arguments: Sequence[str]) -> tuple[list[str], str]:
    """Return a command line without its invite, and the invite; empty if it has none, or several."""
    found = [text for text in arguments if _INVITE.fullmatch(_PASTED.sub("", text).lower())]
    if len(found) != 1:
        return list(arguments), ""
    return [text for text in arguments if text != found[0]], found[0]


def main() -> int:
    """Run the console script."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # as stderr: names of runs and files may have any letters
    hide_invite()
    follow_parent()
    try:
        return run(sys.argv[1:])
    except BrokenPipeError:  # who reads our output has read enough, as `head` does: end by the signal that ends other programs then
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        signal.raise_signal(signal.SIGPIPE)
        raise
    finally:
        gc.freeze()  # the interpreter ends with scans of all that is loaded: with torch and transformers, they would take a second


if __name__ == "__main__":
    sys.exit(main())
