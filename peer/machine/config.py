"""The local settings of one peer: what its operator may choose, and what no other peer needs to know.

Not here: anything that the peers of a run must agree on (protocol/run/manifest.py), and where files lie (peer/machine/home.py).
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from protocol.errors import BadSettings

NODE, TRAINER = "node", "trainer"  # the processes of a peer, beside its supervisor
OPTIONS_PAGE = "docs/reference/cli.md"  # where each setting is an option


def _tellable(path: Path) -> Path:
    """Refuse a name that the lines between a peer's processes, and the event log, cannot hold."""
    try:
        str(path).encode()
    except UnicodeEncodeError as error:
        raise ValueError("its name is not UTF-8") from error
    return path


Place = Annotated[Path, AfterValidator(_tellable)]


class PeerConfig(BaseModel):
    """Settings of one peer, checked and frozen."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    home: Place
    """The folder with this peer's identity, manifest, checkpoints and events."""
    data: Place | None = None
    """A folder or file of text to train on; needed where the manifest says that each peer brings its own."""
    device: str = Field(default="auto", pattern=r"^(auto|cpu|mps|cuda(:\d+)?)$")
    """Where the tensors live: cpu, mps, cuda or cuda:N; auto takes a CUDA GPU where there is one."""
    num_threads: int = Field(default=0, ge=0, le=4096)
    """Threads that the trainer may use; 0 leaves it to torch."""
    listen_host: str = Field(default="0.0.0.0", min_length=1)
    """The address to listen on; 127.0.0.1 keeps the peer on this machine."""
    listen_port: int = Field(default=0, ge=0, le=65535)
    """The port to listen on; 0 takes a free one."""
    announce: tuple[str, ...] = ()
    """Addresses to tell the others instead of those found by listening, for a forwarded port."""
    alone: bool = False
    """Train without ever meeting anybody: the baseline that a swarm is compared with."""
    trains: bool = True
    """Train; a peer that does not is a node alone, which shows newcomers the way."""
    wait_for_peers: int = Field(default=0, ge=0, le=4096)
    """Begin to train only when this many other peers have been seen; 0 begins at once."""
    checkpoint_interval_s: float = Field(default=60.0, gt=0)
    """Save when this much time has passed since the last save, or..."""
    checkpoint_interval_steps: int | None = Field(default=100, ge=1)
    """...this many inner steps, whichever comes first: at most this much is lost in a crash. None leaves it to the time."""

    @property
    def children(self) -> tuple[str, ...]:
        """Return the processes that this peer is made of; the peer is over when the first of them is."""
        return ((TRAINER,) if self.trains else ()) + (() if self.alone else (NODE,))


def peer_config(values: Mapping[str, object]) -> PeerConfig:
    """Check local settings. Raises BadSettings naming the first setting that cannot work, and for an unknown one its nearest neighbour."""
    try:
        return PeerConfig.model_validate(dict(values))
    except ValidationError as error:
        raise _as_bad_settings(error) from error


def _as_bad_settings(error: ValidationError) -> BadSettings:
    first = error.errors(include_url=False)[0]
    name = str(first["loc"][0]) if first["loc"] else "settings"
    if first["type"] == "extra_forbidden":
        near = difflib.get_close_matches(name, PeerConfig.model_fields, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"{OPTIONS_PAGE} lists the options"
        return BadSettings(f"there is no setting {name!r}", hint=hint)
    meaning = PeerConfig.model_fields[name].description or ""
    return BadSettings(f"setting {name} = {first['input']!r} cannot work: {first['msg'].lower()}", hint=meaning or f"choose another {name}")
