"""`peer doctor`: whether this machine can take part in a run, and if not, what to do about it."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gossamer.cli.figures import fitted
from gossamer.cli.generated_options import Given, takes
from gossamer.cli.join import InviteFile, given_text
from gossamer.cli.manifests import read_manifest
from gossamer.cli.options import DEFAULT_HOME, INVITE_VARIABLE, HomeFolder, Json
from gossamer.peer.machine.config import LocalSettings, peer_config, saved_settings
from gossamer.peer.machine.home import Home
from gossamer.protocol.errors import BadSettings
from gossamer.protocol.run.manifest import Manifest

if TYPE_CHECKING:
    from gossamer.peer.doctor.finding import Finding

InviteText = Annotated[
    str | None,
    typer.Argument(
        metavar="INVITE",
        envvar=INVITE_VARIABLE,
        help="Also check this run: an invite, a manifest file, or a home folder. Default: the run that the home folder holds, if any.",
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

    text, folder, manifest = _subject(given_text(invite, invite_file), home)
    found, saved = [], {}
    with suppress(BadSettings):  # a check says it
        saved = saved_settings(folder)
    local = peer_config(saved | given | {"home": folder.path})
    port = local.port if "port" in saved | given else None
    for name, finding in examine(Case(folder, text, local, port, manifest)):
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


def _subject(text: str | None, home: Path) -> tuple[str | None, Home, Manifest | None]:
    """Return the invite, the home and the manifest that the operator names with one word. Raises BadManifest for a file that is none."""
    if text is not None and os.path.isdir(text):  # noqa: PTH112 - false for an invite, which is too long for a path
        return None, Home(Path(text)), None
    if text is not None and (os.path.isfile(text) or text.endswith(".toml")):  # noqa: PTH113
        return None, Home(home), read_manifest(Path(text))
    return text, Home(home), None


def show(name: str, finding: Finding) -> None:
    """Print a finding as a line, and the way out below it."""
    print(fitted(f"{finding.level.value:<6}{name:<15}{finding.found}", 21), flush=True)
    if finding.way_out:
        print(fitted(f"{'':<21}-> {finding.way_out}", 24), flush=True)
