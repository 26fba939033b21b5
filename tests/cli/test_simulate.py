from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import typer

from gossamer.cli.main import command_line
from gossamer.cli.simulate import APPLIES_TO
from gossamer.peer.machine.status import VERSION
from gossamer.peer.simulator import training
from gossamer.peer.simulator.population import Diverged
from gossamer.peer.simulator.results import JSON_KEYS, Result
from gossamer.peer.simulator.scenario import Scenario
from gossamer.protocol.errors import ExitCode
from gossamer.protocol.run.manifest import Manifest
from tests.cli.shell import CommandResult, Shell
from tests.peer.small import LLAMA, small_manifest

QUICK = ("--peers", "2", "--steps", "6", "--inner-steps", "3", "--eval-batches", "1", "--device", "cpu")
TEXT = "".join(f"line {n} of a text that repeats itself, more or less; " for n in range(3000))


@pytest.fixture
def manifest(tmp_path: Path) -> Path:
    """A small run on one's own text, which lies beside it."""
    (tmp_path / "text.txt").write_text(TEXT)
    (tmp_path / "small.toml").write_text(small_manifest(data={"source": "text"}).to_toml())
    return tmp_path / "small.toml"


def simulated(shell: Shell, manifest: Path, *arguments: str | Path) -> CommandResult:
    return shell("simulate", manifest, "--data", manifest.parent / "text.txt", *QUICK, *arguments)


def test_json_has_exactly_the_keys_of_the_contract(shell: Shell, manifest: Path) -> None:
    result = simulated(shell, manifest, "--json", "--codec", "modulo4", "--speeds", "4,1", "--delay", "1.5", "--seed", "3")
    assert result.code == 0
    found = json.loads(result.out)
    assert list(found) == [*JSON_KEYS, "settings", "version", "command"]
    assert found["command"].startswith("peer") and found["version"] == VERSION
    assert found["settings"]["manifest"]["codec"] == {"name": "modulo4"} and found["settings"]["scenario"]["speeds"] == "4:1"
    assert (found["method"], found["codec"], found["peers"], found["steps"]) == ("noloco", "modulo4", 2, 6)
    assert found["tokens"] == (9 + 2) * 32  # whole steps at 1.6 and 0.4 per unit of time
    assert len(found["eval_loss"]) == 2
    assert "100 % of" in result.err


def test_equal_seeds_print_equal_figures(shell: Shell, manifest: Path) -> None:
    def losses(seed: str) -> list[float]:
        return list(json.loads(simulated(shell, manifest, "--json", "--seed", seed).out)["eval_loss"])

    assert losses("1") == losses("1") != losses("2")


def test_a_sweep_ends_with_a_table_and_a_picture(shell: Shell, manifest: Path) -> None:
    picture = manifest.parent / "curves.png"
    result = simulated(shell, manifest, "--sweep", "learning_rate=1e-3,2e-3", "--sweep", "method=local,ddp", "--plot", picture)
    assert result.code == 0
    assert len(result.out.splitlines()) == 5
    assert picture.stat().st_size > 10_000


def test_an_interrupted_sweep_keeps_its_finished_runs_and_runs_only_the_others(
    shell: Shell, manifest: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ("--sweep", "method=local,ddp,streaming", "--sweep", "seed=1,2", "--json")
    begun: list[tuple[str, int]] = []
    honest = training.simulate

    def counted(made: Scenario, *rest: Any) -> Result:
        if len(begun) == 3:
            begun.clear()
            raise KeyboardInterrupt
        begun.append((made.manifest.outer.method, made.seed))
        return honest(made, *rest)

    monkeypatch.setattr(training, "simulate", counted)
    interrupted = simulated(shell, manifest, *command)
    assert interrupted.code == ExitCode.INTERRUPTED and "3 of 6 runs are kept" in interrupted.err and not begun
    monkeypatch.setattr(
        training, "simulate", lambda made, *rest: begun.append((made.manifest.outer.method, made.seed)) or honest(made, *rest)
    )
    resumed = simulated(shell, manifest, *command)
    assert "3 of 6 runs are kept from an interrupted sweep" in resumed.err
    assert begun == [("ddp", 2), ("streaming", 1), ("streaming", 2)]
    begun.clear()
    whole = simulated(shell, manifest, *command)
    assert len(begun) == 6  # a sweep that has ended is forgotten
    figures = [[row["eval_loss_averaged"] for row in json.loads(result.out)["sweep"]] for result in (resumed, whole)]
    assert figures[0] == figures[1]
    averages = json.loads(whole.out)["averages"]
    assert [one["settings"] for one in averages] == [{"method": name} for name in ("local", "ddp", "streaming")]
    assert [one["seeds"] for one in averages] == [2, 2, 2] and all(one["eval_loss_averaged_std"] > 0 for one in averages)


@pytest.mark.parametrize("swept", [("--sweep", "method=local,ddp"), ()])
def test_results_are_printed_before_the_picture_fails(shell: Shell, manifest: Path, swept: tuple[str, ...]) -> None:
    picture = manifest.parent / "curves.png"
    picture.mkdir()
    result = simulated(shell, manifest, *swept, "--plot", picture, "--json")
    assert result.code == 2
    assert f"{picture} cannot be written" in result.complaint[0]
    assert set(json.loads(result.out)) == {*(("sweep",) if swept else JSON_KEYS), "settings", "version", "command"}


def test_a_sweep_that_diverged_has_a_table_and_no_picture(shell: Shell, manifest: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def diverge(*_: object) -> Result:
        raise Diverged("peer 0 diverged", hint="lower the learning rate")

    monkeypatch.setattr(training, "simulate", diverge)
    picture = manifest.parent / "curves.png"
    result = simulated(shell, manifest, "--sweep", "learning_rate=90.0,99.0", "--plot", picture)
    assert result.code == 2
    assert [line.split() for line in result.out.splitlines()[1:]] == [["90.0", "diverged"], ["99.0", "diverged"]]
    assert "nothing to draw" in result.complaint[0]
    assert not picture.exists()


def test_text_output_names_method_and_codec(shell: Shell, manifest: Path) -> None:
    result = simulated(shell, manifest, "--method", "streaming", "--set", "beta=0.5", "--no-token-weights")
    assert result.code == 0
    assert "streaming with e3m0" in result.out


@pytest.mark.parametrize(
    ("arguments", "error", "hint"),
    [
        (("--method", "nolco"), "no method named 'nolco'", "noloco"),
        (("--set", "gamma=2.1"), "gamma must satisfy 0 < gamma < 2(1 - alpha^2)", ""),
        (("--set", "gama=1"), "no setting named 'gama'", "gamma"),
        (("--sweep", "codec"), "NAME=VALUE", "learning_rate=4e-3"),
        (("--speeds", "4,x"), "speeds is '4:x'", ""),
        (("--skew", "2"), "skew must lie in [0, 1]", ""),
        (("--matching", "never"), "matching is 'never'", ""),
        (("--stages", "2"), 'run.access is "open"', ""),
        (("--routing", "fixed"), "routing has no effect without stages", "--stages 2"),
        (("--tokens", "64"), "--tokens and --eval-batches", "leave one of them out"),
        (("--matching", "scheduled", "--method", "diloco"), "matching has no effect with method diloco", "choose method noloco"),
        (("--plot", "no-such-folder/x.png"), "the folder of no-such-folder/x.png", "--plot"),
        (("--peers", "100000000"), "100000000 replicas of", "--peers"),
        (
            ("--device", "cuda:99"),
            "no device cuda:99" if torch.accelerator.is_available() else "'cuda:99' needs a GPU",
            "choose auto or cpu",
        ),
    ],
)
def test_bad_input_is_refused_with_a_hint(shell: Shell, manifest: Path, arguments: tuple[str, ...], error: str, hint: str) -> None:
    result = simulated(shell, manifest, *arguments)
    assert result.code == 2
    assert error in result.complaint[0]
    assert hint in result.complaint[1]
    assert not result.out


def test_a_staged_run_of_a_whole_manifest_is_simulated(shell: Shell, tmp_path: Path) -> None:
    made = small_manifest(run={"access": "invite"}, data={"source": "text"}, model={"config": LLAMA | {"tie_word_embeddings": False}})
    (tmp_path / "text.txt").write_text(TEXT)
    (tmp_path / "small.toml").write_text(made.to_toml())
    stages = "--stages", "2", "--routing", "random", "--activations", "int4", "--hop-delay", "1", "--json"
    result = simulated(shell, tmp_path / "small.toml", *stages)
    assert result.code == 0, result.complaint
    found = json.loads(result.out)["settings"]
    assert (found["manifest"]["stages"]["count"], found["manifest"]["stages"]["activations"]) == (2, "int4")
    assert (found["scenario"]["routing"], found["scenario"]["hop_delay"]) == ("random", "1")


def test_a_text_too_small_is_reported_with_the_need(shell: Shell, manifest: Path) -> None:
    (manifest.parent / "short.txt").write_text("short")
    result = shell("simulate", manifest, "--data", manifest.parent / "short.txt", *QUICK)
    assert result.code == 2
    assert "one batch and its held-out part need 51" in result.complaint[0]


def test_the_network_alone_needs_no_training(shell: Shell) -> None:
    result = shell("simulate", "--network", "--peers", "32", "--codec", "modulo4", "--latency", "0.1", "--json")
    assert result.code == 0
    found = json.loads(result.out)
    assert list(found)[:3] == ["peers", "sync_seconds", "compute_utilization"]
    assert set(found["sync_seconds"]) == {"gossip", "ring", "tree"}
    assert result.err == ""
    assert "meeting" in shell("simulate", "--network").out


def test_nothing_of_the_network_is_imported(manifest: Path) -> None:
    """In a process of its own: a whole simulation, then what it loaded."""
    network = {"hivemind", "grpc", "uvloop", "gossamer.protocol.libp2p", "gossamer.peer.node", "gossamer.peer.supervisor"}
    loaded = f"print(sorted({network!r} & set(sys.modules)))"
    program = f"import sys; from gossamer.cli.main import run; code = run(sys.argv[1:]); {loaded}; sys.exit(code)"
    data = manifest.parent / "text.txt"
    arguments = ["simulate", str(manifest), "--data", str(data), *QUICK, "--home", str(manifest.parent / "home"), "--json"]
    done = subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True, timeout=50)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[1] == "[]"


# ---------------------------------------------------------------------- options without effect


TRAINING = [("--method", "ddp"), ("--steps", "5"), ("--no-token-weights",), ("--sweep", "codec=fp32,nf4"), ("--data", ".")]
OF_STAGES = {"hidden_size": ("--hidden-size", "768")}
NETWORK = {"variation": ("--variation", "0.5"), "params": ("--params", "1e8"), "layers": ("--layers", "12")}


SWARM = {
    "cut": ("--cut", "60"),
    "churn": ("--churn", "0.1"),
    "loss": ("--loss", "0.01"),
    "clock_error": ("--clock-error", "60"),
    "reachable": ("--reachable", "0.5"),
}


def test_each_option_of_the_table_is_one_of_the_command() -> None:
    command = typer.main.get_command(command_line()).commands["simulate"]  # type: ignore[attr-defined]
    assert set(APPLIES_TO) <= {parameter.name for parameter in command.params}


@pytest.mark.parametrize("given", TRAINING, ids=str)
def test_options_of_training_are_refused_with_the_network_alone(shell: Shell, given: tuple[str, ...]) -> None:
    result = shell("simulate", "--network", *given)
    assert result.code == 2
    assert result.complaint[0] == f"{given[0]} has no effect with --network"
    assert "leave it out" in result.complaint[1]
    assert not result.out


@pytest.mark.parametrize(
    ("given", "without"),
    [
        (("--latency", "0.05"), "--network or --swarm"),  # even where it is the default
        *((given, "--network") for given in NETWORK.values()),
        *((given, "--swarm") for given in SWARM.values()),
        (OF_STAGES["hidden_size"], "--network --stages"),
    ],
)
def test_options_of_the_others_are_refused_in_training(shell: Shell, given: tuple[str, ...], without: str) -> None:
    result = shell("simulate", *given)
    assert result.code == 2
    assert result.complaint == (f"{given[0]} has no effect without {without}", f"leave it out, or add {without}")
    assert not result.out


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (("--codec", "nf4"), "--codec has no effect with --swarm"),
        (NETWORK["variation"], "--variation has no effect with --swarm"),
        (("--network",), "--network and --swarm exclude each other"),
        (("--peers", "501"), "--peers must lie between 2 and 500 with --swarm"),
        (("--bandwidth", "0"), "--bandwidth must be above 0 with --swarm"),
    ],
)
def test_options_without_effect_on_a_swarm_are_refused(shell: Shell, given: tuple[str, ...], reason: str) -> None:
    result = shell("simulate", "--swarm", *given)
    assert (result.code, result.complaint[0], result.out) == (2, reason, "")


def test_a_swarm_of_a_staged_run_is_refused(shell: Shell, tmp_path: Path) -> None:
    (tmp_path / "staged.toml").write_text(Manifest.checked({"stages": {"count": 2}}).to_toml())
    result = shell("simulate", "--swarm", tmp_path / "staged.toml", "--peers", "4")
    assert (result.code, result.complaint[0]) == (2, "--swarm simulates peers that hold the whole model")


def test_a_swarm_of_real_nodes(shell: Shell) -> None:
    result = shell("simulate", "--swarm", "--peers", "4", "--cut", "30", "--json")
    found = json.loads(result.out)
    assert (result.code, found["peers"], found["violations"]) == (0, 4, [])
    assert found["meetings"]["completed"] and found["healed_s"]["worst"] < 60.0
    assert "s simulated" in result.err


def test_the_network_of_a_run_prints_estimates_for_a_peer(shell: Shell, manifest: Path) -> None:
    result = shell("simulate", "--network", manifest, "--bandwidth", "20", "--json")
    found = json.loads(result.out)
    assert found["estimate"]["join_s"] > 0 and found["bytes_needed"]["cpu"]["disk"] > 0
    text = shell("simulate", "--network", manifest).out
    assert "to join" in text and "on a CPU" in text
    refused = shell("simulate", "--network", manifest, "--params", "1e9")
    assert (refused.code, refused.complaint[0]) == (2, "--params has no effect with a manifest, which defines the model")


@pytest.mark.parametrize(
    ("setting", "reason"),
    [
        ("beta=0.5", "--set beta has no effect with --network"),
        ("skew=0.5", "--set skew has no effect"),
        ("bata=1", "no setting named 'bata'"),
    ],
)
def test_settings_of_training_are_refused_with_the_network_alone(shell: Shell, setting: str, reason: str) -> None:
    result = shell("simulate", "--network", "--set", setting)
    assert result.code == 2
    assert reason in result.complaint[0]


SIZE = ("--params", "8.03e9", "--layers", "32", "--hidden-size", "4096")


def test_where_a_staged_run_pays_is_printed_from_formulas(shell: Shell) -> None:
    text = shell("simulate", "--network", "--stages", "6", *SIZE).out
    assert "8.03e+09 parameters in 6 stages of 1.34e+09, hidden size 4096" in text
    assert re.search(r"middle +8452 up +8452 down", text)
    assert "a peer with the whole model sends 4530 bytes a token in meetings, 1.9 times less" in text
    (line,) = [line for line in text.splitlines() if line.startswith("RTX 3090") and re.search(r" 100 +\d", line)]
    assert re.search(r"2615 +343/177/91.1 +29/57/100 +1.1 TB +227 GB +57 % of the device$", line)
    assert text.count("do not: ") == 3 and text.count("does not fit: ") == 6


def test_the_formulas_of_a_staged_run_as_json_on_one_line(shell: Shell) -> None:
    found = json.loads(shell("simulate", "--network", "--stages", "6", *SIZE, "--bandwidth", "100", "--activations", "int4", "--json").out)
    assert {row["line_mbit"] for row in found["rows"]} == {100.0} and found["activations"] == "int4"
    rows = {row["device"]: row for row in found["rows"]}
    assert rows["RTX 4090, 24 GB"]["formats"]["int4"]["use"] == pytest.approx(0.47, abs=0.01)
    assert rows["H100, 80 GB"]["whole"]["fits"] is False and rows["GPU, 8 GB"]["fits"] is False


def test_the_formulas_of_a_manifest_are_those_of_its_model(shell: Shell, manifest: Path) -> None:
    staged = manifest.with_name("staged.toml")
    text = manifest.read_text().replace("tie_word_embeddings = true", "tie_word_embeddings = false")
    staged.write_text(text.replace('access = "open"', 'access = "invite"'))
    found = json.loads(shell("simulate", "--network", staged, "--stages", "2", "--json").out)
    assert found["stages"] == 2 and found["layers"] >= 2
    assert all(row["verdict"] == "do not: it fits whole" for row in found["rows"])


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (("--stages", "40"), "12 layers cannot be cut into 40 stages"),
        (("--stages", "2", "--latency", "0.1"), "--latency has no effect with --network --stages"),
        (("--stages", "2", "--params", "-1"), "--params must be a number between 1e-09 and 1e+18, and is -1"),
        (("--stages", "2", "--params", "nan"), "--params must be a number between 1e-09 and 1e+18, and is nan"),
        (("--stages", "2", "--bandwidth", "0"), "--bandwidth must be a number between 1e-09 and 1e+18, and is 0"),
        (("--stages", "2", "--activations", "int3"), "there are no activations 'int3'"),
        (("--activations", "int4"), "--activations has no effect with --network"),
    ],
)
def test_what_the_formulas_cannot_use_is_refused(shell: Shell, given: tuple[str, ...], reason: str) -> None:
    result = shell("simulate", "--network", *given)
    assert (result.code, result.complaint[0], result.out) == (2, reason, "")


def test_options_of_the_network_reach_it(shell: Shell) -> None:
    result = shell(
        "simulate", "--network", "--peers", "5", "--inner-steps", "7", "--set", "codec=nf4", "--seed", "3", "--json", *NETWORK["params"]
    )
    assert result.code == 0
    found = json.loads(result.out)
    assert (found["peers"], found["inner_steps"], found["codec"], found["params"]) == (5, 7, "nf4", 1e8)
    other = shell("simulate", "--network", "--peers", "5", "--inner-steps", "7", "--codec", "nf4", "--set", "seed=4", "--json")
    assert json.loads(other.out)["sync_seconds"] != found["sync_seconds"]


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (("--bandwidth", "0"), "--bandwidth must be above 0"),
        (("--bandwidth", "nan"), "--bandwidth': write it like 5 Mbit/s"),
        (("--params", "inf"), "--params must be a number between"),
        (("--latency", "0"), "--latency must be a number between"),
        (("--variation", "nan"), "--variation must satisfy"),
        (("--peers", "1000000000000"), "--peers must lie between 2 and 10000000"),
    ],
)
def test_an_impossible_network_is_refused(shell: Shell, given: tuple[str, str], reason: str) -> None:
    result = shell("simulate", "--network", "--json", *given)
    assert result.code == 2
    assert reason in result.complaint[0]
    assert not result.out


def test_the_home_folder_may_come_from_the_environment(shell: Shell, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("GOSSAMER_HOME", str(tmp_path))
    assert shell("simulate", "--network", "--json").code == 0
