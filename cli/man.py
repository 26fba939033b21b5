"""`peer man`: the manual page, made of the same verbs, options and texts as `--help`."""

from __future__ import annotations

import shutil
import subprocess
import sys
from typing import Any

from gossamer.protocol.errors import ExitCode

MEANINGS = {
    ExitCode.DONE: "the run ended, the peer left cleanly, or the question was answered",
    ExitCode.OUR_FAULT: "a bug; of `peer status --healthy`: the peer does no useful work",
    ExitCode.BAD_INPUT: "an invalid option, invite, manifest, setting or text file",
    ExitCode.SWARM_UNREACHABLE: "none of the run's known addresses answered, or the host of its data set did not",
    ExitCode.REFUSED_BY_RUN: "the members of the run do not accept this peer",
    ExitCode.VERSION_MISMATCH: "the run speaks another protocol version",
    ExitCode.INTERRUPTED: "Ctrl-C",
}


def man() -> None:
    """Show the manual page; into a pipe or file, print its source.

    `peer man > peer.1` writes a file for the folder of manual pages, like ~/.local/share/man/man1.
    """
    page = manual_page()
    if sys.stdout.isatty() and (viewer := shutil.which("man")):
        subprocess.run([viewer, "-l", "-"], input=page, text=True, check=False)
    else:
        print(page, end="")


def manual_page() -> str:
    """Return the page in the macros of man(7)."""
    import typer

    from gossamer.cli.main import GROUPS, command_line  # it imports this file
    from gossamer.peer.machine.status import VERSION

    group: Any = typer.main.get_command(command_line())
    context = group.make_context("peer", ["id"], resilient_parsing=True)
    lines = [f'.TH PEER 1 "" "Gossamer {VERSION}" "User Commands"', ".SH NAME", f"peer \\- {_roff(_lower(group.help))}"]
    lines += [".SH SYNOPSIS", ".B peer", ".I VERB", "[options]"]
    lines += [".SH DESCRIPTION", *_paragraphs(group.help), *_options(group, context)]
    for title, verbs in GROUPS.items():
        lines.append(f'.SH "{title.upper()}"')
        for verb in verbs:
            command = group.commands[verb]
            inner = command.make_context(verb, [], parent=context, resilient_parsing=True)
            usage = " ".join(["peer", verb, *command.collect_usage_pieces(inner)])
            lines += [f'.SS "{_roff(usage)}"', *_paragraphs(command.help), *_options(command, inner)]
    lines.append('.SH "EXIT STATUS"')
    for code, meaning in MEANINGS.items():
        lines += [".TP", f".B {code.value}", _roff(meaning)]
    return "\n".join(lines) + "\n"


def _options(command: Any, context: Any) -> list[str]:
    lines = []
    for parameter in command.get_params(context):
        if record := parameter.get_help_record(context):
            name, text = record
            lines += [".TP", f".B {_roff(name)}", _roff(" ".join(text.split()))]
    return lines


def _paragraphs(text: str) -> list[str]:
    lines = []
    for paragraph in text.split("\n\n"):
        lines += [".PP", _roff(" ".join(paragraph.split()))]
    return lines


def _lower(text: str) -> str:
    first = " ".join(text.split("\n\n")[0].split())
    return (first[:1].lower() + first[1:]).removesuffix(".")


def _roff(text: str) -> str:
    """Escape text for roff, whose lines must not begin with a dot or quote."""
    escaped = text.replace("\\", "\\e").replace("-", "\\-").replace('"', "\\(dq")
    return f"\\&{escaped}" if escaped[:1] in (".", "'") else escaped
