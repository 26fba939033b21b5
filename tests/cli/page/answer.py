from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


def request_to(path: str, headers: dict[str, str], *, method: str = "GET", query: str = "", client: str = "127.0.0.1") -> dict[str, Any]:
    """Return a request as a server passes it to a page."""
    return {
        "type": "http", "http_version": "1.1", "method": method, "path": path, "raw_path": path.encode(), "root_path": "",
        "scheme": "http", "query_string": query.encode(), "client": (client, 1), "server": ("192.0.2.9", 80),
        "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
    }  # fmt: skip


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
