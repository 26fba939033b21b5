"""The manifest: what all peers of a run must agree on. People write it as TOML; its canonical bytes are hashed to the run id.

Canonical bytes are JSON with sorted keys, no white space, every default written out: two builds that read the same manifest get the
same run id, and a default that changes later does not change a run that exists. What is received is hashed and kept as it came, byte for
byte, and read by the keys that this build knows: a key more, or less, makes no run unreadable. A change of meaning raises `run.protocol`.
Signed by its host, so that people know whom they follow; a peer trusts the hash that its invite names.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import tomllib
from dataclasses import dataclass
from typing import Any, Self, get_args

from google.protobuf.message import DecodeError
from pydantic import PrivateAttr, ValidationError
from pydantic_core import ErrorDetails

from gossamer.protocol import limits
from gossamer.protocol.errors import BadContents, BadManifest, BadMessage, PeerMisbehaved, WrongVersion
from gossamer.protocol.identity import Identity, PeerId, signable
from gossamer.protocol.run import sections
from gossamer.protocol.run.sections import Section
from gossamer.protocol.run.toml import write_toml
from gossamer.protocol.wire import peer_pb2

_HINT = "`peer init` writes a manifest with a comment for every key"
_ASK_HOST = "ask the host for a new invite; its manifest cannot be used"
_NOT_A_TABLE = ("dict_type", "model_type")
_TITLE = "A Gossamer manifest: what all peers of a run agree on. Any change makes it another run."


class Manifest(Section):
    """A checked manifest; `Manifest()` is the demo job."""

    run: sections.RunSection = sections.RunSection()
    model: sections.ModelSection = sections.ModelSection()
    tokenizer: sections.TokenizerSection = sections.TokenizerSection()
    data: sections.DataSection = sections.DataSection()
    inner: sections.InnerSection = sections.InnerSection()
    outer: sections.OuterSection = sections.OuterSection()
    fragments: sections.FragmentsSection = sections.FragmentsSection()
    codec: sections.CodecSection = sections.CodecSection()
    _received: bytes | None = PrivateAttr(None)  # as another build wrote it, where that is not what this one writes

    @classmethod
    def from_toml(cls, text: str) -> Self:
        """Read what people write. Raises BadManifest or WrongVersion, naming the key, its value and what would be legal."""
        if len(text) > limits.MANIFEST_BYTES:
            raise BadManifest(f"the manifest has {len(text)} characters; at most {limits.MANIFEST_BYTES} are read", hint=_HINT)
        try:
            given = tomllib.loads(text)
        except (tomllib.TOMLDecodeError, RecursionError) as error:
            raise BadManifest(f"the manifest is not TOML: {error}", hint=_HINT) from None
        return cls.checked(given)

    @classmethod
    def from_canonical(cls, canonical: bytes) -> Self:
        """Read what another peer has hashed and signed, by the keys that this build knows. Raises BadManifest or WrongVersion."""
        if len(canonical) > limits.MANIFEST_BYTES:
            raise BadManifest(f"a manifest of {len(canonical)} bytes; at most {limits.MANIFEST_BYTES} are read", hint=_ASK_HOST)
        try:
            given = json.loads(canonical, object_pairs_hook=_each_key_once)
        except (ValueError, RecursionError):
            raise BadManifest("the manifest is not JSON with each key once", hint=_ASK_HOST) from None
        if not isinstance(given, dict) or not isinstance(run := given.get("run"), dict) or "protocol" not in run:
            raise BadManifest("the manifest does not say which version of the protocol its run speaks", hint=_ASK_HOST)
        manifest = cls.checked(_known_keys(given, cls))
        if manifest.canonical_bytes() != canonical:
            manifest._received = canonical
        return manifest

    @classmethod
    def checked(cls, given: object) -> Self:
        """Check tables of plain values, filling in defaults. Raises BadManifest or WrongVersion."""
        _need_version(given)
        try:
            return cls.model_validate(given)
        except ValidationError as error:
            raise _bad_manifest(error) from None

    def canonical_bytes(self) -> bytes:
        """Return what is hashed and signed: as it was received, or the one encoding of a manifest that is written here."""
        if self._received is not None:
            return self._received
        values = self.model_dump(mode="json")
        return json.dumps(values, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode("utf-8")

    @property
    def run_id(self) -> bytes:
        """Return the name of the run on the wire: 32 bytes."""
        return _run_id(self.canonical_bytes())

    def with_host(self, host: PeerId) -> Self:
        """Return this manifest with its host among those who issue invites, or among the members of an allow list."""
        where = {"invite": "issuers", "allowlist": "members"}.get(self.run.access)
        if where is None or str(host) in getattr(self.run, where):
            return self
        values = self.model_dump()
        values["run"][where] = [*getattr(self.run, where), str(host)]
        return self.checked(values)

    def to_toml(self) -> str:
        """Write the manifest for people, with a comment for every key; `from_toml` reads the same manifest back."""
        return write_toml(_TITLE, self)


@dataclass(frozen=True, slots=True)
class SignedManifest:
    """A manifest as it is stored and sent: at most 64 KiB."""

    canonical: bytes  # canonical JSON
    host: PeerId  # who published it
    signature: bytes  # the host's, over the run id

    @classmethod
    def sign(cls, manifest: Manifest, identity: Identity) -> Self:
        """Publish a manifest. Raises BadManifest when nobody could join it, or it is too large to send."""
        run = manifest.run
        if (run.access == "invite" and not run.issuers) or (run.access == "allowlist" and not run.members):
            key = "issuers" if run.access == "invite" else "members"
            raise BadManifest(
                f'run.{key} is empty, so with access = "{run.access}" nobody may take part', hint=f"list peer ids in run.{key}"
            )
        canonical = manifest.canonical_bytes()
        signed = cls(canonical, identity.peer_id, identity.sign(_signed_bytes(manifest.run_id, identity.peer_id)))
        if len(signed.to_bytes()) > limits.MANIFEST_BYTES:
            raise BadManifest(f"the manifest has {len(canonical)} bytes, more than the {limits.MANIFEST_BYTES} that peers read", hint=_HINT)
        return signed

    @property
    def run_id(self) -> bytes:
        """Return the hash of the canonical bytes: 32 bytes."""
        return _run_id(self.canonical)

    def manifest(self) -> Manifest:
        """Return the checked content. Raises BadManifest or WrongVersion."""
        return Manifest.from_canonical(self.canonical)

    def to_bytes(self) -> bytes:
        """Return what is stored and sent."""
        wire = peer_pb2.SignedManifest(canonical=self.canonical, host=self.host.raw, signature=self.signature)
        return wire.SerializeToString()

    @classmethod
    def from_bytes(cls, data: bytes, expect: bytes | None = None) -> Self:
        """Read a signed manifest and check its host's signature; what it says is checked by `manifest()`.

        `expect` is the run id that a stranger's answer must have: raises BadContents or BadSignature, for another peer may do better.
        Without it, the bytes are this peer's own file: raises BadManifest.
        """
        try:
            signed = cls._parsed(data)
            if expect not in (None, signed.run_id):
                raise BadContents("the manifest of another run")
            signed.host.verify(signed.signature, _signed_bytes(signed.run_id, signed.host))
        except PeerMisbehaved as error:
            if expect is None:
                raise BadManifest(
                    f"the stored manifest is damaged: {error}", hint="remove it and join the run again with its invite"
                ) from None
            raise
        return signed

    @classmethod
    def _parsed(cls, data: bytes) -> Self:
        if len(data) > limits.MANIFEST_BYTES:
            raise BadContents(f"a manifest of {len(data)} bytes; at most {limits.MANIFEST_BYTES} are read")
        wire = peer_pb2.SignedManifest()
        try:
            wire.ParseFromString(data)
            return cls(wire.canonical, PeerId(wire.host), wire.signature)
        except (DecodeError, BadMessage):
            raise BadContents("not a signed manifest") from None


def _each_key_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(dict(pairs)) < len(pairs):
        raise ValueError("a key that occurs twice")
    return dict(pairs)


def _known_keys(given: dict[str, Any], section: type[Section]) -> dict[str, Any]:
    """Leave out the keys that this build does not know: within one version of the protocol they change nothing that it does."""
    return {key: _known_part(field.annotation, given[key]) for key, field in section.model_fields.items() if key in given}


def _known_part(annotation: object, value: Any) -> Any:
    inner = _section_of(annotation)
    if inner is not None and isinstance(value, dict):
        return _known_keys(value, inner)
    if inner is not None and isinstance(value, list):
        return [_known_part(inner, item) for item in value]
    return value


def _section_of(annotation: object) -> type[Section] | None:
    """Return the section that a key holds one of, or several; None for a key with a plain value."""
    kinds = [annotation, *get_args(annotation)]
    return next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Section)), None)


def _run_id(canonical: bytes) -> bytes:
    return hashlib.sha256(b"gossamer/manifest/1\n" + canonical).digest()


def _signed_bytes(run_id: bytes, host: PeerId) -> bytes:
    return signable(b"gossamer/signed-manifest/1", run_id, host.raw)


def _need_version(given: object) -> None:
    run = given.get("run") if isinstance(given, dict) else None
    version = run.get("protocol", limits.PROTOCOL_VERSION) if isinstance(run, dict) else limits.PROTOCOL_VERSION
    if isinstance(version, int) and version not in limits.SPOKEN:
        raise WrongVersion(
            f"the run speaks protocol version {version}, this build speaks {limits.PROTOCOL_VERSION}",
            hint="install the release of Gossamer that the run's host uses",
        )


def _bad_manifest(error: ValidationError) -> BadManifest:
    # A default that could not be computed is the shadow of another fault.
    faults = [fault for fault in error.errors() if fault["type"] != "default_factory_not_called"]
    more = f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""
    return BadManifest(_sentence(faults[0]) + more, hint=_HINT)


def _sentence(fault: ErrorDetails) -> str:
    where = ".".join(str(part) for part in fault["loc"]) or "the manifest"
    if fault["type"] == "extra_forbidden":
        return _unknown_key(fault["loc"])
    says = "should be a table" if fault["type"] in _NOT_A_TABLE else fault["msg"].removeprefix("Value error, ").removeprefix("Input ")
    value = fault["input"]
    return f"{where}: {says}" if isinstance(value, dict) else f"{where} is {_shown(value)}: {says}"


def _unknown_key(loc: tuple[int | str, ...]) -> str:
    section: type[Section] = Manifest
    for part in loc[:-1]:
        if isinstance(part, str):  # else the number of one of several
            inner = _section_of(section.model_fields[part].annotation)
            assert inner is not None
            section = inner
    path, key, known = ".".join(str(part) for part in loc), str(loc[-1]), list(section.model_fields)
    nearest = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    legal = f"did you mean {'.'.join([*map(str, loc[:-1]), nearest[0]])}?" if nearest else f"legal here are {', '.join(known)}"
    return f"{path} is not a key of a manifest; {legal}"


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 60 else text[:57] + "..."
