from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class Answer:
    """What a page answers to a request: of a stream that does not end, the first piece."""

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
