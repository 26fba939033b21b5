"""The reference page of the library shows its signatures and docstrings. `python -m tests.api.test_api_page` writes it again."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gossamer
from gossamer.module_program import Stateful
from gossamer.protocol import errors

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "api.md"
BEGIN, END = "<!-- names: written by tests/api/test_api_page.py -->\n", "<!-- end of the names -->\n"
NAMES = ("host", "join", "Run", "Swarm", "Clock")
RAISED = ("OperatorError", "BadInvite", "BadManifest", "BadSettings", "WrongVersion", "RunRefusesUs", "SwarmUnreachable", "GossamerError")
ONE_LINE = 100  # characters of a signature


def paragraphs(thing: object) -> str:
    """Return a docstring as Markdown: each paragraph is one line."""
    return "\n\n".join(" ".join(part.split()) for part in (inspect.getdoc(thing) or "").split("\n\n")) + "\n"


def signature(name: str, function: Any) -> str:
    """Return a signature as code; a long one is a block with a line for each parameter."""
    found = inspect.signature(function)
    shown = [one for one in found.parameters.values() if one.name != "self"]
    first_named = next((number for number, one in enumerate(shown) if one.kind is one.KEYWORD_ONLY), None)
    parts = [parameter(one) for one in shown]
    if first_named is not None:
        parts.insert(first_named, "*")
    returned = f" -> {found.return_annotation}" if found.return_annotation not in (None, "None", inspect.Signature.empty) else ""
    text = f"{name}({', '.join(parts)}){returned}"
    if len(text) <= ONE_LINE:
        return f"`{text}`\n"
    return f"```python\n{name}(\n" + "".join(f"    {part},\n" for part in parts) + f"){returned}\n```\n"


def parameter(one: inspect.Parameter) -> str:
    default = "{}" if repr(one.default) == "<factory>" else repr(one.default).replace("'", '"')
    return f"{one.name}: {one.annotation}" + ("" if one.default is one.empty else f" = {default}")


def members(kind: type) -> Iterator[str]:
    """Return the sections of the public methods and properties of a class, in the order of its source."""
    for name, member in vars(kind).items():
        if name.startswith("_"):
            continue
        if isinstance(member, property):
            assert member.fget is not None
            returned = inspect.signature(member.fget).return_annotation
            yield f"### {kind.__name__}.{name}\n\n`{name}: {returned}`\n\n{paragraphs(member)}"
        elif inspect.isfunction(member):
            yield f"### {kind.__name__}.{name}\n\n{signature(name, member)}\n{paragraphs(member)}"


def section(name: str, thing: Any) -> Iterator[str]:
    """Return the sections of a function, or of a class with its members."""
    is_made_by_users = not inspect.isclass(thing) or name == "Run"
    yield f"## {name}\n\n" + (f"{signature(name, thing)}\n" if is_made_by_users else "") + paragraphs(thing)
    if inspect.isclass(thing):
        yield from members(thing)


def error_rows() -> str:
    """Return a table of the errors that a program may see."""
    rows = [(name, getattr(errors, name)) for name in RAISED]
    lines = [f"| `{name}` | `{kind.__base__.__name__}` | {paragraphs(kind).strip()} |\n" for name, kind in rows]
    return "| error | is a | meaning |\n|---|---|---|\n" + "".join(lines)


def rendered() -> str:
    parts = [part for name in NAMES for part in section(name, getattr(gossamer, name))]
    parts += section("Stateful", Stateful)
    return "\n" + "\n".join([*parts, f"## errors\n\n{paragraphs(errors)}\n{error_rows()}"]) + "\n"


def parts() -> tuple[str, str, str]:
    """Return the page before the names, the names, and the page after them."""
    before, begin, rest = PAGE.read_text().partition(BEGIN)
    names, end, after = rest.partition(END)
    assert begin and end, "the page has no place for the names"
    return before, names, after


def test_the_page_shows_the_docstrings_of_the_code() -> None:
    assert parts()[1] == rendered(), "run python -m tests.api.test_api_page"


def test_the_page_has_every_public_name() -> None:
    assert sorted([*NAMES, "errors"]) == sorted(gossamer.__all__)


def test_each_public_name_says_what_it_does() -> None:
    silent = [part.splitlines()[0] for name in NAMES for part in section(name, getattr(gossamer, name)) if part.endswith("`\n\n\n")]
    assert not silent


if __name__ == "__main__":
    before, _, after = parts()
    PAGE.write_text(before + BEGIN + rendered() + END + after)
