from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from peer.simulator import sweep
from peer.simulator.history import JSON_KEYS, Result
from peer.simulator.replicas import Diverged
from tests.cli.shell import Said, Shell
from tests.peer.small import small_manifest

QUICK = ("--peers", "2", "--steps", "6", "--inner-steps", "3", "--eval-batches", "1", "--device", "cpu")
TEXT = "".join(f"line {n} of a text that repeats itself, more or less; " for n in range(3000))


@pytest.fixture
def manifest(tmp_path: Path) -> Path:
    """A small run on one's own text, which lies beside it."""
    (tmp_path / "text.txt").write_text(TEXT)
    (tmp_path / "small.toml").write_text(small_manifest(data={"source": "text"}).to_toml())
    return tmp_path / "small.toml"


def simulated(shell: Shell, manifest: Path, *arguments: str | Path) -> Said:
    return shell("simulate", manifest, "--data", manifest.parent / "text.txt", *QUICK, *arguments)


def test_json_has_exactly_the_keys_of_the_contract(shell: Shell, manifest: Path) -> None:
    said = simulated(shell, manifest, "--json", "--codec", "modulo4", "--speeds", "4,1", "--delay", "1.5", "--seed", "3")
    assert said.code == 0
    found = json.loads(said.out)
    assert list(found) == list(JSON_KEYS)
    assert (found["method"], found["codec"], found["peers"], found["steps"]) == ("noloco", "modulo4", 2, 6)
    assert found["tokens"] == (9 + 2) * 32  # whole steps at 1.6 and 0.4 per unit of time
    assert len(found["eval_loss"]) == 2
    assert "100 % of" in said.err


def test_equal_seeds_print_equal_figures(shell: Shell, manifest: Path) -> None:
    def losses(seed: str) -> list[float]:
        return list(json.loads(simulated(shell, manifest, "--json", "--seed", seed).out)["eval_loss"])

    assert losses("1") == losses("1") != losses("2")


def test_a_sweep_ends_with_a_table_and_a_picture(shell: Shell, manifest: Path) -> None:
    picture = manifest.parent / "curves.png"
    said = simulated(shell, manifest, "--sweep", "learning_rate=1e-3,2e-3", "--sweep", "method=local,ddp", "--plot", picture)
    assert said.code == 0
    assert len(said.out.splitlines()) == 5
    assert picture.stat().st_size > 10_000


@pytest.mark.parametrize("swept", [("--sweep", "method=local,ddp"), ()])
def test_what_was_found_is_told_before_the_picture_fails(shell: Shell, manifest: Path, swept: tuple[str, ...]) -> None:
    picture = manifest.parent / "curves.png"
    picture.mkdir()
    said = simulated(shell, manifest, *swept, "--plot", picture, "--json")
    assert said.code == 2
    assert f"{picture} cannot be written" in said.complaint[0]
    assert set(json.loads(said.out)) == ({"sweep"} if swept else set(JSON_KEYS))


def test_where_everything_diverged_there_is_a_table_and_no_picture(shell: Shell, manifest: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def diverge(*_: object) -> Result:
        raise Diverged("peer 0 diverged")

    monkeypatch.setattr(sweep, "simulate", diverge)
    picture = manifest.parent / "curves.png"
    said = simulated(shell, manifest, "--sweep", "learning_rate=90.0,99.0", "--plot", picture)
    assert said.code == 2
    assert [line.split() for line in said.out.splitlines()[1:]] == [["90.0", "diverged"], ["99.0", "diverged"]]
    assert "nothing to draw" in said.complaint[0]
    assert not picture.exists()


def test_people_get_sentences(shell: Shell, manifest: Path) -> None:
    said = simulated(shell, manifest, "--method", "streaming", "--set", "beta=0.5", "--no-token-weights")
    assert said.code == 0
    assert "streaming with e3m0" in said.out


@pytest.mark.parametrize(
    ("arguments", "error", "hint"),
    [
        (("--method", "nolco"), "no method named 'nolco'", "noloco"),
        (("--codec", "modul4"), "no codec named 'modul4'", "modulo4"),
        (("--set", "gamma=2.1"), "gamma must satisfy 0 < gamma < 2(1 - alpha^2)", ""),
        (("--set", "gama=1"), "no setting named 'gama'", "gamma"),
        (("--sweep", "codec"), "NAME=VALUE", "learning_rate=4e-3"),
        (("--speeds", "4,x"), "speeds is '4:x'", ""),
        (("--skew", "2"), "skew must lie in [0, 1]", ""),
        (("--matching", "never"), "matching is 'never'", ""),
        (("--plot", "no-such-folder/x.png"), "the folder of no-such-folder/x.png", "--plot"),
        (("--peers", "100000000"), "100000000 replicas of", "--peers"),
        (("--device", "cuda:99"), "no device cuda:99", "--device"),
    ],
)
def test_bad_input_is_answered_with_what_to_do(shell: Shell, manifest: Path, arguments: tuple[str, ...], error: str, hint: str) -> None:
    said = simulated(shell, manifest, *arguments)
    assert said.code == 2
    assert error in said.complaint[0]
    assert hint in said.complaint[1]
    assert not said.out


def test_a_text_too_small_says_how_much_is_needed(shell: Shell, manifest: Path) -> None:
    (manifest.parent / "short.txt").write_text("short")
    said = shell("simulate", manifest, "--data", manifest.parent / "short.txt", *QUICK)
    assert said.code == 2
    assert "one batch and its held-out part need 51" in said.complaint[0]


def test_the_network_alone_needs_no_training(shell: Shell) -> None:
    said = shell("simulate", "--network", "--peers", "32", "--codec", "modulo4", "--latency", "0.1", "--json")
    assert said.code == 0
    found = json.loads(said.out)
    assert list(found)[:3] == ["peers", "sync_seconds", "compute_utilization"]
    assert set(found["sync_seconds"]) == {"gossip", "ring", "tree"}
    assert said.err == ""
    assert "meeting" in shell("simulate", "--network").out


def test_neither_hivemind_nor_grpc_is_imported(manifest: Path) -> None:
    """In a process of its own: a whole simulation, then what it loaded."""
    program = (
        "import sys; from cli.main import run; code = run(sys.argv[1:]);"
        "print(sorted({name.split('.')[0] for name in sys.modules} & {'hivemind', 'grpc', 'uvloop'})); sys.exit(code)"
    )
    data = manifest.parent / "text.txt"
    arguments = ["simulate", str(manifest), "--data", str(data), *QUICK, "--home", str(manifest.parent / "home"), "--json"]
    done = subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True, timeout=50)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[1] == "[]"
