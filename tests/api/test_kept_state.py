"""State dictionaries in a checkpoint: whatever was packed is unpacked, and what cannot be packed is named."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from gossamer.kept_state import pack, unpack
from gossamer.protocol.errors import BadSettings

plain = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text() | st.binary()
keys = st.text(max_size=5) | st.integers()
states = st.recursive(plain, lambda inner: st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(keys, inner), max_leaves=20)


@given(states)
def test_a_state_comes_back_through_json(state: object) -> None:
    tensors: dict[str, Tensor] = {}
    assert unpack(json.loads(json.dumps(pack(state, "state", tensors))), tensors) == state
    assert not tensors


def test_the_states_of_optimizers_come_back_with_their_live_tensors() -> None:
    model = torch.nn.Linear(4, 2)
    for optimizer in (torch.optim.AdamW(model.parameters()), torch.optim.SGD(model.parameters(), momentum=0.9, lr=0.1)):
        model(torch.ones(3, 4)).sum().backward()
        optimizer.step()
        tensors: dict[str, Tensor] = {}
        packed = json.loads(json.dumps(pack(optimizer.state_dict(), "optimizer0", tensors)))
        again = unpack(packed, tensors)
        live = optimizer.state_dict()
        assert again["param_groups"] == live["param_groups"]
        for number, values in live["state"].items():
            for name, value in values.items():
                assert (
                    torch.equal(again["state"][number][name], value) if isinstance(value, Tensor) else again["state"][number][name] == value
                )
        assert all(name.startswith("optimizer0/state/") for name in tensors)


@pytest.mark.parametrize(
    "value",
    [
        object(),
        {"inner": [1, lambda: None]},
        {(1, 2): 3},
        torch.zeros(2, dtype=torch.complex64),
        [torch.zeros(2).to_sparse()],
        torch.zeros(2, device="meta"),
    ],
)
def test_what_a_checkpoint_cannot_keep_is_named(value: Any) -> None:
    with pytest.raises(BadSettings, match="a checkpoint cannot keep loader") as caught:
        pack({"loader": value}["loader"], "loader", {})
    assert "state_dict" in caught.value.hint


def test_keys_that_give_the_same_path_keep_their_own_tensors() -> None:
    state = {1: torch.zeros(2), "1": torch.ones(2), "a/b": torch.full((2,), 2.0), "a": {"b": torch.full((2,), 3.0)}}
    tensors: dict[str, Tensor] = {}
    again = unpack(json.loads(json.dumps(pack(state, "state", tensors))), tensors)
    assert [float(again[1][0]), float(again["1"][0]), float(again["a/b"][0]), float(again["a"]["b"][0])] == [0.0, 1.0, 2.0, 3.0]


def test_what_was_never_packed_is_refused() -> None:
    for packed in ({"code": "1"}, {}, {"value": 1, "list": []}):
        with pytest.raises((KeyError, ValueError)):
            unpack(packed, {})
