"""A statement of one's own part: what the peer reports, under its key, and refused when a single figure is changed."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from gossamer.peer.machine.credit import CONTEXT, SignedCredit
from gossamer.peer.machine.home import Home
from gossamer.peer.machine.status import Status
from gossamer.protocol.identity import Identity, signable
from gossamer.protocol.run.manifest import SignedManifest
from tests.cli.shell import Shell

EARLIER = {
    "joined": 1_700_000_000.0,
    "seconds": 7200.0,
    "train_seconds": 0.0,
    "meetings": 7,
    "sent": 100,
    "received": 50,
    "watt_hours": 12.4,
}


@pytest.fixture
def member(shell: Shell, host: Identity) -> Identity:
    """A peer that has trained and does not run."""
    home = Home(shell.home)
    run_id = SignedManifest.from_bytes(home.manifest.read_bytes()).run_id.hex()
    status = Status(run_id=run_id, peer_id=str(host.peer_id), tokens=51_200, own_steps=100, started=time.time(), earlier=EARLIER)
    home.status.write_text(json.dumps(status.to_json()))
    return host


def statement(shell: Shell, folder: Path) -> Path:
    file = folder / "credit.json"
    file.write_text(shell("credit").out)
    return file


def test_a_statement_holds_the_figures_of_the_status_over_all_starts(shell: Shell, member: Identity, tmp_path: Path) -> None:
    result = shell("credit", "--verify", statement(shell, tmp_path), "--json")
    stated = json.loads(result.out)
    assert (stated["peer_id"], stated["run"], stated["tokens"], stated["own_steps"]) == (str(member.peer_id), "demo", 51_200, 100)
    assert (stated["meetings"], stated["sent_bytes"], stated["seconds"], stated["watt_hours"]) == (7, 100, 7200, 12)
    assert stated["joined_s"] == EARLIER["joined"]
    words = shell("credit", "--verify", tmp_path / "credit.json").out
    assert "51.2 k tokens in 100 steps and 7 meetings" in words and "nobody else has confirmed" in words


def test_one_line_of_json_for_a_program(shell: Shell, member: Identity) -> None:
    signed = SignedCredit.model_validate_json(shell("credit", "--json").out)
    member.peer_id.verify(bytes.fromhex(signed.signature), signed.credit.to_sign())


def test_every_figure_is_under_the_signature(shell: Shell, member: Identity, tmp_path: Path) -> None:
    whole = json.loads(statement(shell, tmp_path).read_text())
    changes = {"run_id": "0" * 64, "run": "other", "peer_id": str(Identity(bytes(32)).peer_id), "unit": "examples"}
    for name in whole["credit"]:
        changed = whole | {"credit": whole["credit"] | {name: changes.get(name, 3)}}
        (file := tmp_path / "changed.json").write_text(json.dumps(changed))
        result = shell("credit", "--verify", file)
        assert result.code == 2 and "was changed after it was signed" in result.complaint[0], name


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "{}", '{"credit": {}, "signature": ""}', "\x00", "x" * 20_000, '{"credit": {"tokens": NaN}, "signature": "00"}']
)
def test_other_files_are_no_statement(shell: Shell, tmp_path: Path, text: str) -> None:
    (file := tmp_path / "file").write_text(text)
    assert "is not a statement" in shell("credit", "--verify", file).complaint[0]


def test_numbers_out_of_range_are_refused_even_if_signed(shell: Shell, member: Identity, tmp_path: Path) -> None:
    whole = json.loads(statement(shell, tmp_path).read_text())
    whole["credit"]["tokens"] = -1
    content = json.dumps(whole["credit"], sort_keys=True, separators=(",", ":")).encode()
    whole["signature"] = member.sign(signable(CONTEXT, content)).hex()
    (file := tmp_path / "signed.json").write_text(json.dumps(whole))
    assert "is not a statement" in shell("credit", "--verify", file).complaint[0]


def test_a_peer_without_a_part_states_nothing(shell: Shell, host: Identity) -> None:
    assert "has no part in its run yet" in shell("credit").complaint[0]
