"""Two real peers hold two stages of one model: they train it together, and one waits while the other is gone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gossamer.cli.local_swarm import LocalPeer, LocalSwarm
from tests.peer.family import everybody, gone
from tests.peer.waiting import wait_until

LOCAL = ("--listen", "127.0.0.1", "--threads", "1", "--devices", "cpu")
MANIFEST = """
[run]
total_steps = 100000
[model.config]
hidden_size = 64
intermediate_size = 172
num_hidden_layers = 4
num_attention_heads = 4
num_key_value_heads = 4
vocab_size = 256
max_position_embeddings = 128
tie_word_embeddings = false
[inner]
sequence_length = 32
"""


def status(peer: LocalPeer) -> dict[str, Any]:
    peer.refresh()
    return peer.status


def hops(peer: LocalPeer, outcome: str) -> int:
    return int(status(peer).get("hops", {}).get("outcomes", {}).get(outcome, 0))


@pytest.mark.timeout(400)
def test_two_holders_train_a_model_of_two_stages_and_one_of_them_may_be_killed(swarm: LocalSwarm, tmp_path: Path) -> None:
    manifest = tmp_path / "run.toml"
    manifest.write_text(MANIFEST)
    first = swarm.start("first", ["host", str(manifest), "--stages", "2", *LOCAL])
    second = swarm.start("second", ["join", first.invite(), *LOCAL])
    wait_until(lambda: hops(first, "trained") > 8 and hops(second, "answered") > 8, "micro-batches through both stages", 150)
    assert (status(first)["stage"], status(second)["stage"]) == ("1 of 2", "2 of 2")
    wait_until(lambda: status(first)["loss"] and status(second)["loss"], "loss on both sides", 30)

    killed, *orphans = everybody(second.home)
    killed.kill()
    assert gone(orphans, 10), "something of the killed holder lives on"
    second.kill()
    swarm.peers.remove(second)
    wait_until(lambda: status(first)["state"] == "waiting", "word of the missing stage", 30)
    assert "stage 2 of 2" in first.status["reason"] and "a peer that held it starts again" in first.status["way_out"]
    wait_until(lambda: not status(first)["hops"]["lanes_above"], "report without a lane", 30)

    back = swarm.start("second", ["join", *LOCAL])
    wait_until(lambda: hops(back, "answered") > 4, "micro-batches through the holder that is back", 150)
    assert status(back)["stage"] == "2 of 2"
    wait_until(lambda: status(first)["state"] == "training", "training again", 60)
