"""`peer eval` where there is nothing to measure yet; the measuring itself is tested beside peer/model/evaluation.py and in tests/e2e."""

from __future__ import annotations

import json

from gossamer.peer.machine.status import VERSION
from tests.cli.shell import Shell
from tests.peer.trained_homes import tiny_manifest, trained_home


def test_as_many_tokens_are_measured_as_asked_for_and_the_json_says_what_made_it(shell: Shell) -> None:
    trained_home(shell.home, tiny_manifest(), fast_seed=2)
    result = shell("eval", "--tokens", "300", "--json")
    found = json.loads(result.out)
    assert (found["num_tokens"], found["version"]) == (9 * 32, VERSION)
    assert found["command"].startswith("peer")
    assert "100 % of" in result.err  # progress, in a pipe too
