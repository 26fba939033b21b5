from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest

from gossamer.peer.simulator.choices import SimulationRequest, axis, scenario, setting, value
from gossamer.peer.simulator.methods import METHODS
from gossamer.protocol.errors import BadManifest, BadSettings
from gossamer.protocol.run.manifest import Manifest
from tests.peer.small import LLAMA

BASE = Manifest()
UNEVEN = (Fraction(4), Fraction(1))  # all wait 2.5 units of virtual time for a step of the slow ones


def test_names_reach_the_manifest_and_the_scenario() -> None:
    made = scenario(BASE, {"learning_rate": 5e-3, "alpha": 0.3, "codec": "nf4", "steps": 40, "peers": 3, "skew": 0.5})
    assert (made.manifest.inner.learning_rate, made.manifest.outer.alpha, made.manifest.codec.name) == (5e-3, 0.3, "nf4")
    assert (made.num_steps, made.num_peers, made.skew) == (40, 3, 0.5)


def test_defaults_that_depend_on_a_choice_follow_it() -> None:
    assert scenario(BASE, {"inner_steps": 50}).manifest.outer.max_clock_gap_steps == 400


@pytest.mark.parametrize("name", METHODS)
def test_each_method_has_settings_that_work(name: str) -> None:
    assert scenario(BASE, {"method": name}).manifest.outer.method == name


def test_default_settings_are_those_of_the_methods_paper() -> None:
    outer = scenario(BASE, {"method": "diloco"}).manifest.outer
    assert (outer.alpha, outer.beta) == (0.9, 0.7)
    streaming = scenario(BASE, {"method": "streaming", "peers": 2})
    assert (streaming.manifest.codec.name, streaming.delay_steps, streaming.manifest.outer.beta) == ("e3m0", 1, 0.6)


def test_settings_of_the_manifest_and_of_the_command_line_apply() -> None:
    written = Manifest.checked({"outer": {"method": "diloco", "alpha": 0.8}, "codec": {"name": "bf16"}})
    made = scenario(written, {"beta": 0.5})
    assert (made.manifest.outer.alpha, made.manifest.outer.beta, made.manifest.codec.name) == (0.8, 0.5, "bf16")


def test_another_method_brings_its_own_settings() -> None:
    written = Manifest.from_toml(Manifest().to_toml())  # every key is written out
    made = scenario(written, {"method": "diloco"})
    assert (made.manifest.outer.alpha, made.manifest.codec.name) == (0.9, "fp32")
    assert scenario(written, {}).manifest == written


def test_pairs_bring_their_own_codec_too() -> None:
    streamed = Manifest.checked({"outer": {"method": "streaming"}, "codec": {"name": "e3m0"}})
    assert scenario(streamed, {"method": "noloco"}).manifest.codec == BASE.codec
    assert scenario(streamed, {"method": "noloco", "codec": "nf4"}).manifest.codec.name == "nf4"
    assert scenario(streamed, {}).manifest.codec.name == "e3m0"
    own = Manifest.checked({"outer": {"method": "noloco"}, "codec": {"name": "int8"}})
    assert scenario(own, {}).manifest.codec.name == "int8"


def test_a_delay_is_in_virtual_time_at_any_step_duration() -> None:
    """A round of 25 steps lasts 62.5 units: a streamed fragment must arrive a step of 2.5 before it is sent again."""
    uneven = {"method": "streaming", "speeds": UNEVEN, "inner_steps": 25}
    assert scenario(BASE, {**uneven, "delay": Fraction(60)}).delay_steps == 60
    with pytest.raises(BadSettings):
        scenario(BASE, {**uneven, "delay": Fraction(60) + Fraction(1, 10)})


@pytest.mark.parametrize(
    ("choices", "reason", "hint"),
    [
        ({"method": "nolco"}, "no method named 'nolco'", "noloco"),
        ({"codec": "modul4"}, "no codec named 'modul4'", "modulo4"),
        ({"optimizer": "muno"}, "no inner optimizer named 'muno'", "muon"),
        ({"gamma": 2.1}, r"0 < gamma < 2\(1 - alpha\^2\)", ""),
        ({"method": "streaming", "delay": Fraction(25)}, "overlap_steps < inner_steps", "--delay"),
        ({"learning_rate": -1.0}, "inner.learning_rate", ""),
        ({"drop_out": 2.0}, "drop_out must satisfy", "--help"),
    ],
)
def test_impossible_settings_are_refused_before_anything_runs(choices: dict[str, Any], reason: str, hint: str) -> None:
    with pytest.raises((BadSettings, BadManifest), match=reason) as caught:
        scenario(BASE, choices)
    assert hint in caught.value.hint


@pytest.mark.parametrize("removed", ["gasloc", "slowmo", "noloco-averaged", "diloco-eager", "sparseloco"])
def test_a_removed_method_is_refused_with_all_methods(removed: str) -> None:
    old = Manifest.checked({"outer": {"method": removed}})
    for attempt in (lambda: scenario(BASE, {"method": removed}), lambda: scenario(old, {})):
        with pytest.raises(BadSettings, match=f"no method named '{removed}'") as caught:
            attempt()
        assert all(name in caught.value.hint for name in METHODS)


def test_gamma_bounds_no_momentum_in_a_method_without_it() -> None:
    outer = scenario(BASE, {"method": "diloco", "alpha": 0.95}).manifest.outer
    assert (outer.method, outer.alpha) == ("diloco", 0.95)


def test_a_grid_has_every_combination() -> None:
    points = SimulationRequest(BASE, {"peers": 2}, axes=["learning_rate=1e-3,2e-3", "inner_steps=5,25,50"]).scenarios()
    assert [point for point, _ in points][:2] == [{"learning_rate": 1e-3, "inner_steps": 5}, {"learning_rate": 1e-3, "inner_steps": 25}]
    assert len(points) == 6
    assert all(made.manifest.outer.inner_steps == point["inner_steps"] and made.num_peers == 2 for point, made in points)


def test_a_setting_is_given_once() -> None:
    for request in (
        SimulationRequest(BASE, {"seed": 1}, axes=["seed=1,2"]),
        SimulationRequest(BASE, {}, ["seed=1", "seed=2"]),
        SimulationRequest(BASE, {}, axes=["seed=1", "seed=2"]),
    ):
        with pytest.raises(BadSettings, match="seed is given twice"):
            request.scenarios()


@pytest.mark.parametrize(
    ("settings", "axes", "why"),
    [
        (["method=diloco", "matching=scheduled"], [], "matching has no effect with method diloco"),
        (["method=local", "delay=2"], [], "delay has no effect with method local"),
        (["clip=2"], [], "clip has no effect with method noloco"),
        (["method=diloco", "keep_local=0.1"], [], "keep_local has no effect with method diloco"),
        (["attack_from=0.2"], [], "attack_from has no effect without an attack"),
        (["hop_checks=none", "stages=2"], [], "hop_checks has no effect without an attack"),
        (["stages=1", "routing=fixed"], [], "routing has no effect without stages"),
        (["inner_steps=5", "line_mbit=20"], [], "--bandwidth has no effect on a fixed interval"),
        ([], ["method=diloco,ddp", "gamma=0.5,1"], "gamma has no effect with method diloco"),
    ],
)
def test_a_setting_that_no_simulation_uses_is_refused(settings: list[str], axes: list[str], why: str) -> None:
    base = Manifest.checked({"model": {"config": LLAMA | {"tie_word_embeddings": False}}})
    request = SimulationRequest(base, {}, settings, axes)
    with pytest.raises(BadSettings, match=why) as caught:
        request.need_effects(request.scenarios())
    assert "leave it out" in caught.value.hint


def test_a_setting_that_one_of_the_simulations_uses_is_none_without_effect() -> None:
    request = SimulationRequest(BASE, {"delay": Fraction(1)}, ["gamma=0.5"], ["method=noloco,local,ddp"])
    request.need_effects(request.scenarios())


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("learning_rate", "1e-3", 1e-3),
        ("inner_steps", "5", 5),
        ("codec", "nf4", "nf4"),
        ("speeds", "4:1", (Fraction(4), Fraction(1))),
        ("delay", "0.1", Fraction(1, 10)),
        ("token_weights", "false", False),
        ("drop_out", "0.25", 0.25),
        ("peers", "3", 3),
    ],
)
def test_values_are_read_by_their_names(name: str, text: str, expected: object) -> None:
    assert value(name, text) == expected


@pytest.mark.parametrize(
    "text", ["gama=1", "alpha", "alpha=", "alpha=1,,2", "peers=x", "speeds=4:", "speeds=1/0", "token_weights=1", "delay=soon"]
)
def test_unreadable_settings_are_refused(text: str) -> None:
    with pytest.raises(BadSettings) as caught:
        axis(text)
    assert caught.value.hint


def test_a_setting_has_one_value() -> None:
    assert setting("alpha=0.3") == ("alpha", 0.3)
    with pytest.raises(BadSettings, match="2 values"):
        setting("alpha=0.3,0.5")
