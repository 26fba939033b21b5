from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor

from gossamer.peer.simulator.choices import scenario
from gossamer.peer.simulator.population import Population
from gossamer.peer.simulator.scenario import Scenario
from gossamer.peer.simulator.stages import Stages
from gossamer.protocol.errors import BadManifest, BadSettings
from gossamer.protocol.run.manifest import Manifest
from tests.peer.simulator.swarms import small_population, small_scenario, training
from tests.peer.small import LLAMA, small_manifest

torch.set_num_threads(1)
UNTIED = LLAMA | {"tie_word_embeddings": False, "num_hidden_layers": 4}
NO_CLIP = 1e6


def staged(**choices: Any) -> Scenario:
    """The small job for 3 peers, its model untied and with four blocks; without `stages` it is whole."""
    given = {"peers": 3, "steps": 6, "inner_steps": 4, "codec": "fp32", "method": "local", "micro_batch": 2, **choices}
    manifest = small_manifest(run={"access": "invite"}, model={"config": UNTIED})
    if "stages" not in given:
        del given["micro_batch"]
    return scenario(manifest, given)


def trained(made: Scenario) -> Population:
    population = small_population(made)
    for _ in training(population):
        pass
    return population


def parameters(population: Population) -> list[dict[str, Tensor]]:
    return [{name: tensor.detach().clone() for name, tensor in replica.parameters.items()} for replica in population.replicas]


def same(one: list[dict[str, Tensor]], other: list[dict[str, Tensor]]) -> bool:
    return all(torch.equal(tensor, second[name]) for first, second in zip(one, other, strict=True) for name, tensor in first.items())


@pytest.mark.parametrize("stages", [2, 3, 4])
def test_fixed_routes_without_clipping_are_local_training_bit_for_bit(stages: int) -> None:
    whole = trained(staged(clip_norm=NO_CLIP))
    cut = trained(staged(stages=stages, routing="fixed", activations="fp32", clip_norm=NO_CLIP))
    assert same(parameters(whole), parameters(cut))
    assert [replica.losses for replica in whole.replicas] == [replica.losses for replica in cut.replicas]


def test_one_stage_is_a_run_of_today() -> None:
    whole, one = staged(), staged(stages=1)
    assert one.manifest.run_id == whole.manifest.run_id
    assert same(parameters(trained(whole)), parameters(trained(one)))


def test_a_batch_in_micro_batches_has_the_same_gradient() -> None:
    whole = trained(staged(clip_norm=NO_CLIP, steps=1, optimizer="adamw", learning_rate=1e-6))
    cut = trained(
        staged(
            stages=2, micro_batch=1, routing="fixed", activations="fp32", clip_norm=NO_CLIP, steps=1, optimizer="adamw", learning_rate=1e-6
        )
    )
    for one, other in zip(parameters(whole), parameters(cut), strict=True):
        for name, tensor in one.items():
            torch.testing.assert_close(other[name], tensor, atol=3e-6, rtol=0.0)
    assert [replica.losses for replica in cut.replicas] == [pytest.approx(replica.losses, rel=1e-5) for replica in whole.replicas]


def test_random_routes_give_each_replica_as_many_micro_batches() -> None:
    population = small_population(staged(stages=3, micro_batch=1, peers=4))
    stages = Stages(population)
    taken: list[tuple[int, ...]] = []
    for index in range(40):
        paths = stages._paths([0, 1, 2, 3], index)
        assert [path[0] for path in paths] == [0, 1, 2, 3]
        assert all(sorted(column) == [0, 1, 2, 3] for column in zip(*paths, strict=True))
        taken += paths
    met = Counter(path[:2] for path in taken)
    assert len(met) == 16
    assert max(met.values()) < 25


def test_random_routes_mix_the_later_stages_alone() -> None:
    """With one step from equal weights, the last stage's gradients differ by who sent what; with fixed routes they are the own ones."""
    first = {
        mode: parameters(trained(staged(stages=2, steps=1, routing=mode, activations="fp32", clip_norm=NO_CLIP)))
        for mode in ("fixed", "random")
    }
    for number in range(3):
        fixed, drawn = first["fixed"][number], first["random"][number]
        assert torch.equal(fixed["model.embed_tokens.weight"], drawn["model.embed_tokens.weight"])
    heads = {mode: {float(one["lm_head.weight"].double().sum()) for one in first[mode]} for mode in first}
    assert heads["fixed"] == heads["random"]  # the same gradients, at other replicas


def test_a_delayed_gradient_reaches_the_first_stage_later() -> None:
    population = small_population(staged(stages=3, hop_delay=2, routing="fixed", steps=5))
    names = ["model.embed_tokens.weight", "model.layers.1.mlp.up_proj.weight", "lm_head.weight"]  # of each stage
    before, moved = parameters(population)[0], []
    for _ in training(population):
        after = parameters(population)[0]
        moved.append([not torch.equal(after[name], before[name]) for name in names])
    assert moved == [[False, False, True]] * 2 + [[False, True, True]] * 2 + [[True, True, True]]


def test_a_delayed_gradient_is_that_of_the_weights_of_then() -> None:
    """The first stage computes again with its present weights: here they have not moved, so the gradient is that of its own batch."""
    delayed = small_population(staged(stages=2, hop_delay=1, routing="fixed", activations="fp32", clip_norm=NO_CLIP, peers=1))
    prompt = small_population(staged(stages=2, routing="fixed", activations="fp32", clip_norm=NO_CLIP, peers=1))
    late_stages, early_stages = Stages(delayed), Stages(prompt)
    [late], [early] = delayed.replicas, prompt.replicas
    early_stages.add_gradients([0])
    late_stages.add_gradients([0])
    name = "model.embed_tokens.weight"
    assert late.parameters[name].grad is None
    late.own_steps = 1
    late_stages.add_gradients([0])
    assert torch.equal(late.parameters[name].grad, early.parameters[name].grad)  # type: ignore[arg-type]


@pytest.mark.parametrize(("activations", "most"), [("bf16", 0.01), ("int8", 0.02), ("int4", 0.3)])
def test_coded_activations_move_the_gradient_little(activations: str, most: float) -> None:
    gradients = []
    for name in ("fp32", activations):
        population = small_population(staged(stages=2, activations=name, routing="fixed", peers=1))
        Stages(population).add_gradients([0])
        gradients.append({name: parameter.grad for name, parameter in population.replicas[0].parameters.items()})
    exact, coded = (torch.cat([one.flatten() for one in group.values() if one is not None]) for group in gradients)
    assert 0.0 < float((coded - exact).norm() / exact.norm()) < most


def test_a_staged_swarm_meets_and_stays_together() -> None:
    population = trained(staged(stages=2, method="noloco", activations="int8", steps=16, micro_batch=1))
    assert population.traffic.completed > 0
    assert {codec.fragment.pieces[0].name for codec in population.layout.codecs} >= {"model.embed_tokens.weight"}
    apart = trained(staged(stages=2, activations="int8", steps=16, micro_batch=1))

    def spread(one: Population) -> float:
        return float(torch.stack([replica.weights for replica in one.replicas]).std(0).mean())

    assert spread(population) < spread(apart)


@pytest.mark.parametrize(
    ("choices", "words"),
    [
        ({"stages": 2, "routing": "shortest"}, "random or fixed"),
        ({"stages": 2, "hop_delay": -1}, "hop_delay must not be negative"),
        ({"stages": 2, "method": "diloco"}, "method diloco cannot train a staged run"),
        ({"stages": 2, "method": "noloco", "attack": "stale", "attackers": 1}, "attack on a staged run"),
    ],
)
def test_impossible_combinations_are_refused(choices: dict[str, Any], words: str) -> None:
    with pytest.raises(BadSettings, match=words):
        staged(**choices)


def test_models_that_cannot_be_cut_are_refused() -> None:
    with pytest.raises(BadManifest, match="5 stages need a block each"):
        staged(stages=5)
    with pytest.raises(BadManifest, match="cannot be one tensor"):
        scenario(small_manifest(run={"access": "invite"}), {"stages": 2})


def test_the_default_model_is_untied_for_stages() -> None:
    assert scenario(Manifest(), {"stages": 2}).manifest.model.config["tie_word_embeddings"] is False
    assert small_scenario().manifest.num_stages == 1
