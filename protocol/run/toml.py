"""Write pydantic models and plain values as TOML. It is separate from the manifest, which not every process imports."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import BaseModel

_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")


def write_toml(title: str, tables: Mapping[str, BaseModel]) -> str:
    """Write tables as TOML, in their order, with the fields' descriptions as comments; a field that is None becomes a comment."""
    return "\n".join([f"# {title}", *(line for name, table in tables.items() for line in _table(name, table))]) + "\n"


def _table(name: str, section: BaseModel) -> Iterator[str]:
    yield from ("", f"[{name}]")
    tables = []
    for key, field in type(section).model_fields.items():
        value = getattr(section, key)
        if isinstance(value, dict):
            tables.append((key, field.description, value))
            continue
        yield f"# {field.description}"
        yield f"# {key} =" if value is None else f"{key} = {toml_value(value)}"
    for key, description, table in tables:
        yield from ("", f"# {description}", f"[{name}.{key}]")
        yield from (f"{_key(item)} = {toml_value(value)}" for item, value in table.items())


def _key(text: str) -> str:
    return text if _BARE_KEY.fullmatch(text) else toml_value(text)


def toml_value(value: Any) -> str:
    """Write one value as TOML. Raises TypeError for a type that TOML does not have."""
    match value:
        case [BaseModel(), *_]:
            return "[\n" + "".join(f"    {toml_value(item.model_dump(exclude_none=True))},\n" for item in value) + "]"
        case list() | tuple():
            return f"[{', '.join(map(toml_value, value))}]"
        case dict():
            return f"{{{', '.join(f'{_key(key)} = {toml_value(item)}' for key, item in value.items())}}}"
        case bool() | int() | float() | str():  # TOML accepts JSON's notation, except for DEL
            return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    raise TypeError(f"TOML has no {type(value).__name__}")
