"""What a manifest implies: sizes on the wire, and the clock that peers share."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gossamer.optim.codecs import codec
from gossamer.peer.model.model import parameter_shapes
from gossamer.peer.model.plan import LAST_INTERVALS, STEP_FACTOR, ClockBudget, fragment_codecs, model_plan
from gossamer.peer.sync.pieces import bits_bytes, count
from gossamer.protocol import limits
from gossamer.protocol.errors import BadManifest
from gossamer.protocol.run.manifest import Manifest
from tests.processor_time import takes_at_most


def test_the_default_manifest_implies_a_whole_model_in_fragments() -> None:
    manifest = Manifest()
    plan = model_plan(fragment_codecs(manifest, parameter_shapes(manifest.model)), manifest.outer.alpha)
    assert plan.codec_id == codec(manifest.codec.name).wire_id
    assert len(plan.fragments) == 1, "what a meeting costs beside its bytes is paid once"
    assert 0 < plan.fragments[0].payload_bytes <= 1e6 * manifest.fragments.max_fragment_mb
    assert plan.state_bytes > 3 * sum(fragment.payload_bytes for fragment in plan.fragments), "what is sent is smaller than what is held"


def test_a_model_in_more_fragments_than_the_wire_can_number_is_refused_before_it_is_cut() -> None:
    manifest = Manifest.checked({"fragments": {"max_fragment_mb": 1e-6}})

    def refused() -> None:
        with pytest.raises(BadManifest, match="fragments") as caught:
            fragment_codecs(manifest, {"layers.0.weight": (1 << 22, 1 << 10)})
        assert "max_fragment_mb" in caught.value.hint

    assert takes_at_most(0.5, refused)


@pytest.mark.parametrize(("alpha", "num_values"), [(0.5, 1 << 35), (0.0, 1 << 36)])
def test_a_state_of_which_no_answer_can_list_the_pieces_is_refused_before_anything_is_trained(alpha: float, num_values: int) -> None:
    manifest = Manifest.checked({"fragments": {"max_fragment_mb": 1e4}, "outer": {"alpha": alpha}})
    assert fragment_codecs(manifest, {"layers.0.weight": (num_values,)})
    with pytest.raises(BadManifest, match="more than 137 GB") as caught:
        fragment_codecs(manifest, {"layers.0.weight": (num_values,), "layers.1.weight": (1,)})
    assert "stages" in caught.value.hint
    assert bits_bytes(count(limits.STATE_BYTES)) <= limits.CHUNK_BYTES


@pytest.mark.parametrize("name", ["modulo4", "fp32", "sign1"])
def test_no_meeting_sends_more_than_the_manifest_allows(name: str) -> None:
    manifest = Manifest.checked({"codec": {"name": name}, "fragments": {"max_fragment_mb": 0.1}})
    plan = model_plan(fragment_codecs(manifest, parameter_shapes(manifest.model)), manifest.outer.alpha)
    assert max(fragment.sketch_bytes + fragment.payload_bytes for fragment in plan.fragments) <= 1.1 * 100_000


@given(st.integers(0, 99), st.integers(0, 200), st.integers(1, 50), st.integers(0, 99))
def test_a_clock_never_goes_back_nor_past_the_end_nor_past_the_partners(own: int, partner: int, slack: int, most: int) -> None:
    budget = ClockBudget(slack, 99, 100, most)
    clock = budget.follow(own, partner)
    assert own <= clock <= max(own, min(partner, 100, own + most))
    assert budget.steps == most - (clock - own)
    if partner >= 100:
        assert clock == min(100, own + most), "at the end nobody is left behind"


def test_what_a_partner_may_move_a_clock_by_is_saved_up_for_one_allowed_gap_only() -> None:
    budget = ClockBudget(25, 50, 1000)
    for num_steps in range(1, 200):
        budget.refill()
        assert budget.steps == min(50, (STEP_FACTOR - 1) * num_steps)


@pytest.mark.parametrize(("partner", "clock"), [(60, 40), (80, 55), (990, 980)])
def test_a_peer_far_behind_follows_up_to_the_slack(partner: int, clock: int) -> None:
    """The slack shrinks to what is left of the run."""
    assert ClockBudget(25, 1000, 1000, 950).follow(40, partner) == clock


@pytest.mark.parametrize(
    ("own", "partner", "must_probe"),
    [(500, 500, False), (500, 550, False), (500, 551, True), (1000 - 25 * LAST_INTERVALS, 0, False), (1001 - 25 * LAST_INTERVALS, 0, True)],
)
def test_a_message_from_far_ahead_and_each_one_near_the_end_are_measured(own: int, partner: int, must_probe: bool) -> None:
    assert ClockBudget(25, 1000, 1000).must_probe(own, partner) == must_probe
    assert ClockBudget(25, 1000, 1000).must_probe(1000, 1000), "in the last averaging"
