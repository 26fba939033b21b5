from __future__ import annotations

import json

import pytest

from peer.machine.status import VERSION, Status

DESIGN = {
    "state", "reason", "since", "run_id", "peer_id", "step", "total_steps", "tokens", "loss", "peers_seen", "meetings", "bytes",
    "lane_counts", "version",
}  # fmt: skip


def test_the_keys_of_the_contract_are_there() -> None:
    fields = Status().to_json()
    assert set(fields) >= DESIGN
    assert set(fields["meetings"]) == {"completed", "solo", "refused", "failed"}
    assert set(fields["bytes"]) == {"sent", "received"}
    assert fields["version"] == VERSION
    assert json.loads(json.dumps(fields)) == fields


def test_reports_change_what_they_name() -> None:
    status = Status()
    status.update({"step": 5, "loss": 2.5})
    assert (status.step, status.loss, status.tokens) == (5, 2.5, 0)
    with pytest.raises(AttributeError, match="stpe"):
        status.update({"stpe": 6})


def test_since_moves_with_the_state_only() -> None:
    status = Status()
    assert status.enter("starting", "", 100.0)
    assert status.since == 100.0  # from the very first word
    assert not status.enter("starting", "", 101.0)
    assert status.enter("starting", "building the model", 102.0)
    assert status.since == 100.0
    assert status.enter("training", "", 103.0)
    assert (status.state, status.reason, status.since) == ("training", "", 103.0)
