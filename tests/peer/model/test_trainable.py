"""What peers exchange of a program's model, and what they must share besides."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from gossamer.peer.model import trainable
from gossamer.peer.model.trainable import base_digest, need_model_of, shapes_of, trainable_tensors, weights_digest
from gossamer.protocol.errors import BadSettings
from gossamer.protocol.run.layout import Shapes, by_name, layout_digest
from gossamer.protocol.run.manifest import ProgramManifest


class Net(nn.Module):
    """A small model with a batch norm, whose weight of the head is tied."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.head = nn.Linear(4, 4)
        self.again = nn.Linear(4, 4)
        self.again.weight = self.head.weight
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.register_buffer("grid", torch.ones(5), persistent=False)


class Wrapper(nn.Module):
    """Wraps a model under the name that DDP gives it."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


def frozen(model: nn.Module, *names: str) -> nn.Module:
    for name in names:
        model.get_parameter(name).requires_grad_(False)
    return model


def fault(model: nn.Module | dict[str, Tensor]) -> BadSettings:
    with pytest.raises(BadSettings) as caught:
        trainable_tensors(model)
    assert caught.value.hint
    return caught.value


def manifest(shapes: Shapes, base: str | None = None, *, with_shapes: bool = True) -> ProgramManifest:
    model = {"layout": layout_digest(by_name(shapes)), "shapes": dict(shapes) if with_shapes else None}
    return ProgramManifest.checked({"program": {"name": "net", "base": base}, "model": model})


def test_parameters_and_statistics_travel_by_name_tied_ones_once() -> None:
    model = Net()
    tensors = trainable_tensors(model)
    names = "again.bias again.weight head.bias norm.bias norm.weight scale"
    names += " statistics/norm.running_mean statistics/norm.running_var stem.bias stem.weight"
    assert " ".join(tensors) == names, "neither the count of batches nor what is not part of the state"
    assert tensors["again.weight"] is model.head.weight and tensors["scale"].shape == ()


def test_frozen_parameters_stay_at_home() -> None:
    assert "stem.weight" not in trainable_tensors(frozen(Net(), "stem.weight"))
    assert {*trainable_tensors(Net())} - {*trainable_tensors(frozen(Net(), "head.weight"))} == {"again.weight"}


WRAPPINGS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "compiled": lambda model: torch.compile(model, backend="eager"),  # type: ignore[return-value]
    "data parallel": Wrapper,
    "both": lambda model: torch.compile(Wrapper(model), backend="eager"),  # type: ignore[return-value]
    "a part compiled": lambda model: model if setattr(model, "stem", torch.compile(model.stem, backend="eager")) is None else model,
    "recomputed": lambda model: model if setattr(model, "head", checkpoint_wrapper(model.head)) is None else model,
}


@pytest.mark.parametrize("how", WRAPPINGS)
def test_names_and_tensors_are_those_of_the_bare_model(how: str) -> None:
    model = Net()
    bare, base = trainable_tensors(model), base_digest(frozen(model, "again.bias"))
    model.again.bias.requires_grad_(True)
    wrapped = WRAPPINGS[how](model)
    assert trainable_tensors(wrapped).keys() == bare.keys()
    assert all(tensor is bare[name] for name, tensor in trainable_tensors(wrapped).items())
    model.again.bias.requires_grad_(False)
    assert base_digest(wrapped) == base != ""


def test_tied_weights_travel_once_also_where_a_state_dict_gives_each_a_tensor() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    assert list(trainable_tensors(model.state_dict())) == list(trainable_tensors(model)) == ["0.bias", "0.weight", "1.bias"]
    model[1].weight = nn.Parameter(model[0].weight.data)
    assert list(trainable_tensors(model)) == ["0.bias", "0.weight", "1.bias"]


def test_tensors_that_overlap_in_part_are_refused_and_parts_of_one_tensor_are_not() -> None:
    whole = torch.zeros(6, 4)
    assert "a and b share some of their values" in str(fault({"a": whole[:4], "b": whole[3:]}))
    assert "whole and rows share" in str(fault({"whole": whole, "rows": whole[2:3]}))
    assert len(trainable_tensors({"a": whole[:3], "b": whole[3:]})) == 2
    assert len(trainable_tensors({"left": whole[:, :2], "right": whole[:, 2:]})) == 2


def test_a_mapping_gives_names_of_its_own_in_any_order() -> None:
    one, other = torch.zeros(3), torch.zeros(2, 2)
    assert [*trainable_tensors({"b": other, "a": one})] == ["a", "b"]
    assert trainable_tensors({"b": one, "a": one}) == {"a": one}, "tied"
    assert [*trainable_tensors({"generator.module.w": one, "module": other})] == ["generator.w", "module"]


@pytest.mark.parametrize(
    ("tensor", "reason", "hint"),
    [
        (torch.zeros(3, dtype=torch.bfloat16), "moves bf16 weights by 0.1 % of their size loses 80 % of it", "torch.autocast"),
        (torch.zeros(3, dtype=torch.float16), "w is torch.float16, too coarse", "master weights"),
        (torch.zeros(3, dtype=torch.float64), "w is torch.float64; peers average f32", "float32"),
        (torch.zeros(3, dtype=torch.int64), "w is torch.int64; peers average f32", "by name"),
        (torch.zeros(3, device="meta"), "meta device", "load the weights"),
        (torch.zeros(3).to_sparse(), "sparse", "to_dense"),
        (torch.zeros(0, 3), "no values", "leave it out"),
    ],
    ids=str,
)
def test_tensors_that_no_meeting_can_move_are_refused_with_the_reason(tensor: Tensor, reason: str, hint: str) -> None:
    error = fault({"fine": torch.zeros(2), "w": tensor})
    assert reason in str(error) and hint in error.hint
    if tensor.is_floating_point():
        model = nn.Linear(1, 1)
        model.w = nn.Parameter(tensor)
        assert reason in str(fault(model))


def test_a_model_in_bf16_says_what_would_be_lost() -> None:
    assert "again.bias is torch.bfloat16" in str(fault(Net().bfloat16()))


@pytest.mark.parametrize("model", [{}, frozen(nn.Linear(2, 2), "weight", "bias"), nn.ReLU()], ids=["mapping", "frozen", "empty"])
def test_nothing_to_train_is_refused(model: nn.Module | dict[str, Tensor]) -> None:
    assert "nothing to train" in str(fault(model))


def test_two_tensors_of_one_name_are_refused() -> None:
    assert "two tensors are named a.b" in str(fault({"a.b": torch.zeros(1), "module.a.b": torch.zeros(1)}))


@pytest.mark.parametrize("name", ["", "a\nb", "x" * 201])
def test_a_name_that_cannot_be_shown_is_refused(name: str) -> None:
    assert "is no name of a tensor" in str(fault({name: torch.zeros(1)}))


def test_what_is_no_tensor_is_refused() -> None:
    assert "lr is float" in str(fault({"lr": 0.1}))  # type: ignore[dict-item]


def test_the_base_is_known_by_names_shapes_types_and_bytes() -> None:
    model = frozen(nn.Linear(2, 2), "weight")
    expected = hashlib.sha256(b'["weight", "torch.float32", 2, 2]' + model.weight.detach().numpy().tobytes()).hexdigest()
    assert base_digest(model) == expected
    assert base_digest(model.bfloat16()) != expected
    assert base_digest(nn.Linear(2, 2)) == base_digest({"weight": torch.zeros(2)}) == ""
    with torch.no_grad():
        changed = frozen(nn.Linear(2, 2), "weight")
        changed.weight.copy_(model.float().weight).view(-1)[3] += 1
    assert base_digest(changed) != base_digest(model)


@pytest.mark.parametrize(
    "values",
    [torch.randn(70, 30).T, torch.randn(4, 3, 5, 5).contiguous(memory_format=torch.channels_last), torch.tensor(2.5), torch.arange(999.0)],
    ids=["transposed", "channels last", "scalar", "vector"],
)
def test_a_base_of_any_strides_is_read_in_pieces(values: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    def digest() -> str:
        model = nn.Module()
        model.w = nn.Parameter(values, requires_grad=False)
        return base_digest(model)

    whole = digest()
    monkeypatch.setattr(trainable, "PIECE_BYTES", 37)
    assert digest() == whole
    model = nn.Module()
    model.w = nn.Parameter(values.contiguous(), requires_grad=False)
    assert base_digest(model) == whole


def test_a_base_on_the_meta_device_is_refused() -> None:
    with pytest.raises(BadSettings, match="meta device"):
        base_digest(frozen(nn.Linear(2, 2, device="meta"), "weight"))


def test_the_digest_of_weights_is_that_of_their_values() -> None:
    tensors = trainable_tensors(Net())
    assert weights_digest({name: tensor.double() for name, tensor in tensors.items()}) == weights_digest(tensors)
    assert weights_digest({**tensors, "scale": torch.tensor(2.0)}) != weights_digest(tensors)


def test_the_model_of_the_run_is_accepted() -> None:
    model = frozen(Net(), "stem.bias")
    shapes, base = shapes_of(trainable_tensors(model)), base_digest(model)
    need_model_of(manifest(shapes, base), shapes, base)
    need_model_of(manifest(shapes, base, with_shapes=False), shapes, base)


def test_another_model_is_refused_with_both_digests_and_the_first_difference() -> None:
    shapes = shapes_of(trainable_tensors(Net()))
    theirs = {**shapes, "head.bias": (5,)}
    for with_shapes, what in ((True, "head.bias is [4] here, [5] in the run"), (False, "10 tensors of")):
        with pytest.raises(BadSettings) as caught:
            need_model_of(manifest(theirs, with_shapes=with_shapes), shapes, "")
        for part in (what, layout_digest(shapes), layout_digest(theirs)):
            assert part in str(caught.value)
        assert caught.value.hint


@pytest.mark.parametrize(("run", "ours"), [("0" * 64, ""), (None, "1" * 64), ("0" * 64, "1" * 64)])
def test_another_base_is_refused_with_both_digests(run: str | None, ours: str) -> None:
    shapes = {"lora": (2, 2)}
    with pytest.raises(BadSettings) as caught:
        need_model_of(manifest(shapes, run), shapes, ours)
    assert f"their digest is {ours or 'none'}, the run's {run or 'none'}" in str(caught.value)
    assert caught.value.hint


PARTS = st.sampled_from(["a", "layers", "0", "module", "_orig_mod", "weight"])


@given(st.lists(st.lists(PARTS, min_size=1, max_size=4).map(".".join), min_size=1, max_size=6, unique=True))
def test_wrappers_never_change_what_a_name_means(names: list[str]) -> None:
    given = {name: torch.zeros(1) for name in names}
    try:
        plain = trainable_tensors(given)
    except BadSettings:  # two of the same name
        return
    wrapped = trainable_tensors({f"_orig_mod.module.{name}": tensor for name, tensor in given.items()})
    assert list(plain) == list(wrapped) == sorted(plain)
    assert all(wrapped[name] is tensor for name, tensor in plain.items())
    assert len(plain) == len(names)
