"""`peer doctor`: whether this machine can take part in a run, and if not, what to do about it."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated

import typer

from gossamer.cli.generated_options import Given, takes
from gossamer.cli.join import InviteFile, given_text
from gossamer.cli.options import DEFAULT_HOME, INVITE_VARIABLE, HomeFolder, Json
from gossamer.peer.machine.config import LocalSettings, peer_config, saved_settings
from gossamer.peer.machine.home import Home
from gossamer.protocol.errors import BadSettings

if TYPE_CHECKING:
    from gossamer.peer.doctor.finding import Finding

InviteText = Annotated[
    str | None,
    typer.Argument(
        metavar="INVITE", envvar=INVITE_VARIABLE, help="Also check this run. Default: the run that the home folder holds, if any."
    ),
]


@takes("given", LocalSettings, "devices", "listen", "port")
def doctor(
    invite: InviteText = None,
    invite_file: InviteFile = None,
    home: HomeFolder = DEFAULT_HOME,
    *,
    given: Given,
    as_json: Json = False,
) -> int:
    """Check this machine, its network and an invite.

    Takes less than 30 seconds and changes nothing.
    """
    from gossamer.peer.doctor.case import Case  # slow to import, and needed only now
    from gossamer.peer.doctor.examination import examine, exit_code

    found, folder, saved = [], Home(home), {}
    with suppress(BadSettings):  # a check says it
        saved = saved_settings(folder)
    local = peer_config(saved | given | {"home": folder.path})
    port = local.port if "port" in saved | given else None
    for name, finding in examine(Case(folder, given_text(invite, invite_file), local, port)):
        found.append((name, finding))
        if not as_json:
            show(name, finding)
    code = exit_code([finding for _, finding in found])
    if as_json:
        checks = [
            {"check": name, "level": finding.level.value, "found": finding.found, "way_out": finding.way_out} for name, finding in found
        ]
        print(json.dumps({"exit_code": int(code), "checks": checks}))
    return int(code)


def show(name: str, finding: Finding) -> None:
    """Print a finding as a line, and the way out below it."""
    print(f"{finding.level.value:<6}{name:<15}{finding.found}", flush=True)
    if finding.way_out:
        print(f"{'':<21}-> {finding.way_out}", flush=True)
