"""How far a partner is trusted by its record, and how long it rests after harmful messages."""

from __future__ import annotations

import math
import random
from dataclasses import asdict, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gossamer.peer.swarm.partner_records import (
    GOOD_PROBES,
    HELPING,
    HOURS,
    MAX_RECORDS,
    MAX_TOKEN_RATIO,
    MEMORY,
    REJECTED_REST_S,
    REJECTIONS,
    RESTS_S,
    START_SHARE,
    PartnerRecords,
    Trust,
    rest_text,
)
from gossamer.protocol.errors import BadSettings
from gossamer.protocol.identity import PeerId
from gossamer.protocol.limits import REFUSAL_DETAIL_CHARS
from tests.peer.neighbours import ids, somebody

A, B, C, D, *MANY = ids(*(somebody(number) for number in range(1, 40)))
GAIN, SPREAD = 0.02, 0.04  # of honest meetings, nats per token
NOW_S = 1_800_000_000.0
NEWCOMER, PROVEN = Trust(), Trust(False, 1.0, 1.0)
FAST = 4 * SPREAD  # the gain of a machine that is several times as fast


def meet(records: PartnerRecords, peer: PeerId, num: int, mean: float = GAIN, seed: int = 0) -> None:
    """So many accepted probes with an honest spread."""
    draws = random.Random(f"{peer}/{seed}")
    for _ in range(num):
        gain = draws.gauss(mean, SPREAD)
        records.merged(peer, NOW_S, gain, (gain - GAIN) / SPREAD)


def with_good(*peers: PeerId) -> PartnerRecords:
    records = PartnerRecords()
    for peer in peers:
        meet(records, peer, 2 * GOOD_PROBES)
    return records


def paced(steps: int, our_steps: int, num: int = 4) -> PartnerRecords:
    """Records of a partner that makes so many steps in so many of ours, over several meetings."""
    records = PartnerRecords()
    for number in range(1, num + 2):
        records.counted_steps(A, 100 + number * steps, 50 + number * our_steps)
    return records


# --------------------------------------------------------------------------- pace


@pytest.mark.parametrize(
    ("steps", "our_steps", "part"), [(10, 80, 0.125), (10, 20, 0.5), (8, 10, 1.0), (10, 10, 1.0), (80, 10, 1.0), (0, 20, 0.0)]
)
def test_a_slower_partner_is_merged_by_its_pace(steps: int, our_steps: int, part: float) -> None:
    assert paced(steps, our_steps).trust(A).most_part == part


def test_the_operator_reads_which_partners_are_slow() -> None:
    assert "it makes 0.25 steps in one of ours" in paced(5, 20).get(A).words()
    assert "steps in one of ours" not in paced(20, 20).get(A).words()


def test_meetings_that_come_soon_are_counted_together() -> None:
    records = paced(1, 2, num=3)  # fewer than eight own steps
    assert records.trust(A).most_part == 1.0 and not records.get(A).num_paces
    records.counted_steps(A, 100 + 5, 50 + 10)
    assert records.trust(A).most_part == 0.5


@pytest.mark.parametrize(("steps", "our_steps"), [(40, 500), (500, 20)])
def test_a_peer_that_goes_back_to_an_old_checkpoint_is_counted_anew(steps: int, our_steps: int) -> None:
    records = paced(10, 10)
    records.counted_steps(A, steps, our_steps)
    assert records.trust(A).most_part == 1.0
    for number in range(1, 40):
        records.counted_steps(A, steps + 5 * number, our_steps + 20 * number)
    assert records.trust(A).most_part == pytest.approx(0.25, abs=0.001)


def test_one_pause_costs_nothing_and_more_of_them_pass() -> None:
    records, theirs, ours, parts = paced(10, 10), 150, 100, []
    for steps in (0, 0, *[10] * 8):
        theirs, ours = theirs + steps, ours + 10
        records.counted_steps(A, theirs, ours)
        parts.append(records.trust(A).most_part)
    assert parts[0] == 1.0 > parts[1] and parts[-1] == 1.0


# --------------------------------------------------------------------------- trust


def test_trust_grows_with_accepted_probes() -> None:
    records = with_good(B, C, D)
    assert records.trust(A) == NEWCOMER == Trust(True, START_SHARE, 1.0)
    trusts = []
    for _ in range(GOOD_PROBES):
        meet(records, A, 1)
        trusts.append(records.trust(A))
    assert [trust.share for trust in trusts] == sorted({trust.share for trust in trusts})
    assert all(trust.must_probe for trust in trusts[:-1]) and trusts[-1] == PROVEN


def test_the_tokens_of_a_partner_whose_messages_help_much_count() -> None:
    records, ratios = with_good(B, C, D), []
    for _ in range(GOOD_PROBES):
        meet(records, A, 1, FAST)
        ratios.append(records.trust(A).token_ratio)
    assert ratios[: HELPING - 1] == [1.0] * (HELPING - 1) and ratios == sorted(ratios) and ratios[-1] == MAX_TOKEN_RATIO
    records.harmful(A, NOW_S)
    assert records.trust(A) == NEWCOMER, "what it has done before counts no more"


def test_the_tokens_of_a_fast_machine_that_trains_no_more_count_like_those_of_equals() -> None:
    records = with_good(B, C, D)
    meet(records, A, 100, FAST)
    assert records.trust(A).token_ratio == MAX_TOKEN_RATIO
    meet(records, A, 2 * MEMORY)
    assert records.trust(A) == PROVEN


def test_merges_without_a_probe_prove_nothing() -> None:
    records = PartnerRecords()
    for gain in (None, math.nan, math.inf):
        for _ in range(30):
            records.merged(A, NOW_S, gain, 0.0)
    assert records.trust(A) == NEWCOMER and records.get(A).merged == 90


def test_a_merge_that_changes_nothing_has_not_helped_and_one_far_below_the_typical_gain_has_harmed() -> None:
    records = PartnerRecords()
    for gain, deviation in ((0.0, 0.0), (0.01, -0.9), (-0.01, -1.1)):
        records.merged(A, NOW_S, gain, deviation)
    assert records.get(A).words() == "3 merged, probed 3 times: 1 helped, 1 harmed"


def test_messages_that_keep_helping_less_than_others_cost_the_trust_and_then_count_as_harmful() -> None:
    records = with_good(B, C, A)
    is_harmful, doubts = [], []
    for _ in range(4):
        is_harmful.append(records.merged(A, NOW_S, -0.06, -2.0))
        doubts.append(records.is_doubtful(A))
        assert records.trust(A) == (NEWCOMER if doubts[-1] or is_harmful[-1] else PROVEN)
    assert doubts == [False, False, True, False] and is_harmful == [False, False, False, True]
    assert records.is_shunned(A, NOW_S) and records.get(A).refused == 1
    assert all(records.trust(peer) == PROVEN for peer in (B, C))
    meet(records, A, 3 * GOOD_PROBES)
    assert records.trust(A) == PROVEN, "it does not recover"


def test_one_message_alone_is_no_series() -> None:
    records = PartnerRecords()
    for _ in range(GOOD_PROBES):
        records.merged(A, NOW_S, GAIN, 0.0)
    assert not records.merged(A, NOW_S, -1.0, -100.0) and not records.is_doubtful(A)


def test_honest_partners_with_unlike_texts_keep_their_trust() -> None:
    """Means that differ by a quarter of the spread of single gains, over many meetings."""
    num_doubts, num_refused, num_meetings = 0, 0, 0
    for seed in range(5):
        records, draws = PartnerRecords(), random.Random(seed)
        means = {peer: draws.gauss(GAIN, SPREAD / 4) for peer in MANY[:8]}
        for turn in range(100):
            for peer, mean in means.items():
                meet(records, peer, 1, mean, 1000 * seed + turn)
                num_doubts += records.is_doubtful(peer)
                num_meetings += 1
        num_refused += sum(records.get(peer).refused for peer in means)
    assert num_doubts <= 0.02 * num_meetings and num_refused <= 0.002 * num_meetings


@pytest.mark.parametrize(
    ("ratio", "claimed", "own", "counted"),
    [(1.0, 5000, 100, 100), (1.0, 50, 100, 50), (16.0, 5000, 100, 1600), (2.5, 1000, 3, 7), (1.0, 5000, 0, 5000), (16.0, 0, 10, 0)],
)
def test_counted_tokens(ratio: float, claimed: int, own: int, counted: int) -> None:
    assert Trust(token_ratio=ratio).counted_tokens(claimed, own) == counted


# --------------------------------------------------------------------------- rests


def rests_s(records: PartnerRecords, peer: PeerId, num: int) -> list[float]:
    """The lengths of the rests after so many harmful messages, each sent when the rest before has ended."""
    now_s, rests = NOW_S, []
    for _ in range(num):
        records.harmful(peer, now_s)
        until_s = records.rests_until_s(peer)
        rests.append(until_s - now_s)
        assert records.is_shunned(peer, now_s) and not records.trust(peer).token_ratio > 1.0
        assert until_s == math.inf or not records.is_shunned(peer, until_s)
        now_s = min(until_s, now_s + 10 * RESTS_S[3])
    return rests


def test_rests_grow_to_hours_after_three_harmful_messages_and_last_for_good_after_five() -> None:
    records = with_good(B)
    assert rests_s(records, A, 7) == [*RESTS_S, math.inf, math.inf]
    assert records.shunned_for_good() == [A]
    assert "for good" in records.why_shunned(A, NOW_S)
    records.forgive(A)
    assert not records.shunned_for_good() and records.trust(A) == NEWCOMER and not records.is_shunned(A, NOW_S)


def test_nobody_rests_for_good_while_the_fault_may_be_our_own() -> None:
    assert rests_s(PartnerRecords(), A, 7) == [*RESTS_S[:HOURS], *[RESTS_S[HOURS - 1]] * 4]


def test_an_honest_partner_that_was_refused_once_recovers() -> None:
    records = with_good(A, B, C)
    before = records.trust(A)
    records.harmful(A, NOW_S)
    assert records.trust(A) == NEWCOMER and records.rests_until_s(A) == NOW_S + RESTS_S[0]
    meet(records, A, GOOD_PROBES)
    assert records.trust(A) == before == PROVEN
    assert rests_s(records, A, 1) == [RESTS_S[0]], "it is still marked"


def test_two_good_messages_make_up_for_a_harmful_one_but_one_does_not() -> None:
    for num_good, longest_s in ((1, math.inf), (2, RESTS_S[0])):
        records = with_good(B)
        for _ in range(20):
            records.harmful(A, NOW_S)
            meet(records, A, num_good)
        records.harmful(A, NOW_S)
        assert records.get(A).rest_s == longest_s


@pytest.mark.parametrize("rate", [0.01, 0.03])
def test_partners_that_are_refused_by_chance_never_rest_for_hours(rate: float) -> None:
    draws, records = random.Random(3), with_good(*MANY[:4])
    for _ in range(1500):
        for peer in MANY[:4]:
            if draws.random() < rate:
                records.harmful(peer, NOW_S)
            else:
                records.merged(peer, NOW_S, gain := draws.gauss(GAIN, SPREAD), (gain - GAIN) / SPREAD)
            assert records.get(peer).rest_s < RESTS_S[2]


def test_a_partner_rests_after_rejections_in_a_row_until_our_weights_are_replaced() -> None:
    records = with_good(B)
    for number in range(1, 1100):
        records.rejected(A, NOW_S)
        rest_s = records.rests_until_s(A) - NOW_S if number >= REJECTIONS else 0.0
        assert rest_s == (0.0 if number < REJECTIONS else min(REJECTED_REST_S[1], REJECTED_REST_S[0] * 2 ** min(9, number - REJECTIONS)))
        assert records.is_shunned(A, NOW_S) == (number >= REJECTIONS)
    records.harmful(C, NOW_S)
    records.rejected(C, NOW_S)
    records.forget_rejections()
    assert not records.is_shunned(A, NOW_S) and records.is_shunned(C, NOW_S) and not records.shunned_for_good()
    records.rejected(A, NOW_S)
    records.rejected(A, NOW_S)
    meet(records, A, 1)
    records.rejected(A, NOW_S)
    assert not records.is_shunned(A, NOW_S), "a merge in between counts"


def test_a_rest_after_rejections_does_not_shorten_a_longer_one() -> None:
    records = with_good(B)
    for _ in range(3):
        records.harmful(A, NOW_S)
    for _ in range(REJECTIONS):
        records.rejected(A, NOW_S + 60.0)
    assert records.rests_until_s(A) == NOW_S + RESTS_S[2]


def test_a_clock_that_is_set_back_ends_a_rest_and_one_that_was_ahead_does_not_extend_it() -> None:
    records = with_good(B)
    records.harmful(A, NOW_S)
    assert not records.is_shunned(A, NOW_S - 3600.0)
    records.harmful(A, NOW_S - 3600.0)
    assert records.rests_until_s(A) == NOW_S - 3600.0 + RESTS_S[1]


def test_reasons_fit_a_refusal() -> None:
    records = with_good(B)
    for _ in range(9):
        records.harmful(A, NOW_S)
        records.rejected(C, NOW_S)
    for peer in (A, C, D):
        assert 10 < len(records.why_shunned(peer, NOW_S)) < REFUSAL_DETAIL_CHARS
    assert [rest_text(rest_s) for rest_s in (0.2, 60.0, 120.0, 14400.0, math.inf)] == [
        "for 1 s", "for 60 s", "for 2 min", "for 4.0 hours", "for good",
    ]  # fmt: skip


# --------------------------------------------------------------------------- groups


def with_origins(num_good: int, num_harmful: int) -> tuple[PartnerRecords, PeerId]:
    """Records of peers with one invite, good and harmful ones, and one more peer with that invite; the others have another."""
    members = {*MANY[: num_good + num_harmful + 1]}
    records = PartnerRecords(lambda peer: ("invite",) if peer in members else ("another",))
    meet(records, A, GOOD_PROBES)
    good, harmful = MANY[:num_good], MANY[num_good : num_good + num_harmful]
    for peer in good:
        meet(records, peer, GOOD_PROBES)
    for peer in harmful:
        records.harmful(peer, NOW_S)
    return records, MANY[num_good + num_harmful]


@pytest.mark.parametrize(
    ("num_good", "num_harmful", "newcomer_rests_s"),
    [(0, 1, 0.0), (0, 2, RESTS_S[0]), (0, 4, RESTS_S[2]), (0, 20, RESTS_S[2]), (5, 1, 0.0), (5, 5, 0.0), (5, 9, RESTS_S[2])],
)
def test_newcomers_rest_where_more_of_their_origin_are_harmful_than_proven(
    num_good: int, num_harmful: int, newcomer_rests_s: float
) -> None:
    records, newcomer = with_origins(num_good, num_harmful)
    assert records.is_shunned(newcomer, NOW_S) == (newcomer_rests_s > 0)
    assert not newcomer_rests_s or records.rests_until_s(newcomer) == NOW_S + newcomer_rests_s
    assert not any(records.is_shunned(good, NOW_S) for good in MANY[:num_good]), "good members are shut out"
    assert not records.is_shunned(D, NOW_S), "another invite"


@pytest.mark.parametrize(
    ("num_good", "num_harmful", "num_proofs", "rung"), [(0, 0, 0, 0), (0, 1, 0, 1), (0, 2, 0, 2), (3, 3, 0, 0), (0, 2, 1, 0)]
)
def test_harmful_messages_of_a_group_count_once_for_a_newcomer_of_it(num_good: int, num_harmful: int, num_proofs: int, rung: int) -> None:
    records, newcomer = with_origins(num_good, num_harmful)
    meet(records, newcomer, num_proofs)
    for rest_s in RESTS_S[rung : rung + 2]:
        records.harmful(newcomer, NOW_S)
        assert records.get(newcomer).rest_s == rest_s


def test_a_harmful_peer_does_not_count_beside_itself() -> None:
    records = PartnerRecords(lambda _: ("invite",))
    records.harmful(A, NOW_S)
    records.harmful(B, NOW_S + 100.0)
    assert [records.is_shunned(peer, NOW_S + 101.0) for peer in (A, B)] == [False, True]


def test_the_origin_of_a_peer_that_is_out_of_sight_is_remembered() -> None:
    in_sight = {A, B}
    records = PartnerRecords(lambda peer: ("invite",) if peer in in_sight else ())
    for peer in (A, B):
        records.harmful(peer, NOW_S)
    in_sight = {C}
    for peer in (A, B):
        records.rejected(peer, NOW_S)
    assert records.is_shunned(C, NOW_S)


def test_keys_of_one_invite_cost_few_exchanges() -> None:
    """A stranger with ever new keys of one invite, beside honest members of the same: how many of its messages are heard in a day."""
    records, _ = with_origins(5, 0)
    harmful = ids(*(somebody(1000 + number) for number in range(300)))
    records = PartnerRecords(lambda peer: ("invite",))
    for peer in MANY[:5]:
        meet(records, peer, GOOD_PROBES)
    heard = 0
    for number, key in enumerate(harmful):
        now_s = NOW_S + number * 288.0
        if not records.is_shunned(key, now_s):
            records.harmful(key, now_s)
            heard += 1
    assert heard <= 5 + 3 + 24 / 4 + 1
    assert not any(records.is_shunned(peer, NOW_S) for peer in MANY[:5])


# --------------------------------------------------------------------------- keeping

WORDS = st.one_of(
    st.tuples(st.just("merged"), st.one_of(st.none(), st.floats(-1e3, 1e3)), st.floats(0.0, 10.0)),
    st.tuples(st.sampled_from(["harmful", "rejected", "forgive"])),
    st.tuples(st.just("forget_rejections")),
    st.tuples(st.just("counted_steps"), st.integers(0, 1 << 35), st.integers(0, 1 << 35)),
)
STORIES = st.lists(st.tuples(st.integers(0, 5), st.floats(0.0, 1e6), WORDS), max_size=60)


def lived(story: list[tuple[int, float, tuple[object, ...]]], records: PartnerRecords) -> float:
    now_s = NOW_S
    for number, later_s, (verb, *arguments) in story:
        now_s += later_s
        peer: tuple[object, ...] = () if verb == "forget_rejections" else (MANY[number],)
        when = (now_s,) if verb in ("merged", "harmful", "rejected") else ()
        getattr(records, str(verb))(*peer, *when, *arguments)
    return now_s


@settings(max_examples=100)
@given(STORIES)
def test_whatever_happens_trust_and_rests_keep_their_bounds_and_survive_a_restart(
    story: list[tuple[int, float, tuple[object, ...]]],
) -> None:
    records = PartnerRecords(lambda peer: (str(peer)[-1],))
    now_s = lived(story, records)
    again = PartnerRecords(lambda peer: (str(peer)[-1],))
    again.load(records.to_bytes())
    for peer in MANY[:6]:
        trust, record = records.trust(peer), records.get(peer)
        assert START_SHARE <= trust.share <= 1.0 and 1.0 <= trust.token_ratio <= MAX_TOKEN_RATIO
        assert 0.0 <= trust.most_part <= 1.0
        assert replace(trust, most_part=1.0) == PROVEN or trust.must_probe
        assert record.helped + record.harmed <= record.probed <= record.merged
        assert records.is_shunned(peer, now_s) <= (records.rests_until_s(peer) > now_s)
        assert (again.trust(peer), asdict(again.get(peer))) == (trust, asdict(record))
        assert again.rests_until_s(peer) == records.rests_until_s(peer)
        assert again.is_shunned(peer, now_s) == records.is_shunned(peer, now_s)


def test_the_records_are_bounded_and_good_ones_are_kept() -> None:
    records = with_good(A)
    for _ in range(5):
        records.harmful(B, NOW_S)
    peers = ids(*(somebody(1000 + number) for number in range(MAX_RECORDS + 50)))
    for peer in peers:
        records.merged(peer, NOW_S, None, 0.0)
    assert len(records.peers()) == MAX_RECORDS and peers[-1] in records.peers() and peers[0] not in records.peers()
    assert records.trust(A) == PROVEN and records.shunned_for_good() == [B]
    assert len(records.to_bytes()) < 512 * MAX_RECORDS


@settings(max_examples=100)
@given(st.binary(max_size=40), st.integers(0, 10_000))
def test_a_damaged_file_is_one_declared_error_and_changes_nothing(noise: bytes, place: int) -> None:
    records = with_good(A, B)
    whole = records.to_bytes()
    place %= len(whole)
    damaged = whole[:place] + noise + whole[place + len(noise) :]
    for content in (damaged, noise, whole[:place]):
        try:
            records.load(content)
        except BadSettings as error:
            assert error.hint and records.trust(A) == PROVEN
        else:
            meet(records, A, 3)
            records.harmful(A, NOW_S)
            records.load(whole)


@pytest.mark.parametrize(
    "content",
    [b"", b"[]", b"{", b'{"nobody": {}}', b"[" * 100_000, b'{"%b": {"probed": -1}}', b'{"%b": {"strikes": NaN}}', b'{"%b": {"good": 99}}'],
)
def test_unreadable_files(content: bytes) -> None:
    with pytest.raises(BadSettings):
        PartnerRecords().load(content.replace(b"%b", str(A).encode()))


def test_a_file_of_another_release_is_read() -> None:
    records = PartnerRecords()
    records.load(f'{{"{A}": {{"merged": 3, "unknown": [1]}}}}'.encode())
    assert records.get(A) == replace(PartnerRecords().get(A), merged=3)
