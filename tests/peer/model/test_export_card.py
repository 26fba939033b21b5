from __future__ import annotations

from pathlib import Path

from peer.machine.events import MeetingDone, StateCloned
from peer.model.export import MAX_NAMED, HeldOut, contributors, model_card
from peer.model.weights import load_trained
from tests.peer.trained_homes import tiny_manifest, trained_home


def met(partner: str, outcome: str = "completed") -> MeetingDone:
    return MeetingDone(partner, 0, outcome, "", "tunnel", 1, 1, 0.1)


def test_the_card_names_where_the_model_comes_from(tmp_path: Path) -> None:
    manifest = tiny_manifest()
    trained = load_trained(trained_home(tmp_path, manifest, fast_seed=2))
    card = model_card(trained, [met("12D3KooWa")], "fast", HeldOut(2.125, 4096))
    steps = f"42 of {manifest.run.total_steps} steps"
    for fact in (
        manifest.run_id.hex(),
        steps,
        "40 inner steps, 1000 tokens",
        "2.1250 nats per token, over 4096 tokens",
        "`12D3KooWa`",
        f"codec {manifest.codec.name}",
        "| fast |",
    ):
        assert fact in card
    assert card.startswith("---\nlibrary_name: transformers\n")


def test_contributors_are_those_whose_weights_came_in() -> None:
    events = [met("a"), met("b", "failed"), met("c"), met("a"), StateCloned("d", 5, 10, 0.1)]
    assert contributors(events) == ["a", "c", "d"]


def test_a_peer_that_met_nobody_says_so(tmp_path: Path) -> None:
    trained = load_trained(trained_home(tmp_path, tiny_manifest(), fast_seed=2))
    card = model_card(trained, [], "fast", HeldOut(None))
    assert "| peers met | none |" in card
    assert "| held-out loss | not measured |" in card


def test_a_large_swarm_is_not_listed_whole(tmp_path: Path) -> None:
    trained = load_trained(trained_home(tmp_path, tiny_manifest(), fast_seed=2))
    card = model_card(trained, [met(f"peer{number}") for number in range(MAX_NAMED + 9)], "fast", HeldOut(None))
    assert card.count("- `peer") == MAX_NAMED
    assert "and 9 more" in card


def test_a_runs_name_is_only_text(tmp_path: Path) -> None:
    trained = load_trained(trained_home(tmp_path, tiny_manifest(name="x | <img src=http://e> {title}"), fast_seed=2))
    card = model_card(trained, [], "fast", HeldOut(None))
    assert "<img" not in card
    assert "{title}" not in card
