"""The local settings of one peer: choices of its operator that no other peer needs to know.

`config.toml` in the home folder stores them; options of a command override them for that start. What the peers of a run must agree on is
in protocol/run/manifest.py, the paths of files in peer/machine/home.py.
"""

from __future__ import annotations

import difflib
import shlex
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from gossamer.peer.machine.home import ANOTHER_HOME, Home, write_whole
from gossamer.peer.machine.schedule import ALWAYS, Schedule
from gossamer.peer.machine.stage_line import LEAST_USE
from gossamer.peer.machine.units import UNLIMITED, rate_bytes_per_s, rate_text, seconds, size_bytes
from gossamer.protocol.errors import BadSettings
from gossamer.protocol.limits import LEAST_BYTES_PER_S, STAGES
from gossamer.protocol.run.toml import toml_value

NODE, TRAINER = "node", "trainer"  # the processes of a peer, beside its supervisor
DEVICES = r"^(auto|all|mps|(gpu|cuda|xpu)(:\d+)?|cpu(:[1-9]\d?)?|\d+(,\d+)*)$"
COMMANDS = ("notify", "pause_when")  # the settings that run commands
WEB = ("http://", "https://")  # how a URL of the setting `notify` begins; all else is a command
SETTINGS_PAGE = "docs/reference/config.md"  # where each setting is explained
_TITLE = "The local settings of this peer. `peer config` shows them with their meaning, and writes this file anew when it changes one."


@dataclass(frozen=True, slots=True)
class Setting:
    """How a value is offered to the operator, and what a change of it restarts: metadata of a field of a WithOptions."""

    metavar: str = ""  # name of the value in `--help`; empty for a switch
    option: str | None = ""  # empty: the field's name with hyphens; None: no option
    restarts: tuple[str, ...] = ()  # the processes that read it only when they start
    is_limit: bool = False  # the dashboard shows it and can change it
    parser: Callable[[str], Any] | None = None  # of the option's text, if the field's type does not suffice


def _encodable(path: Path | None) -> Path | None:
    """Refuse a name that is not UTF-8: pipes between processes and the event log cannot carry it."""
    try:
        str(path).encode()
    except UnicodeEncodeError as error:
        raise ValueError("its name is not UTF-8") from error
    return path


def _readable(read: Callable[[str], object]) -> AfterValidator:
    """Check that the text can be read, and keep it as written."""

    def check(text: str) -> str:
        read(text)
        return text

    return AfterValidator(check)


def _fast_enough(text: str) -> None:
    if rate_bytes_per_s(text) < LEAST_BYTES_PER_S:
        least = f"{LEAST_BYTES_PER_S / 125:.0f} kbit/s"
        raise ValueError(f"a meeting could not end before its deadline at {rate_text(rate_bytes_per_s(text))}; {least} would do")


def _url_or_command(text: str) -> None:
    if not text.startswith(WEB):
        if "://" in text.split(" ")[0]:
            raise ValueError("a URL begins with http:// or https://")
        shlex.split(text)


def _each_once(text: str) -> str:
    names = text.split(",")
    if len(set(names)) < len(names):
        raise ValueError("duplicate device")
    return text


Rate = Annotated[str, _readable(_fast_enough)]
Size = Annotated[str, _readable(size_bytes)]
Seconds = Annotated[float, BeforeValidator(lambda value: seconds(value) if isinstance(value, str) else value)]


class WithOptions(BaseModel):
    """Values that the operator chooses with options. Each field has a Setting, and a docstring that is the option's help."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    @classmethod
    def setting(cls, name: str) -> Setting:
        """Return how a field is offered and what a change of it restarts."""
        return next(item for item in cls.model_fields[name].metadata if isinstance(item, Setting))

    @classmethod
    def spelling(cls, name: str) -> str:
        """Return the option of a field."""
        return cls.setting(name).option or f"--{name.replace('_', '-')}"


class LocalSettings(WithOptions):
    """What `config.toml` may hold, checked and frozen. Limits are kept as they were written.

    This class is the only place that lists the settings: options, `peer config`, the dashboard and the restarts read it.
    """

    data: Annotated[Path | None, AfterValidator(_encodable), Setting("PATH", restarts=(TRAINER,))] = None
    """Text file, or folder of text files, to train on. Not set: the data that the manifest names."""
    model: Annotated[Path | None, AfterValidator(_encodable), Setting("FOLDER", restarts=(TRAINER, NODE))] = None
    """Folder in the format of transformers with the run's tokenizer and initial weights. Their digests must match the manifest."""
    devices: Annotated[str, AfterValidator(_each_once), Setting("NAMES", restarts=(TRAINER,))] = Field(default="auto", pattern=DEVICES)
    """Where to train: auto (GPU, else CPU), gpu, cpu, mps, cuda, xpu, gpu:N; 0,1 or all for several GPUs; cpu:2 for two processes."""
    micro_batch: Annotated[int, Setting("N", restarts=(TRAINER,))] = Field(default=0, ge=0, le=1 << 20)
    """Sequences per forward pass; 0 takes the whole batch, or as many as fit in memory. The result is the same."""
    recompute: Annotated[bool, Setting(option=None, restarts=(TRAINER,))] = False
    """Compute activations again in the backward pass instead of keeping them: much less memory, a third more work."""
    optimizer_on_host: Annotated[bool, Setting(option=None, restarts=(TRAINER,))] = False
    """Keep the optimizer's state in the host's memory between steps: less GPU memory, slower steps. false: only if the GPU is too small."""
    compile: Annotated[bool | None, Setting(option=None, restarts=(TRAINER,))] = None
    """Compile the model's blocks with torch: some minutes at the start, then faster steps. Not set: where Triton compiles for the GPU."""
    threads: Annotated[int, Setting("N", restarts=(TRAINER,), is_limit=True)] = Field(default=0, ge=0, le=4096)
    """Processor threads for training; 0 lets torch choose."""
    niceness: Annotated[int, Setting("N", restarts=(TRAINER, NODE), is_limit=True)] = Field(default=0, ge=0, le=19)
    """Processor priority that the peer gives up for other processes, as in nice: 0 none, 19 all."""
    max_memory: Annotated[Size, Setting("SIZE", is_limit=True)] = UNLIMITED
    """Memory that the peer's processes may hold, like "8 GB". A run that needs more is refused; a peer that holds more pauses."""
    gpu_memory: Annotated[Size, Setting("SIZE", restarts=(TRAINER,), is_limit=True)] = UNLIMITED
    """Memory that the trainer may hold on a GPU, like "6 GB". A run that needs more is refused."""
    max_disk: Annotated[Size, Setting("SIZE", is_limit=True)] = UNLIMITED
    """Disk space that the home folder may take, like "20 GB". A run that needs more is refused; a peer that takes more pauses."""
    listen: Annotated[str, Setting("HOST", restarts=(NODE,))] = Field(default="0.0.0.0", min_length=1)
    """Address to listen on; 127.0.0.1 accepts connections from this machine only."""
    port: Annotated[int, Setting("N", restarts=(NODE,))] = Field(default=0, ge=0, le=65535)
    """TCP port to listen on; 0 takes any free port. Not set: the port of the last start if it is free, so that old invites still work."""
    announce: Annotated[tuple[str, ...], Setting("MULTIADDR", restarts=(NODE,))] = ()
    """Address where other peers reach this one, like /ip4/203.0.113.7/tcp/4001, in place of the addresses found by listening."""
    relay: Annotated[bool | None, Setting(restarts=(NODE,))] = None
    """Relay streams, within limits, for peers that routers make unreachable. Not set: `peer bootstrap` and the host of a run relay."""
    max_connections: Annotated[int, Setting("N", restarts=(NODE,), is_limit=True)] = Field(default=32, ge=8, le=4096)
    """Connections to other peers at once; more are closed when no call uses them. A peer that relays for others has up to 128."""
    max_upload: Annotated[Rate, Setting("RATE", is_limit=True)] = UNLIMITED
    """Highest rate at which the peer sends, like "5 Mbit/s". Meetings and state transfers count."""
    max_download: Annotated[Rate, Setting("RATE", is_limit=True)] = UNLIMITED
    """Highest average rate at which the peer receives, like "20 Mbit/s". Transfers under way take precedence over new ones."""
    monthly_traffic: Annotated[Size, Setting("SIZE", is_limit=True)] = UNLIMITED
    """Bytes to send and receive in a month, like "200 GB". A peer that has used them pauses and goes offline until the next month."""
    unasked_traffic: Annotated[Size, Setting("SIZE")] = "300 GB"
    """Above this estimate for a month, `peer join` and `peer host` ask once, or, without a terminal, set monthly_traffic to it."""
    least_use: Annotated[float, Setting("SHARE")] = Field(default=LEAST_USE, ge=0, le=1)
    """In a staged run, ask before training if the line feeds a smaller share of the device; without a terminal, leave. 0: never."""
    schedule: Annotated[str, _readable(Schedule.from_text), Setting("WINDOWS", is_limit=True)] = ALWAYS
    """When to train, in local time: "22:00-07:00", "mon-fri 22:00-07:00, sat 00:00-24:00". Outside these windows the peer pauses."""
    only_idle: Annotated[bool, Setting(is_limit=True)] = False
    """Train only while the other processes of the machine leave its processors idle."""
    not_on_battery: Annotated[bool, Setting(is_limit=True)] = False
    """Train only while the machine does not run on battery."""
    pause_when: Annotated[str, _readable(shlex.split), Setting(option=None)] = ""  # no limit that the page may change: it is a command
    """Command that is run once a minute: the peer pauses while it exits with 0, and trains while it exits with 1."""
    pause_above_temperature: Annotated[int, Setting(option=None, is_limit=True)] = Field(default=0, ge=0, le=150)
    """Pause while a GPU or the processor is hotter than so many degrees Celsius, as the driver or the system tells; 0: never."""
    max_gpu_power: Annotated[int, Setting(option=None, is_limit=True)] = Field(default=0, ge=0, le=10_000)
    """Pause while the driver lets a GPU draw more than so many watts. Only root can lower that: `nvidia-smi -pl WATTS`. 0: never."""
    notify: Annotated[str, _readable(_url_or_command), Setting(option=None)] = ""
    """Command or URL that gets a notice: run over, failed, alone for an hour, limit reached, warnings. Its text is the last argument."""
    checkpoint_interval_s: Annotated[Seconds, Setting("TIME", "--checkpoint-every", (TRAINER,), parser=seconds)] = Field(default=60.0, gt=0)
    """Save a checkpoint when this time has passed, like 5min. The option --checkpoint-every also sets checkpoint_interval_steps to 0."""
    checkpoint_interval_steps: Annotated[int, Setting(option=None, restarts=(TRAINER,))] = Field(default=100, ge=0)
    """Save a checkpoint after this many inner steps, or at checkpoint_interval_s if that comes first. 0: by time alone."""

    @property
    def is_unasked(self) -> bool:
        """Whether the operator has neither limited the traffic of a month nor allowed any."""
        return "monthly_traffic" not in self.model_fields_set

    @property
    def limits_in_force(self) -> dict[str, str]:
        """Return the limits that the operator has set, by name, as they were written."""
        return {key: str(getattr(self, key)) for key in LIMITS if getattr(self, key) != LocalSettings.model_fields[key].get_default()}


LIMITS = tuple(name for name in LocalSettings.model_fields if LocalSettings.setting(name).is_limit)


class PeerConfig(LocalSettings):
    """The settings of one start of a peer, checked and frozen."""

    home: Annotated[Path, AfterValidator(_encodable)]
    """The folder with this peer's identity, manifest, checkpoints and events."""
    trains: bool = True
    """Run a trainer; a peer without one is a bootstrap node."""
    alone: Annotated[bool, Setting()] = False
    """Train without meetings, as a baseline for comparison with a swarm."""
    stage: Annotated[int | None, Setting("N")] = Field(default=None, ge=1, le=STAGES)
    """In a staged run, hold this stage, counted from one. Not set: that of the last start, else the one that needs a holder most."""
    wait_for_peers: Annotated[int, Setting("N")] = Field(default=0, ge=0, le=4096)
    """Start training only when this many other peers are known."""
    keep_trying: Annotated[bool, Setting()] = False
    """If no member of the run answers, retry until one does. Default: give up after a minute."""

    @property
    def children(self) -> tuple[str, ...]:
        """Return the child processes of this peer; the peer ends when the first of them ends in order."""
        return ((TRAINER,) if self.trains else ()) + (() if self.alone else (NODE,))


def peer_config(values: Mapping[str, object]) -> PeerConfig:
    """Check local settings. Raises BadSettings that names the first invalid setting, and for an unknown one the nearest name."""
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
        f"setting {name} = {first['input']!r} is not valid: {why[:1].lower()}{why[1:]}", hint=meaning or f"choose another {name}"
    )


def no_such_setting(name: str) -> BadSettings:
    """Return the error for an unknown setting, with the nearest name."""
    near = difflib.get_close_matches(name, LocalSettings.model_fields, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"`peer config` lists the settings, {SETTINGS_PAGE} too"
    return BadSettings(f"there is no setting {name!r}", hint=hint)


# ---------------------------------------------------------------------- the file


def saved_settings(home: Home) -> dict[str, Any]:
    """Return the settings in `config.toml`; empty without the file. Raises BadSettings that names the file."""
    try:
        given = tomllib.loads(home.config.read_text(encoding="utf-8"))
        LocalSettings.model_validate(given)
    except FileNotFoundError:
        return {}
    except ValidationError as error:
        wrong = _as_bad_settings(error)
        raise BadSettings(f"{home.config}: {wrong}", hint=wrong.hint) from error
    except NotADirectoryError as error:
        raise BadSettings(f"the home {home.path} is not a folder", hint=ANOTHER_HOME) from error
    except OSError as error:
        raise BadSettings(f"{home.config} cannot be read: {error.strerror}", hint=ANOTHER_HOME) from error
    except (ValueError, RecursionError) as error:  # of these, TOML's own
        raise BadSettings(
            f"{home.config} cannot be read: {error}", hint="correct the file, or delete it: every setting has a default"
        ) from error
    return given


def with_setting(given: Mapping[str, Any], key: str, text: str | None) -> dict[str, Any]:
    """Return the settings with one changed to `text`; None removes it, so that its default holds. Raises BadSettings."""
    if key not in LocalSettings.model_fields:
        raise no_such_setting(key)
    kept = {name: value for name, value in given.items() if name != key}
    if text is None:
        return kept
    is_list = LocalSettings.model_fields[key].annotation == tuple[str, ...]
    value = tuple(item.strip() for item in text.split(",") if item.strip()) if is_list else text
    try:
        checked = LocalSettings.model_validate({**kept, key: value})
    except ValidationError as error:
        raise _as_bad_settings(error) from error
    return {**kept, key: checked.model_dump(mode="json")[key]}


def save_settings(home: Home, given: Mapping[str, Any]) -> None:
    """Write `config.toml`: every setting with its meaning, commented out if unset. Raises BadSettings if the file cannot be written."""
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
