"""The peer as a service of systemd's user manager: the unit, where it lies, and its state.

The sandbox equals that of the container (docker/compose.yaml): only the home is writable, and no process gains privileges. It uses only
options that the manager of an unprivileged user can set.
"""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Final

from gossamer.protocol.errors import BadSettings, ExitCode

NAME_CHARS: Final = 100  # of the home's path in the name of its unit
ASK_S: Final = 30.0  # to start a service, systemd waits for the process, not for training
ONLY_THE_OPERATOR: Final = (ExitCode.BAD_INPUT, ExitCode.REFUSED_BY_RUN, ExitCode.VERSION_MISMATCH)  # can correct the cause

UNIT: Final = """\
[Unit]
Description=Gossamer peer in {name}
StartLimitIntervalSec=1h
StartLimitBurst=3

[Service]
Type=exec
ExecStart={command}
Environment={huggingface}
Environment={triton}
Restart=on-failure
RestartSec=30s
RestartPreventExitStatus={final}
TimeoutStopSec=10min
KillMode=mixed
UMask=0077

# the same sandbox as the container's
NoNewPrivileges=yes
PrivateUsers=yes
PrivateTmp=yes
ProtectSystem=strict
ReadWritePaths={home}
ProtectKernelTunables=yes
ProtectKernelModules=yes
ProtectKernelLogs=yes
ProtectControlGroups=yes
ProtectClock=yes
ProtectHostname=yes
RestrictAddressFamilies=AF_UNIX AF_INET AF_INET6 AF_NETLINK
RestrictNamespaces=yes
RestrictRealtime=yes
RestrictSUIDSGID=yes
LockPersonality=yes
SystemCallArchitectures=native
SystemCallFilter=@system-service

[Install]
WantedBy=default.target
"""


def unit_text(home: Path) -> str:
    """Return the unit that runs the peer of this home."""
    final = " ".join(str(code.value) for code in ONLY_THE_OPERATOR)
    name = str(home).replace("%", "%%")
    command = f"{_quoted(sys.executable)} -P -m gossamer.cli.main join --keep-trying --home {_quoted(home)}"
    return UNIT.format(
        name=name,
        home=_quoted(home),
        command=command.replace("$", "$$"),
        huggingface=_quoted(f"HF_HOME={home}/huggingface"),
        triton=_quoted(f"TRITON_CACHE_DIR={home}/triton"),
        final=final,
    )


def unit_file(home: Path) -> Path:
    """Return the path of the unit of this home; each home has its own, whatever its letters and signs."""
    folder = Path(os.environ.get("XDG_CONFIG_HOME") or "~/.config").expanduser() / "systemd" / "user"
    place = re.sub(r"[^A-Za-z0-9]+", "-", str(home)).strip("-")
    with suppress(OSError):  # none, or its name is too long
        earlier = folder / f"gossamer-{place}.service"  # as an earlier release has named it, for several homes
        if f"\nReadWritePaths={_quoted(home)}\n" in earlier.read_text():
            return earlier
    return folder / f"gossamer-{place[-NAME_CHARS:].lstrip('-')}-{hashlib.sha256(os.fsencode(home)).hexdigest()[:8]}.service"


def lingers() -> bool:
    """Whether this user's services run without a login."""
    return Path("/var/lib/systemd/linger", os.environ.get("USER", "")).is_file()


def need_user_manager() -> None:
    """Raise BadSettings unless systemd's user manager answers; changes nothing."""
    systemctl("show-environment")


def systemctl(*arguments: str) -> str:
    """Run a command of systemd's user manager and return its output. Raises BadSettings if there is none or it refuses."""
    try:
        done = subprocess.run(["systemctl", "--user", *arguments], capture_output=True, text=True, timeout=ASK_S)
    except FileNotFoundError as error:
        raise BadSettings(
            "this machine has no systemd", hint="`docs/guide/containers.md` tells another way to keep a peer running"
        ) from error
    except subprocess.TimeoutExpired as error:
        raise BadSettings(f"systemd did not answer in {ASK_S:.0f} s", hint=f"try: systemctl --user {' '.join(arguments)}") from error
    if done.returncode:
        output = (done.stderr or done.stdout).strip().splitlines()
        raise BadSettings(
            f"systemd's user manager refused: {output[-1] if output else f'exit code {done.returncode}'}",
            hint=f"log in as this user, not by su or sudo, and try: systemctl --user {' '.join(arguments)}",
        )
    return done.stdout.strip()


def _quoted(value: Path | str) -> str:
    """Quote a value as one word of a unit: systemd splits at spaces and expands %, and $ in commands alone."""
    escaped = str(value).replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")
    return f'"{escaped}"' if re.search(r"[\s\"'\\]", escaped) else escaped
