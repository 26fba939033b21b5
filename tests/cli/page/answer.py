from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class Answer:
    """The response of a page to a request. Of an endless stream, it holds the first piece."""

    code: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""

    def take(self, message: Any) -> None:
        """Take in a message of the page to its server."""
        if message["type"] == "http.response.start":
            self.code = message["status"]
            self.headers = {name.decode(): value.decode() for name, value in message["headers"]}
        else:
            self.body += message.get("body", b"")
