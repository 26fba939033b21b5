"""`peer run`: the run in words and in JSON, from a running member and from what a stopped one has seen."""

from __future__ import annotations

import json
import re

import pytest

from benchmarks.pictures.members import lives, run_of
from gossamer.cli.page.run_page import live
from gossamer.cli.whole_run import curve_rows, description, picture, purpose
from gossamer.peer.machine.events import MemberSeen, MembersSeen
from gossamer.peer.machine.home import Home
from gossamer.peer.machine.run_view import RunView
from gossamer.protocol.identity import Identity
from gossamer.protocol.run.manifest import Manifest
from tests.cli.running import Running
from tests.cli.shell import Shell

NOW_S = 1_800_000_000.0


@pytest.fixture(scope="module")
def view() -> RunView:
    return run_of(14, Manifest.checked({"run": {"access": "open"}}), NOW_S)


def test_the_run_is_shown_in_words(view: RunView) -> None:
    shown = picture(view.to_json(NOW_S), Manifest(), runs=True)
    text = description(shown)
    first, *lines = text.splitlines()
    assert first == "demo: trains a llama model from random weights on the built-in text"
    rows = {line[:9].strip(): line[9:] for line in lines}
    assert rows["run"].startswith("step 2400 of 5000 (48.0 %), ends in about ")
    assert "the median; 1." in rows["loss"]
    assert rows["members"].endswith("live, 14 ever seen")
    assert rows["seen"].startswith("by this member, for 2 h")
    assert "joined" in text and "left" in text and "training" in text and "paused" in text
    assert "ask a member for an invite" in text and "the run is over" in description(shown | {"step": shown["total_steps"]})


def test_its_tables_fit_into_80_columns(view: RunView) -> None:
    shown = picture(view.to_json(NOW_S), Manifest(), runs=True)
    for holders in ([], [9, 5]):
        _, _, members = description(shown | {"stage_holders": holders, "stage_unheard": []}).partition("\nmember ")
        assert max(map(len, members.partition("\n\nMembers")[0].splitlines())) <= 80


def test_equal_points_of_the_curve_are_one_row() -> None:
    points = {"ts": [0.0, 5.0, 9.0], "step": [2, 2, 11], "loss": [5.4, 5.4, 4.9], "low": [5.4, 5.4, 4.9], "high": [5.4, 5.4, 4.9]}
    assert [row[1] for row in curve_rows(points | {"members": [1, 1, 1]})] == ["2", "11"]


def test_a_staged_run_says_who_holds_what_and_what_nobody_holds() -> None:
    manifest, view = Manifest.checked({"stages": {"count": 3}}), RunView()
    view.begin(manifest.run_id.hex(), 5000, 512, stages=3)
    members = [
        MemberSeen(f"12D3KooWpeer{number}", "training", 1, NOW_S + 300, 100, 51_200, 100, 2.5, stage=1 + number // 2) for number in range(3)
    ]
    view.take(MembersSeen(tuple(members), ts=NOW_S))
    shown = picture(view.to_json(NOW_S), manifest, runs=True)
    text = description(shown)
    assert "stages   2 of stage 1, 1 of stage 2, nobody of stage 3" in text
    assert "trained  51.2 k tokens" in text, "each token passes through three members"
    assert "in meetings and with micro-batches" in text and "one more" not in text
    assert re.search(r"^member +state +stage +share +step +own +loss +carried", text, re.MULTILINE)
    assert re.search(r"^Wpeer2 +training +2 ", text, re.MULTILINE)
    page = live(shown)
    assert "Holders: 2 of stage 1, 1 of stage 2, nobody of stage 3." in page
    assert page.count("stage 1, 100 steps") == 2 and "one more would add" not in page


def test_json_is_one_object_with_the_members_and_the_curve(shell: Shell, host: Identity, view: RunView) -> None:
    peer = Running(shell)
    peer.run = view.to_json(NOW_S)
    result = peer.during(lambda: shell("run", "--json"))
    shown = json.loads(result.out)
    assert (shown["name"], shown["step"], shown["ever"], shown["is_watched"]) == ("demo", 2400, 14, True)
    assert len(shown["members"]) == 14 and all(len(row["peer"]) == 6 for row in shown["members"])
    assert len(shown["points"]["loss"]) == len(shown["points"]["step"]) > 100
    assert peer.asked == [{"verb": "run"}]


def test_a_stopped_member_shows_what_it_has_seen_and_says_until_when(shell: Shell, host: Identity, view: RunView) -> None:
    Home(shell.home).run.write_text(json.dumps(view.to_record()))
    text = shell("run").out
    assert "it does not run now: as of " in text and "ends in" not in text


def test_a_member_that_has_seen_nothing_says_so(shell: Shell, host: Identity) -> None:
    text = shell("run").out
    assert "no member in sight" in text and "nothing yet" in text and "no member publishes one yet" in text


def test_a_damaged_record_of_the_run_counts_as_none(shell: Shell, host: Identity) -> None:
    odd = {"run_id": "ab", "since": 1, "total_steps": 9, "step_tokens": 1, "spacing_s": 1, "members": [], "changes": [], "points": []}
    seen = {"peer_id": 5, "state": "training", "sequence": 1, "expires": "x", "step": "x", "tokens": None}
    odd["members"] = [{"seen": seen, "first_seen": 1, "heard": "x"}]
    for content in ("", "[]", '{"run_id": 1}', '{"members": [{}]}', json.dumps(odd)):
        Home(shell.home).run.write_text(content)
        assert "no member in sight" in shell("run").out


@pytest.mark.parametrize(
    ("tables", "words"),
    [
        ({"data": {"source": "text"}}, "trains a llama model from random weights on each member's own text"),
        (
            {
                "model": {"hub": "org/small", "revision": "a" * 40},
                "data": {"source": "huggingface", "name": "org/tales", "revision": "b" * 40},
            },
            "trains the model org/small on org/tales",
        ),
        ({"data": {"source": "huggingface", "name": "/home/somebody/secret"}}, "trains a llama model from random weights on a data set"),
    ],
)
def test_the_purpose_follows_from_the_manifest_and_names_no_folder(tables: dict[str, dict[str, str]], words: str) -> None:
    assert purpose(Manifest.checked(tables)) == words


def test_a_member_that_overstates_everything_in_its_signed_records_bends_nothing(view: RunView) -> None:
    """From the run's first moment on, in which nobody else has made a step."""
    liar = str(lives(14)[11].identity.peer_id)[-6:]
    shown = picture(view.to_json(NOW_S), Manifest(), runs=True)
    (row,) = [row for row in shown["members"] if row["peer"] == liar]
    largest = max(other["share"] for other in shown["members"] if other["peer"] != liar)
    assert row["share"] < 2 * largest
    assert (row["step"], row["own_steps"], row["carried_mb"]) == (None, None, None)
    assert shown["step"] == 2400 and shown["tokens"] <= 14 * 2400 * Manifest().step_tokens
    assert all(600 <= step <= 2400 for step in shown["points"]["step"])
    assert min(low for low in shown["points"]["low"] if low is not None) > 1.0
