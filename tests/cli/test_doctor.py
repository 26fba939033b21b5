"""`peer doctor`: everything at once, as one object or as lines; it finds several faults in one go, and leaves nothing behind."""

from __future__ import annotations

import gc
import json

import pytest

from gossamer.cli.doctor import show
from gossamer.peer.doctor.examination import CHECKS
from gossamer.peer.doctor.finding import ok, warn
from tests.cli.shell import Shell
from tests.peer.doctor.cases import HOUR_S, invite_text


def test_several_faults_are_found_at_once(shell: Shell, busy_port: int) -> None:
    text = invite_text(lifetime_s=-HOUR_S, at="/ip4/127.0.0.1/tcp/1")
    result = shell("doctor", text, "--json", "--devices", "cuda:63", "--listen", "127.0.0.1", "--port", str(busy_port))
    gc.collect()  # gRPC's thread ends with its last object
    answer = json.loads(result.out)
    levels = {check["check"]: check["level"] for check in answer["checks"]}
    assert len(levels) == len(CHECKS)
    assert {name for name, level in levels.items() if level == "fail"} >= {"device", "port", "invite", "bootstraps"}
    assert all(check["way_out"] for check in answer["checks"] if check["level"] not in ("ok", "skip"))
    assert result.code == answer["exit_code"] == 2
    assert not shell.home.exists()


def test_text_output_has_one_line_for_each_check(capsys: pytest.CaptureFixture[str]) -> None:
    show("home", ok("it is there"))
    show("invite", warn("it ends soon", "ask for another"))
    assert capsys.readouterr().out.splitlines() == [
        "ok    home           it is there",
        "warn  invite         it ends soon",
        "                     -> ask for another",
    ]
