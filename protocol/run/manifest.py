"""The manifest: the configuration that all peers of a run share, as TOML; the hash of its canonical bytes is the run id.

A text run trains a language model of transformers on text, or an adapter of one, or on answers alone. With a table [stages] it is a staged
run, whose model is cut. With a table [program] it is a program run, which trains the tensors of a program that each member starts. The
canonical bytes are JSON with sorted keys and every default, so a default that changes later does not change an existing run. A received
manifest is stored byte for byte; unknown keys are ignored, missing keys take their default. A change of meaning raises `run.protocol`.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import tomllib
from dataclasses import dataclass
from typing import Any, ClassVar, Final, Self, cast, get_args

from google.protobuf.message import DecodeError
from pydantic import PrivateAttr, ValidationError, model_validator
from pydantic_core import ErrorDetails

from gossamer.protocol import limits
from gossamer.protocol.errors import BadManifest, BadMessage, PeerMisbehaved, WrongVersion, printable
from gossamer.protocol.identity import Identity, PeerId, signable
from gossamer.protocol.run import sections, staged
from gossamer.protocol.run.sections import Section
from gossamer.protocol.run.toml import write_toml
from gossamer.protocol.wire import peer_pb2

_OWN_PROGRAM = "the program itself hosts its run or joins it with the invite"
_ASK_HOST = "ask the host for a new invite: the manifest of this one cannot be used"
_NOT_A_TABLE = ("dict_type", "model_type")
_TITLE = "A Gossamer manifest: the configuration that all peers of a run share. Any change makes it another run."
_ORDER: Final = ("run", "program", "model", "stages", "tokenizer", "data", "inner", "outer", "fragments", "codec")  # of the tables in TOML


class RunManifest(Section):
    """What every manifest states: a `Manifest` of a text run, or a `ProgramManifest`."""

    run: sections.RunSection = sections.RunSection()
    outer: sections.OuterSection = sections.OuterSection()
    fragments: sections.FragmentsSection = sections.FragmentsSection()
    codec: sections.CodecSection = sections.CodecSection()
    KIND: ClassVar[str]  # of its run, in a word
    HINT: ClassVar[str]  # of its errors
    _received: bytes | None = PrivateAttr(None)  # received canonical bytes, if this build would write others

    @classmethod
    def from_toml(cls, text: str) -> Self:
        """Parse a TOML manifest. Raises BadManifest or WrongVersion with the key, its value and the legal values."""
        if len(text) > limits.MANIFEST_BYTES:
            raise BadManifest(f"the manifest has {len(text)} characters; at most {limits.MANIFEST_BYTES} are read", hint=cls.HINT)
        if any(line.count(".") > limits.MANIFEST_LINE_DOTS for line in text.split("\n")):
            raise BadManifest(f"the manifest has a line with more than {limits.MANIFEST_LINE_DOTS} dots", hint=cls.HINT)
        try:
            given = tomllib.loads(text)
        except (ValueError, RecursionError) as error:  # ValueError: TOML's own, and of an integer with too many digits
            raise BadManifest(f"the manifest is not TOML: {error}", hint=cls.HINT) from None
        return cls.checked(given)

    @classmethod
    def from_canonical(cls, canonical: bytes) -> Self:
        """Parse the canonical bytes of another peer, ignoring unknown keys. Raises BadManifest or WrongVersion."""
        tables = _tables(canonical)
        manifest = cls.checked(_known_keys(tables, _kind(tables)))
        if manifest.canonical_bytes() != canonical:
            manifest._received = canonical
        return manifest

    @classmethod
    def checked(cls, given: object) -> Self:
        """Validate tables of plain values, by the kind of their run, and fill in defaults. Raises BadManifest or WrongVersion."""
        _need_version(given)
        kind = _kind(given)
        if not issubclass(kind, cls):
            hint = _OWN_PROGRAM if kind is ProgramManifest else cls.HINT
            raise BadManifest(f"this is the manifest of a {kind.KIND} run, and a {cls.KIND} run is wanted", hint=hint)
        try:
            return kind.model_validate(given)
        except ValidationError as error:
            raise BadManifest(_reason(error, kind), hint=kind.HINT) from None
        except RecursionError:
            raise BadManifest("the manifest nests too deeply", hint=kind.HINT) from None

    def canonical_bytes(self) -> bytes:
        """Return the bytes that are hashed and signed: as received, or this build's canonical encoding."""
        if self._received is not None:
            return self._received
        values = self.model_dump(mode="json")
        return json.dumps(values, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode("utf-8")

    @property
    def run_id(self) -> bytes:
        """Return the run id: the SHA-256 of the canonical bytes with a prefix."""
        return _run_id(self.canonical_bytes())

    @property
    def num_stages(self) -> int:
        """Return into how many stages the model is cut; 1: every peer holds the whole model."""
        return 1

    def with_host(self, host: PeerId) -> Self:
        """Return this manifest with its host added to the issuers (access = "invite") or to the members (access = "allowlist")."""
        where = {"invite": "issuers", "allowlist": "members"}.get(self.run.access)
        if where is None or str(host) in getattr(self.run, where):
            return self
        values = self.model_dump()
        values["run"][where] = [*getattr(self.run, where), str(host)]
        return self.checked(values)

    def to_toml(self) -> str:
        """Return the manifest as TOML with a comment for every key. `from_toml` parses it to an equal manifest."""
        tables = dict(self)
        return write_toml(_TITLE, {name: tables[name] for name in _ORDER if name in tables})


class Manifest(RunManifest):
    """The validated manifest of a text run. `Manifest()` is the demo job."""

    model: sections.ModelSection = sections.ModelSection()
    tokenizer: sections.TokenizerSection = sections.TokenizerSection()
    data: sections.DataSection = sections.DataSection()
    inner: sections.InnerSection = sections.InnerSection()
    KIND: ClassVar[str] = "text"
    HINT: ClassVar[str] = "`peer init` writes a manifest with a comment for every key"

    @property
    def unit(self) -> str:
        """Return what the peers' training is counted in."""
        return "tokens"

    @property
    def program_words(self) -> str:
        """Return the name, source and revision of the run's program: of a text run, nothing."""
        return ""

    @property
    def is_fine_tuning(self) -> bool:
        """Return whether an adapter trains in place of all weights, or answers in place of all tokens."""
        return self.model.has_adapter or self.data.has_prompts

    @property
    def step_tokens(self) -> int:
        """Return the tokens of each inner step, the same for all members; 0: each member decides."""
        return self.inner.batch_size * self.inner.sequence_length

    def has_start(self, *, is_founder: bool) -> bool:
        """Return whether a peer has the initial weights without a copy: then they follow from the run's seed."""
        return self.model.weights is None


class StagedManifest(Manifest):
    """The validated manifest of a staged run: a text run in which each peer holds one stage of the model."""

    run: staged.StagedRunSection = staged.StagedRunSection()
    model: staged.StagedModelSection = staged.StagedModelSection()
    stages: staged.StagesSection
    KIND: ClassVar[str] = "staged"

    @property
    def num_stages(self) -> int:
        """Return into how many stages the model is cut."""
        return self.stages.count

    @model_validator(mode="after")
    def _need_whole_batches_of_text(self) -> Self:
        rows, batch = self.stages.micro_batch, self.inner.batch_size
        if batch % rows:
            raise ValueError(f"inner.batch_size is {batch}, not a multiple of stages.micro_batch, {rows}: choose numbers that divide")
        if self.is_fine_tuning:
            raise ValueError('a staged run trains all weights on all tokens: leave out lora_rank, and set data.format = "text"')
        return self


class ProgramManifest(RunManifest):
    """The validated manifest of a program run: each member starts the program on its own, and peers exchange its tensors.

    It has neither text nor an inner optimizer, which are the program's affair.
    """

    program: sections.ProgramSection
    model: sections.ProgramModelSection
    KIND: ClassVar[str] = "program"
    HINT: ClassVar[str] = "the program makes its manifest from a gossamer.Run"

    @property
    def unit(self) -> str:
        """Return what the peers' training is counted in."""
        return self.program.unit

    @property
    def program_words(self) -> str:
        """Return the name, source and revision of the run's program, as far as they are stated."""
        program = self.program
        known = (f"{key} {value}" for key, value in (("source", program.source), ("revision", program.revision)) if value)
        return ", ".join([program.name, *known])

    @property
    def step_tokens(self) -> int:
        """Return the tokens of each inner step, the same for all members; 0: each member decides."""
        return 0

    def has_start(self, *, is_founder: bool) -> bool:
        """Return whether a peer has the initial weights: those with which the program of the run's founder begins count."""
        return is_founder


AnyManifest = Manifest | ProgramManifest


def need_text(manifest: AnyManifest, hint: str = "start that program with this invite") -> Manifest:
    """Return the manifest of a text run. Raises BadManifest, with the program's name and this hint, for a program run."""
    if isinstance(manifest, ProgramManifest):
        raise BadManifest(f"this run trains a program of its members: {manifest.program_words}", hint=hint)
    return manifest


@dataclass(frozen=True, slots=True)
class SignedManifest:
    """A manifest as stored and sent: at most 64 KiB."""

    canonical: bytes  # canonical JSON
    host: PeerId  # the publisher
    signature: bytes  # the host's, over the run id

    @classmethod
    def sign(cls, manifest: RunManifest, identity: Identity) -> Self:
        """Sign a manifest for publication. Raises BadManifest if no peer could join the run, or if it is too large to send."""
        run = manifest.run
        if (run.access == "invite" and not run.issuers) or (run.access == "allowlist" and not run.members):
            key = "issuers" if run.access == "invite" else "members"
            raise BadManifest(f'run.{key} is empty, so no peer could join with access = "{run.access}"', hint=f"list peer ids in run.{key}")
        canonical = manifest.canonical_bytes()
        signed = cls(canonical, identity.peer_id, identity.sign(_signed_bytes(manifest.run_id, identity.peer_id)))
        if len(signed.to_bytes()) > limits.MANIFEST_BYTES:
            raise BadManifest(f"the manifest has {len(canonical)} bytes; peers accept at most {limits.MANIFEST_BYTES}", hint=manifest.HINT)
        return signed

    @property
    def run_id(self) -> bytes:
        """Return the run id of the canonical bytes: 32 bytes."""
        return _run_id(self.canonical)

    def manifest(self) -> AnyManifest:
        """Parse and validate the manifest. Raises BadManifest or WrongVersion."""
        return cast(AnyManifest, RunManifest.from_canonical(self.canonical))

    def to_bytes(self) -> bytes:
        """Return the encoded signed manifest."""
        return peer_pb2.SignedManifest(canonical=self.canonical, host=self.host.raw, signature=self.signature).SerializeToString()

    @classmethod
    def from_bytes(cls, data: bytes, expect: bytes | None = None) -> Self:
        """Parse a signed manifest and verify its host's signature. `manifest()` validates the content.

        With `expect`, the bytes come from another peer and must have this run id: raises BadMessage or BadSignature, so the caller may try
        another peer. Without it, the bytes come from this peer's own file: raises BadManifest.
        """
        try:
            signed = cls._parsed(data)
            if expect not in (None, signed.run_id):
                raise BadMessage("the manifest of another run")
            signed.host.verify(signed.signature, _signed_bytes(signed.run_id, signed.host))
        except PeerMisbehaved as error:
            if expect is None:
                raise BadManifest(
                    f"the stored manifest is damaged: {error}", hint="delete it and join the run again with its invite"
                ) from None
            raise
        return signed

    @classmethod
    def _parsed(cls, data: bytes) -> Self:
        if len(data) > limits.MANIFEST_BYTES:
            raise BadMessage(f"a manifest of {len(data)} bytes; at most {limits.MANIFEST_BYTES} are read")
        wire = peer_pb2.SignedManifest()
        try:
            wire.ParseFromString(data)
            return cls(wire.canonical, PeerId(wire.host), wire.signature)
        except (DecodeError, BadMessage):
            raise BadMessage("not a signed manifest") from None


def _tables(canonical: bytes) -> dict[str, Any]:
    """Parse canonical bytes. Raises BadManifest unless they are tables that state their protocol version."""
    if len(canonical) > limits.MANIFEST_BYTES:
        raise BadManifest(f"a manifest of {len(canonical)} bytes; at most {limits.MANIFEST_BYTES} are read", hint=_ASK_HOST)
    try:
        given = json.loads(canonical, object_pairs_hook=_each_key_once)
    except (ValueError, RecursionError):
        raise BadManifest("the manifest is not JSON, or repeats a key", hint=_ASK_HOST) from None
    if not isinstance(given, dict) or not isinstance(run := given.get("run"), dict) or "protocol" not in run:
        raise BadManifest("the manifest does not state its protocol version (run.protocol)", hint=_ASK_HOST)
    return given


def _each_key_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(dict(pairs)) < len(pairs):
        raise ValueError("a repeated key")
    return dict(pairs)


def _known_keys(given: dict[str, Any], section: type[Section]) -> dict[str, Any]:
    """Drop unknown keys: within one protocol version they do not affect this build."""
    return {key: _known_part(field.annotation, given[key]) for key, field in section.model_fields.items() if key in given}


def _known_part(annotation: object, value: Any) -> Any:
    inner = _section_of(annotation)
    if inner is not None and isinstance(value, dict):
        return _known_keys(value, inner)
    if inner is not None and isinstance(value, list):
        return [_known_part(inner, item) for item in value]
    return value


def _section_of(annotation: object) -> type[Section] | None:
    """Return the section type of a key that holds one or several sections; None for a key with a plain value."""
    kinds = [annotation, *get_args(annotation)]
    return next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Section)), None)


def _run_id(canonical: bytes) -> bytes:
    return hashlib.sha256(b"gossamer/manifest/1\n" + canonical).digest()


def _signed_bytes(run_id: bytes, host: PeerId) -> bytes:
    return signable(b"gossamer/signed-manifest/1", run_id, host.raw)


def _kind(given: object) -> type[AnyManifest]:
    """Return which kind of run tables are of, by the table that only such runs have."""
    tables = given if isinstance(given, dict) else {}
    return ProgramManifest if "program" in tables else StagedManifest if "stages" in tables else Manifest


def _need_version(given: object) -> None:
    run = given.get("run") if isinstance(given, dict) else None
    version = run.get("protocol") if isinstance(run, dict) else None
    if isinstance(version, int) and version != limits.PROTOCOL:
        raise WrongVersion(
            f"the run uses protocol version {version}, this build uses {limits.PROTOCOL}",
            hint="install the release of Gossamer that the run's host uses",
        )


def _reason(error: ValidationError, kind: type[Section]) -> str:
    # A default that could not be computed is a consequence of another fault.
    faults = [fault for fault in error.errors() if fault["type"] != "default_factory_not_called"]
    faults.sort(key=lambda fault: fault["type"] == "missing")  # behind unknown keys: one of these may be it, mistyped
    more = f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""
    return printable(_message(faults[0], kind)) + more


def _message(fault: ErrorDetails, kind: type[Section]) -> str:
    where = ".".join(str(part) for part in fault["loc"]) or "the manifest"
    if fault["type"] == "extra_forbidden":
        return _unknown_key(fault["loc"], kind)
    reason = "should be a table" if fault["type"] in _NOT_A_TABLE else fault["msg"].removeprefix("Value error, ").removeprefix("Input ")
    value = fault["input"]
    return f"{where}: {reason}" if isinstance(value, dict) else f"{where} is {_abbreviate(value)}: {reason}"


def _unknown_key(loc: tuple[int | str, ...], section: type[Section]) -> str:
    for part in loc[:-1]:
        if isinstance(part, str):  # not an index into a list of sections
            inner = _section_of(section.model_fields[part].annotation)
            assert inner is not None
            section = inner
    path, key, known = ".".join(str(part) for part in loc), str(loc[-1]), list(section.model_fields)
    nearest = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    legal = f"did you mean {'.'.join([*map(str, loc[:-1]), nearest[0]])}?" if nearest else f"the legal keys are {', '.join(known)}"
    return f"{path} is not a key of a manifest; {legal}"


def _abbreviate(value: Any) -> str:
    try:
        text = json.dumps(value, ensure_ascii=False, default=str)
    except RecursionError:
        return "nested too deeply"
    return text if len(text) <= 60 else text[:57] + "..."
