from __future__ import annotations

import json
import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gossamer.protocol import limits
from gossamer.protocol.errors import BadManifest, BadMessage, BadSignature, GossamerError, PeerMisbehaved, WrongVersion
from gossamer.protocol.identity import Identity
from gossamer.protocol.run.manifest import Manifest, SignedManifest
from gossamer.protocol.wire import peer_pb2
from tests.processor_time import takes_at_most
from tests.protocol.samples import ALICE, BOB, ISSUER, MALLORY

COMMIT = "0123456789abcdef0123456789abcdef01234567"
OTHER = f"""
[run]
name = "caf\u00e9 \U0001f980"
access = "allowlist"
members = ["{ALICE.peer_id}", "{BOB.peer_id}"]
[model]
architecture = "gpt2"
config = {{ n_embd = 64, scale = 1e-5, nested = {{ deep = [1, 2.5, "x"] }}, "odd key" = true }}
[data]
source = "huggingface"
name = "org/set"
revision = "{COMMIT}"
"""
DEMO_RUN_ID = "9a77999010311737a0fbe451cd56d8cb49f00e9c715c3083ed286768e796730b"


def demo() -> Manifest:
    return Manifest().with_host(ISSUER.peer_id)


def test_an_empty_file_is_the_demo_job() -> None:
    assert Manifest.from_toml("") == Manifest()
    assert Manifest().run.name == "demo"


def test_the_run_id_of_the_demo_job_does_not_change_by_accident() -> None:
    assert Manifest().run_id.hex() == DEMO_RUN_ID, "canonical bytes or a default have changed: every existing run gets another id"


@pytest.mark.parametrize(
    "text", ["", OTHER, '[run]\naccess = "open"', f'[model]\nhub = "a/b"\nrevision = "{COMMIT}"', "[model]\nconfig = {}"]
)
def test_a_manifest_survives_round_trips_through_toml_and_canonical_bytes(text: str) -> None:
    manifest = Manifest.from_toml(text)
    assert Manifest.from_toml(manifest.to_toml()) == manifest
    assert Manifest.from_canonical(manifest.canonical_bytes()) == manifest
    assert Manifest.from_toml(manifest.to_toml()).run_id == manifest.run_id


def test_canonical_bytes_are_sorted_json_without_space() -> None:
    canonical = Manifest.from_toml(OTHER).canonical_bytes()
    values = json.loads(canonical)
    assert canonical == json.dumps(values, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode("utf-8")
    assert "caf\u00e9 \U0001f980".encode() in canonical


def test_order_comments_and_written_defaults_do_not_change_the_run() -> None:
    one = Manifest.from_toml("[run]\nseed = 3\nname = 'x'\n[outer]\nalpha = 0.0")
    other = Manifest.from_toml("# comment\n[outer]\n[run]\nname = 'x'\ntotal_steps = 5000\nseed = 3")
    assert one.run_id == other.run_id


def test_an_integer_rate_equals_its_float() -> None:
    assert Manifest.from_toml("[inner]\nclip_norm = 1").run_id == Manifest.from_toml("[inner]\nclip_norm = 1.0").run_id


def test_every_change_changes_the_run_id() -> None:
    texts = ["", "[run]\nseed = 1", "[outer]\nalpha = 0.4", "[codec]\nname = 'fp32'", "[model.config]\nhidden_size = 129"]
    assert len({Manifest.from_toml(text).run_id for text in texts}) == len(texts)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[outer]\ngama = 1", "outer.gama is not a key of a manifest; did you mean outer.gamma?"),
        ("[outr]\n", "outr is not a key of a manifest; did you mean outer?"),
        ("[run]\nzzzz = 1", "run.zzzz is not a key of a manifest; the legal keys are name, protocol, seed"),
        ("run = 3", "run is 3: should be a table"),
        ("[run]\ntotal_steps = 0\nseed = -1", "(and 1 more)"),
        ("[outer]\ninner_steps = 0", 'outer.inner_steps is 0: should be "auto" or a positive whole number'),
        ("[run", "the manifest is not TOML"),
        ("x" * (limits.MANIFEST_BYTES + 1), "at most 65536 are read"),
        ("a = " + "[" * 20_000, "the manifest is not TOML"),
    ],
    ids=lambda value: value[:24],
)
def test_an_invalid_manifest_is_rejected_with_the_reason(text: str, reason: str) -> None:
    with pytest.raises(BadManifest) as caught:
        Manifest.from_toml(text)
    assert reason in str(caught.value)
    assert "peer init" in caught.value.hint
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        "[run]\ntotal_steps = " + "9" * 5000,
        "[run]\nname = " + "[" * 30_000,
        "[run]\nname = " + "{a=" * 15_000,
        "[run]\nname" + ".a" * 30_000 + " = 1",
        "[model.config" + ".a" * 500 + "]\nx = 1",
        "[run" + ".a" * 30_000 + "]",
        "x = {y" + ".a" * 30_000 + " = 1}",
    ],
    ids=["digits", "arrays", "tables", "dotted", "deep", "header", "inline"],
)
def test_a_manifest_that_python_cannot_read_in_time_is_rejected_at_once(text: str) -> None:
    def rejected() -> None:
        with pytest.raises(BadManifest) as caught:
            Manifest.from_toml(text)
        assert caught.value.hint

    assert takes_at_most(1.0, rejected)


def test_another_protocol_version_is_reported_before_unknown_keys() -> None:
    with pytest.raises(WrongVersion, match="version 5, this build uses 1"):
        Manifest.from_toml("[run]\nprotocol = 5\nnew_key = 1")


@pytest.mark.parametrize(
    "canonical",
    [
        b"",
        b"{}",
        b"[]",
        b"null",
        b'{"run":{"seed":NaN}}',
        b"[" * 60_000,
        b'{"run":{"protocol":1,"name":' + b"[" * 990 + b"]" * 990 + b"}}",
        b'{"run":{"protocol":1,"total_steps":' + b"9" * 5000 + b"}}",
        b"\xff",
        Manifest().canonical_bytes().replace(b'"seed":0', b'"seed":0,"seed":0'),
        Manifest().canonical_bytes().replace(b'"seed":0', b'"seed":0.0'),
        Manifest().canonical_bytes().replace(b'"demo"', b'"\\ud800"'),
        b" " * (limits.MANIFEST_BYTES + 1),
    ],
    ids=lambda value: repr(value[:20]),
)
def test_bytes_that_are_no_manifest_are_rejected(canonical: bytes) -> None:
    with pytest.raises(BadManifest):
        Manifest.from_canonical(canonical)


@given(st.binary(max_size=100) | st.text(max_size=100).map(str.encode))
@settings(max_examples=300)
def test_random_bytes_are_rejected(data: bytes) -> None:
    with pytest.raises(BadManifest):
        Manifest.from_canonical(data)


@pytest.mark.parametrize(
    "written",
    [
        Manifest().canonical_bytes().replace(b'"seed":0', b'"seed":0,"shuffle":true'),
        Manifest().canonical_bytes()[:-1] + b',"telemetry":{"every_s":60}}',
        Manifest().canonical_bytes().replace(b'"final_fraction":0.1,', b""),
        Manifest().canonical_bytes().replace(b":", b": ", 1),
    ],
    ids=["a key more", "a table more", "a key less", "another spelling"],
)
def test_a_manifest_of_another_release_is_parsed_and_keeps_its_bytes(written: bytes) -> None:
    """Check that the run id is the hash of the received bytes, and that these bytes are forwarded."""
    read = Manifest.from_canonical(written)
    assert read.canonical_bytes() == written and read.run_id != Manifest().run_id
    assert (read.run, read.model, read.inner) == (Manifest().run, Manifest().model, Manifest().inner)
    signed = SignedManifest.sign(demo(), ISSUER)
    assert SignedManifest.from_bytes(signed.to_bytes(), demo().run_id).manifest() == demo()
    with pytest.raises(BadManifest):
        Manifest.from_toml(read.to_toml().replace("seed = 0", "seed = 0\nshuffle = true"))


MIXED = {"source": "mixture", "mixture": [{"source": "builtin", "weight": 3}, {"source": "text", "column": "input_ids", "weight": 0.5}]}


def test_a_mixture_survives_round_trips_through_toml_and_canonical_bytes() -> None:
    mixed = Manifest.checked({"data": MIXED})
    assert Manifest.from_toml(mixed.to_toml()) == Manifest.from_canonical(mixed.canonical_bytes()) == mixed
    more = mixed.canonical_bytes().replace(b'"weight":0.5', b'"weight":0.5,"until":9')
    assert Manifest.from_canonical(more).data == mixed.data


@pytest.mark.parametrize(
    ("mixture", "reason"),
    [
        ([], 'source = "mixture" requires a list'),
        ([{"source": "builtin", "weight": 0}], "data.mixture.0.weight is 0: should be greater than 0"),
        ([{"source": "builtin"}], "data.mixture.0.weight"),
        (
            [{"source": "builtin", "weight": 1}, {"source": "text", "weight": 5000}],
            "the weight 1 is less than a thousandth of the sum of all",
        ),
        ([{"source": "text", "weight": 1}, {"source": "text", "weight": 1}], "one source may be text"),
        (
            [{"source": "builtin", "weigth": 1, "weight": 1}],
            "data.mixture.0.weigth is not a key of a manifest; did you mean data.mixture.0.weight",
        ),
        ([{"source": "mixture", "weight": 1}], "cannot contain a mixture"),
    ],
)
def test_an_invalid_mixture_is_rejected_with_its_entry(mixture: list[dict[str, object]], reason: str) -> None:
    with pytest.raises(BadManifest, match=reason):
        Manifest.checked({"data": {"source": "mixture", "mixture": mixture}})


def test_the_host_is_added_to_its_own_run() -> None:
    assert demo().run.issuers == (str(ISSUER.peer_id),)
    assert demo().with_host(ISSUER.peer_id) == demo()
    closed = Manifest.from_toml(OTHER)
    assert closed.with_host(ISSUER.peer_id).run.members == (*closed.run.members, str(ISSUER.peer_id))
    assert closed.with_host(ALICE.peer_id) == closed
    public = Manifest.from_toml('[run]\naccess = "open"')
    assert public.with_host(ALICE.peer_id) == public


@pytest.mark.parametrize(("access", "key"), [("invite", "issuers"), ("allowlist", "members")])
def test_a_run_that_no_peer_could_join_is_not_signed(access: str, key: str) -> None:
    with pytest.raises(BadManifest, match=f"run.{key} is empty"):
        SignedManifest.sign(Manifest.from_toml(f'[run]\naccess = "{access}"'), ALICE)


def test_a_full_allow_list_fits() -> None:
    members = [str(Identity(number.to_bytes(2, "big") * 16).peer_id) for number in range(limits.MEMBERS)]
    signed = SignedManifest.sign(Manifest.checked({"run": {"access": "allowlist", "members": members}}), ALICE)
    assert len(signed.to_bytes()) <= limits.MANIFEST_BYTES


def test_a_manifest_too_large_to_send_is_not_signed() -> None:
    with pytest.raises(BadManifest, match="at most 65536"):
        SignedManifest.sign(Manifest.checked({"run": {"access": "open"}, "model": {"config": {"a": "x" * 65_536}}}), ALICE)


def test_a_signed_manifest_survives_a_round_trip() -> None:
    signed = SignedManifest.sign(demo(), ISSUER)
    assert signed.run_id == demo().run_id
    for read in (SignedManifest.from_bytes(signed.to_bytes()), SignedManifest.from_bytes(signed.to_bytes(), signed.run_id)):
        assert read == signed
        assert read.manifest() == demo()


def test_a_received_manifest_needs_the_expected_run_id_and_the_hosts_signature() -> None:
    signed = SignedManifest.sign(demo(), ISSUER)
    other = SignedManifest.sign(demo().with_host(ALICE.peer_id), ISSUER)
    with pytest.raises(BadMessage, match="another run"):
        SignedManifest.from_bytes(other.to_bytes(), signed.run_id)
    for forged in (replace(signed, host=MALLORY.peer_id), replace(signed, signature=bytes(64)), replace(signed, signature=other.signature)):
        with pytest.raises(BadSignature):
            SignedManifest.from_bytes(forged.to_bytes(), signed.run_id)
    with pytest.raises(BadMessage, match="at most"):
        SignedManifest.from_bytes(bytes(limits.MANIFEST_BYTES + 1), signed.run_id)


def test_a_mutated_manifest_raises_an_error_for_its_source() -> None:
    generator, stored = random.Random(2), SignedManifest.sign(demo(), ISSUER).to_bytes()
    for _ in range(2000):
        data = bytearray(stored)
        data[generator.randrange(len(data))] ^= 1 << generator.randrange(8)
        if generator.random() < 0.2:
            del data[generator.randrange(len(data)) :]
        for expect, kind in [(demo().run_id, PeerMisbehaved), (None, BadManifest)]:
            with pytest.raises(kind) as caught:
                SignedManifest.from_bytes(bytes(data), expect)
            assert isinstance(caught.value, GossamerError)


def test_a_signed_manifest_of_another_version_raises_wrong_version() -> None:
    canonical = demo().canonical_bytes().replace(b'"protocol":1', b'"protocol":5')
    wire = peer_pb2.SignedManifest(canonical=canonical, host=ISSUER.peer_id.raw)
    unsigned = SignedManifest(wire.canonical, ISSUER.peer_id, b"")
    with pytest.raises(WrongVersion):
        unsigned.manifest()
