"""The reference pages describe everything in the code, and every link has a target."""

from __future__ import annotations

import ast
import dataclasses
import functools
import re
import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest
import typer

from gossamer.cli.config import text_of
from gossamer.cli.main import VERBS, command_line
from gossamer.peer.machine.config import LocalSettings
from gossamer.peer.machine.events import KINDS
from gossamer.peer.machine.home import Home
from gossamer.peer.machine.status import Status
from gossamer.peer.meeting.interface import MeetingOutcome
from gossamer.protocol.errors import ExitCode
from gossamer.protocol.run.manifest import Manifest
from gossamer.protocol.run.sections import ProgramModelSection, ProgramSection
from gossamer.protocol.run.staged import StagesSection
from gossamer.protocol.wire import peer_pb2

ROOT = Path(__file__).parents[1]
REFERENCE = ROOT / "docs" / "reference"
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
LINK = re.compile(r"\]\(([^)#]*)(#[^)]*)?\)")


def section(page: str, title: str) -> str:
    """Return the part of a reference page under a heading of the second level."""
    _, found, rest = (REFERENCE / page).read_text().partition(f"\n## {title}\n")
    assert found, f"{page} has no section {title}"
    return rest.partition("\n## ")[0]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_link_has_a_target(page: Path) -> None:
    links = [
        (page.parent / match[1] if match[1] else page, match[2] or "") for match in LINK.finditer(page.read_text()) if "://" not in match[1]
    ]
    assert not [target for target, _ in links if not target.exists()]
    assert not [(target, anchor) for target, anchor in links if anchor and anchor not in anchors(target)]


@functools.cache
def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as they are on GitHub and on the site."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    headings = (re.sub(r" \{.*\}$", "", heading).lower() for heading in re.findall(r"^#+ (.*)", text, re.MULTILINE))
    return {"#" + re.sub(r"[^\w -]", "", heading).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_page_is_linked(page: Path) -> None:
    """Check that the README of a folder links to each of its pages."""
    if page.parent != ROOT and page.name != "README.md" and page.parent.name != "docs":
        assert f"({page.name})" in (page.parent / "README.md").read_text()


def test_the_site_begins_with_its_first_page_and_names_what_it_does_not_have() -> None:
    """The hooks of mkdocs, on pages without titles, as mkdocs calls them."""
    hooks = runpy.run_path(str(ROOT / "docs" / "site" / "order.py"))
    files = [path.relative_to(ROOT / "docs") for path in sorted((ROOT / "docs").rglob("*.md"))]
    pages = [
        SimpleNamespace(
            is_page=True,
            file=SimpleNamespace(src_uri=str(file), abs_src_path=ROOT / "docs" / file, name=file.stem.replace("README", "index")),
        )
        for file in files
    ]
    folders = {str(file.parent) for file in files} - {"."}
    sections = [
        SimpleNamespace(is_page=False, title=name.title(), children=[page for page in pages if page.file.src_uri.startswith(name)])
        for name in sorted(folders)
    ]
    nav = SimpleNamespace(items=[*sections, *(page for page in pages if "/" not in page.file.src_uri)], pages=[])
    order = [page.file.src_uri for page in hooks["on_nav"](nav, None, None).pages]
    assert order[:3] == ["README.md", "guide/README.md", "guide/first-ten-minutes.md"] and order[-1] == "log.md"
    assert (
        hooks["on_page_markdown"]("[a](../../a.py), [b](../b.md#c), [d](../../d.md#e)", None, None, None)
        == "a (`a.py`), [b](../b.md#c), d (`d.md`)"
    )


def test_every_verb_and_option_is_described() -> None:
    """An option that is a local setting is named with its verb and described with the settings; `--json` is described once."""
    group = typer.main.get_command(command_line())
    settings, answers = bare((REFERENCE / "config.md").read_text()), row_of("--json")
    for verb, command in group.commands.items():  # type: ignore[attr-defined]
        text = section("cli.md", verb)
        for parameter in command.params:
            if parameter.opts == ["--json"]:
                assert f"`{verb}`" in answers, f"peer {verb} --json"
            elif parameter.name not in ("help", "home"):
                for name in spellings(parameter):
                    assert re.search(rf"`{name}[` ]", text), f"peer {verb} {name}"
                if is_setting(verb, parameter):
                    description = bare(LocalSettings.model_fields[parameter.name].description)
                    assert "](config.md)" in text and description in settings and description in bare(parameter.help), f"peer {verb} {name}"
                else:
                    assert bare(parameter.help) in bare(text), f"peer {verb} {parameter.name}"


def test_options_of_every_verb_are_described() -> None:
    peer_list = (REFERENCE / "cli.md").read_text().partition("\n## ")[0]
    group = typer.main.get_command(command_line())
    home = next(parameter for parameter in group.commands["status"].params if parameter.name == "home")  # type: ignore[attr-defined]
    for parameter in (*group.params, home):
        for name in spellings(parameter):
            assert name in peer_list, f"peer {name}"


def is_setting(verb: str, parameter: Any) -> bool:
    """Return whether a parameter is an option of this verb that `takes` has made of a local setting."""
    return verb in ("host", "join", "bootstrap", "doctor") and parameter.name in LocalSettings.model_fields


def row_of(option: str) -> str:
    """Return the row of an option in the table for every verb."""
    found = re.search(rf"^\| `{option}` \|.*", (REFERENCE / "cli.md").read_text().partition("\n## ")[0], re.MULTILINE)
    assert found, f"the page has no row of {option}"
    return found[0]


def bare(text: str) -> str:
    """Return a text without marks and links, and without the default of an option where a column of the page has it."""
    text = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", text)
    return re.sub(r" Default: (\S+|300 GB|that of --home|until peer resume)\.(?= |$)", "", re.sub(r"[`\\]", "", text))


def spellings(parameter: Any) -> list[str]:
    """Return all names of a parameter: options, argument, environment variables."""
    names = [*parameter.opts, *parameter.secondary_opts] if parameter.param_type_name == "option" else [parameter.metavar]
    variables = [parameter.envvar] if isinstance(parameter.envvar, str) else parameter.envvar or []
    return [*names, *variables]


def test_every_key_of_the_manifest_is_described_with_its_meaning() -> None:
    for name, field in Manifest.model_fields.items():
        text = section("manifest.md", f"[{name}]")
        assert field.annotation is not None
        for key, inner in field.annotation.model_fields.items():
            assert re.search(rf"^\| `{key}` \| .* \| {re.escape(inner.description)} \|$", text, re.MULTILINE), f"{name}.{key}"


def test_every_key_of_a_programs_manifest_is_described_with_its_meaning() -> None:
    for title, kind in (("[program]", ProgramSection), ("[model] of a program run", ProgramModelSection)):
        text = section("manifest.md", title)
        for key, field in kind.model_fields.items():
            assert re.search(rf"^\| `{key}` \| .* \| {re.escape(field.description or '?')} \|$", text, re.MULTILINE), f"{title} {key}"


def test_every_key_of_the_stages_is_described_with_its_meaning() -> None:
    text = section("manifest.md", "[stages]")
    for key, field in StagesSection.model_fields.items():
        assert re.search(rf"^\| `{key}` \| .* \| {re.escape(field.description or '?')} \|$", text, re.MULTILINE), key


def test_every_local_setting_is_described_with_its_default_and_meaning() -> None:
    text = (REFERENCE / "config.md").read_text()
    defaults = LocalSettings().model_dump(mode="json")
    rows = [f"| `{key}` | `{text_of(defaults[key])}` | {field.description} |" for key, field in LocalSettings.model_fields.items()]
    assert [line for line in text.splitlines() if line.startswith("| `")] == rows


def test_every_event_is_described() -> None:
    for kind in get_args(KINDS):
        text = section("events.md", kind.__name__)
        for field in dataclasses.fields(kind)[2:]:  # not `ts` and `event`, which every line has
            assert f"- `{field.name}`: " in text, f"{kind.__name__}.{field.name}"


def test_every_outcome_of_a_meeting_is_described() -> None:
    text = section("events.md", "MeetingDone")
    for over in MeetingOutcome:
        assert f"`{over.name.lower()}`" in text


def test_every_key_of_the_status_is_described() -> None:
    text = (REFERENCE / "status.md").read_text()
    described = re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE)
    assert sorted(described) == sorted(Status().to_json())


def test_every_exit_code_is_described() -> None:
    text = (REFERENCE / "exit-codes.md").read_text()
    for code in ExitCode:
        assert f"| {code.value} | `{code.name}` |" in text


def test_every_refusal_is_described() -> None:
    text = section("wire.md", "Refusal codes")
    for name in peer_pb2.RefusalCode.keys():  # noqa: SIM118 - an enum wrapper, not a dict
        if name != "REFUSAL_UNSPECIFIED":
            assert f"| `{name.removeprefix('REFUSAL_')}` |" in text


def test_everything_in_the_home_folder_is_described() -> None:
    text = (REFERENCE / "home.md").read_text()
    for place in vars(Home(Path("home"))).values():
        if place.name != "home":
            assert f"| `{place.name}" in text


def test_advice_names_verbs_that_exist() -> None:
    """In the pages, and in the texts of the code: messages, hints, docstrings."""
    modules = (path for package in ("cli", "optim", "peer", "protocol") for path in (ROOT / package).rglob("*.py"))
    parsed = (node for module in modules for node in ast.walk(ast.parse(module.read_text())))
    texts = [node.value for node in parsed if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    named = {verb for text in (*(page.read_text() for page in PAGES), *texts) for verb in re.findall(r"`peer ([a-z]+)", text)}
    assert named <= set(VERBS)
