"""The local settings of one peer: what its operator may choose, and what no other peer needs to know.

They stand in `config.toml` in the home folder; options of a command override them for that start. Not here: anything that the peers of a
run must agree on (protocol/run/manifest.py), and where files lie (peer/machine/home.py).
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from gossamer.peer.machine.home import Home, write_whole
from gossamer.peer.machine.schedule import ALWAYS, Schedule
from gossamer.peer.machine.units import UNLIMITED, rate_bytes_per_s, rate_text, size_bytes
from gossamer.protocol.errors import BadSettings
from gossamer.protocol.limits import LEAST_BYTES_PER_S
from gossamer.protocol.run.toml import toml_value

NODE, TRAINER = "node", "trainer"  # the processes of a peer, beside its supervisor
STARTED_WITH = {  # settings that a child is started with: it is started again when one changes
    "data": (TRAINER,),
    "model": (TRAINER, NODE),
    "devices": (TRAINER,),
    "micro_batch": (TRAINER,),
    "recompute": (TRAINER,),
    "compile": (TRAINER,),
    "threads": (TRAINER,),
    "gpu_memory": (TRAINER,),
    "niceness": (TRAINER, NODE),
    "checkpoint_interval_s": (TRAINER,),
    "checkpoint_interval_steps": (TRAINER,),
    "listen": (NODE,),
    "port": (NODE,),
    "announce": (NODE,),
    "relay": (NODE,),
}
LIMITS = (  # what the page offers to change
    "max_upload", "max_download", "monthly_traffic", "max_disk", "max_memory", "gpu_memory", "threads", "niceness", "schedule", "only_idle",
    "not_on_battery",
)  # fmt: skip
DEVICES = r"^(auto|all|mps|cuda(:\d+)?|cpu(:[1-9]\d?)?|\d+(,\d+)*)$"
SETTINGS_PAGE = "docs/reference/config.md"  # where each setting is explained
_TITLE = "The local settings of this peer. `peer config` shows them with their meaning, and writes this file anew when it changes one."


def _tellable(path: Path) -> Path:
    """Refuse a name that the lines between a peer's processes, and the event log, cannot hold."""
    try:
        str(path).encode()
    except UnicodeEncodeError as error:
        raise ValueError("its name is not UTF-8") from error
    return path


def _readable(read: Callable[[str], object]) -> AfterValidator:
    """Keep the text as it was written, if it can be read."""

    def check(text: str) -> str:
        read(text)
        return text

    return AfterValidator(check)


def _fast_enough(text: str) -> None:
    if rate_bytes_per_s(text) < LEAST_BYTES_PER_S:
        least = f"{LEAST_BYTES_PER_S / 125:.0f} kbit/s"
        raise ValueError(f"a meeting could not end before its deadline at {rate_text(rate_bytes_per_s(text))}; {least} would do")


def _each_once(text: str) -> str:
    names = text.split(",")
    if len(set(names)) < len(names):
        raise ValueError("a device stands in it twice")
    return text


Place = Annotated[Path, AfterValidator(_tellable)]
Rate = Annotated[str, _readable(_fast_enough)]
Size = Annotated[str, _readable(size_bytes)]
Times = Annotated[str, _readable(Schedule.from_text)]


class LocalSettings(BaseModel):
    """What `config.toml` may hold, checked and frozen. What is limited is kept as it was written."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    data: Place | None = None
    """A folder or file of text to train on; needed where the manifest says that each peer brings its own."""
    model: Place | None = None
    """A folder with the run's tokenizer, and the weights that it starts from, in the format of transformers; checked by their digests."""
    devices: Annotated[str, AfterValidator(_each_once)] = Field(default="auto", pattern=DEVICES)
    """Where to train: cpu, mps, cuda or cuda:N; 0,1 or all for several CUDA GPUs; cpu:2 for two processes; auto is one GPU or the CPU."""
    micro_batch: int = Field(default=0, ge=0, le=1 << 20)
    """Sequences to compute at a time; 0 finds it: the whole batch, or as many as fit. The result is the same."""
    recompute: bool = False
    """Compute activations again in the backward pass instead of keeping them: much less memory, a third more work."""
    compile: bool | None = None
    """Have torch compile the model's blocks: some minutes first, faster steps then. Not set: on a CUDA GPU where it can."""
    threads: int = Field(default=0, ge=0, le=4096)
    """Processor threads that the trainer may use; 0 leaves it to torch."""
    niceness: int = Field(default=0, ge=0, le=19)
    """How far the peer gives way to other processes of the machine: 0 not at all, 19 to all of them."""
    max_memory: Size = UNLIMITED
    """The most memory that the processes of the peer may hold, like 8 GB: a run that needs more is refused; who holds more is paused."""
    gpu_memory: Size = UNLIMITED
    """The most memory that the trainer may take on a GPU, like 6 GB: a run that needs more is refused."""
    max_disk: Size = UNLIMITED
    """The most that the home folder may take on the disk, like 20 GB: a run that needs more is refused; who takes more is paused."""
    listen: str = Field(default="0.0.0.0", min_length=1)
    """The address to listen on; 127.0.0.1 keeps the peer on this machine."""
    port: int = Field(default=0, ge=0, le=65535)
    """The port to listen on; 0 takes a free one. Not set: that of last time if it is free."""
    announce: tuple[str, ...] = ()
    """Addresses to tell the others instead of those found by listening, for a forwarded port."""
    relay: bool | None = None
    """Carry the streams of peers behind routers, where others can call this one. Not set: the host of a run and `peer bootstrap` do."""
    checkpoint_interval_s: float = Field(default=60.0, gt=0)
    """Save when so many seconds have passed since the last save, or..."""
    checkpoint_interval_steps: int = Field(default=100, ge=0)
    """...so many inner steps, whichever comes first: at most this much is lost in a crash. 0 leaves it to the time."""
    max_upload: Rate = UNLIMITED
    """The most that the peer sends, like 5 Mbit/s: meetings, and its state for newcomers."""
    max_download: Rate = UNLIMITED
    """The most that the peer receives, like 20 Mbit/s, on average: what others have under way comes first."""
    monthly_traffic: Size = UNLIMITED
    """The most to send and receive in a month, like 200 GB; used up, the peer is paused and off the network till the next."""
    schedule: Times = ALWAYS
    """When to train, by local time: windows like 22:00-07:00 or mon-fri 22:00-07:00, with commas between them; else the peer is paused."""

    only_idle: bool = False
    """Train only while others leave the machine idle: what all other processes use of its processors decides."""
    not_on_battery: bool = False
    """Train only while the machine does not run from its battery."""


class PeerConfig(LocalSettings):
    """The settings of one start of a peer, checked and frozen."""

    home: Place
    """The folder with this peer's identity, manifest, checkpoints and events."""
    alone: bool = False
    """Train without ever meeting anybody: the baseline that a swarm is compared with."""
    trains: bool = True
    """Train; a peer that does not is a node alone, which shows newcomers the way."""
    wait_for_peers: int = Field(default=0, ge=0, le=4096)
    """Begin to train only when this many other peers have been seen; 0 begins at once."""
    keep_trying: bool = False
    """Where nobody of the run answers, try again until somebody does."""

    @property
    def children(self) -> tuple[str, ...]:
        """Return the processes that this peer is made of; the peer is over when the first of them is."""
        return ((TRAINER,) if self.trains else ()) + (() if self.alone else (NODE,))


def limits_in_force(config: LocalSettings) -> dict[str, str]:
    """Return the limits that the operator has set, by name, as they were written."""
    values = ((key, getattr(config, key), LocalSettings.model_fields[key].get_default()) for key in LIMITS)
    return {key: str(value) for key, value, default in values if value != default}


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
        return no_such_setting(name)
    meaning = PeerConfig.model_fields[name].description or ""
    why = first["msg"].removeprefix("Value error, ")
    return BadSettings(
        f"setting {name} = {first['input']!r} cannot work: {why[:1].lower()}{why[1:]}", hint=meaning or f"choose another {name}"
    )


def no_such_setting(name: str) -> BadSettings:
    """Return the error for a setting that there is not, with the nearest one."""
    near = difflib.get_close_matches(name, LocalSettings.model_fields, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"`peer config` lists the settings, {SETTINGS_PAGE} too"
    return BadSettings(f"there is no setting {name!r}", hint=hint)


# ---------------------------------------------------------------------- the file


def saved_settings(home: Home) -> dict[str, Any]:
    """Return what `config.toml` in the home holds; nothing where there is none. Raises BadSettings, naming the file."""
    try:
        given = tomllib.loads(home.config.read_text(encoding="utf-8"))
        LocalSettings.model_validate(given)
    except FileNotFoundError:
        return {}
    except ValidationError as error:
        wrong = _as_bad_settings(error)
        raise BadSettings(f"{home.config}: {wrong}", hint=wrong.hint) from error
    except (OSError, ValueError, RecursionError) as error:  # of these, TOML's own
        raise BadSettings(f"{home.config} cannot be read: {error}", hint="mend it, or delete it: every setting has a default") from error
    return given


def with_setting(given: Mapping[str, Any], key: str, text: str | None) -> dict[str, Any]:
    """Return settings with one changed to what `text` says; None takes it out, so that its default holds. Raises BadSettings."""
    if key not in LocalSettings.model_fields:
        raise no_such_setting(key)
    kept = {name: value for name, value in given.items() if name != key}
    if text is None:
        return kept
    values = {**kept, key: _read_value(key, text)}
    try:
        checked = LocalSettings.model_validate(values)
    except ValidationError as error:
        raise _as_bad_settings(error) from error
    return {**kept, key: checked.model_dump(mode="json")[key]}


def _read_value(key: str, text: str) -> object:
    """Read a setting's value as it stands in a command: a list by its commas."""
    if LocalSettings.model_fields[key].annotation == tuple[str, ...]:
        return tuple(item.strip() for item in text.split(",") if item.strip())
    return text


def save_settings(home: Home, given: Mapping[str, Any]) -> None:
    """Write `config.toml`: every setting with its meaning, as a comment where its default holds. Raises BadSettings where it cannot be."""
    lines = [f"# {_TITLE}"]
    for key, field in LocalSettings.model_fields.items():
        lines += ["", f"# {field.description}"]
        default = field.get_default()
        if key in given:
            lines.append(f"{key} = {toml_value(given[key])}")
        else:
            lines.append(f"# {key} =" if default is None else f"# {key} = {toml_value(default)}")
    try:
        write_whole(home.config, ("\n".join(lines) + "\n").encode())
    except OSError as error:
        raise BadSettings(f"{home.config} cannot be written: {error.strerror}", hint="nothing was changed") from error
