"""What the container files promise, as far as no engine is needed to see it; the rest is tried by `docker/test`."""

from __future__ import annotations

import re
import shlex
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from gossamer.cli.main import command_line

DOCKER = Path(__file__).parents[2] / "docker"
COMPOSE = yaml.safe_load(re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", (DOCKER / "compose.yaml").read_text()))  # variables at their defaults
PEERS = {name: service for name, service in COMPOSE["services"].items() if "gossamer" in service["image"]}


def instructions() -> list[tuple[str, str]]:
    """The Dockerfile's instructions, continued lines joined."""
    lines = [line for line in (DOCKER / "Dockerfile").read_text().splitlines() if not line.startswith("#")]
    whole = "\n".join(lines).replace("\\\n", " ")
    return [(words[0], words[1]) for line in whole.splitlines() if len(words := line.split(maxsplit=1)) == 2]


def last(name: str) -> str:
    return [value for key, value in instructions() if key == name][-1]


def understood(arguments: Sequence[str]) -> None:
    """Have the command line read these arguments of `peer`; raises where it cannot."""
    group: Any = typer.main.get_command(command_line())
    verb, *rest = arguments
    group.commands[verb].make_context(verb, list(rest), resilient_parsing=False)


def environment() -> dict[str, str]:
    return dict(word.split("=", 1) for key, value in instructions() if key == "ENV" for word in shlex.split(value))


def test_it_does_not_run_as_root() -> None:
    assert last("USER").split(":")[0].isdecimal()
    assert last("USER").split(":")[0] != "0"


def test_the_first_process_buries_orphans_and_gets_the_signal() -> None:
    assert yaml.safe_load(last("ENTRYPOINT")) == ["/usr/bin/tini", "--", "peer"]
    assert last("STOPSIGNAL") == "SIGTERM"


def test_everything_that_is_kept_lies_in_the_volume() -> None:
    kept = environment()
    assert last("VOLUME") == kept["GOSSAMER_HOME"] == kept["HOME"]
    assert Path(kept["HF_HOME"]).is_relative_to(last("VOLUME"))


def test_health_and_the_usual_command_are_command_lines_of_ours() -> None:
    health = yaml.safe_load(last("HEALTHCHECK").partition("CMD ")[2])
    assert health[0] == "peer"
    understood(health[1:])
    understood(yaml.safe_load(last("CMD")))


def test_nothing_enters_the_image_but_what_is_named() -> None:
    [first, *named] = [line for line in (DOCKER / "Dockerfile.dockerignore").read_text().splitlines() if not line.startswith("#")]
    assert first == "*"
    assert all((DOCKER.parent / name[1:]).exists() for name in named if name.startswith("!") and name != "!hashes.txt")


def test_an_image_of_hashed_packages_has_the_same_extras() -> None:
    named = [re.search(r'\(("backup.*?)\)', (DOCKER / name).read_text()) for name in ("Dockerfile", "hashes")]
    assert len({match[1] if match else None for match in named}) == 1


@pytest.mark.parametrize("name", PEERS)
def test_a_peer_of_the_compose_file(name: str) -> None:
    service = PEERS[name]
    understood(service["command"])
    assert service["read_only"]
    assert service["cap_drop"] == ["ALL"]
    assert "no-new-privileges:true" in service["security_opt"]
    assert not {"privileged", "network_mode", "user", "ports", "shm_size"} & set(service)


def test_no_two_peers_share_a_home() -> None:
    homes = [volume.split(":")[0] for service in PEERS.values() for volume in service["volumes"] if volume.endswith(":/home/gossamer")]
    assert len(set(homes)) == len(homes) == len(PEERS) - 1  # the one that compares has none
    assert set(homes) <= set(COMPOSE["volumes"])


def test_what_is_watched_is_what_shows_metrics() -> None:
    asked = yaml.safe_load((DOCKER / "watch" / "prometheus.yaml").read_text())["scrape_configs"][0]["static_configs"][0]["targets"]
    assert sorted(asked) == sorted(f"{name}:9464" for name, service in PEERS.items() if "0.0.0.0:9464" in service["command"])


def test_every_file_that_is_mounted_is_there() -> None:
    mounted = [volume.split(":")[0] for service in COMPOSE["services"].values() for volume in service["volumes"] if volume.startswith(".")]
    assert mounted
    assert not [name for name in mounted if not (DOCKER / name).exists()]


@pytest.mark.parametrize("name", ["base", "build", "swarm", "test"])
def test_scripts_can_be_started(name: str) -> None:
    assert (DOCKER / name).stat().st_mode & stat.S_IXUSR
