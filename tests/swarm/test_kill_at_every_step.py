"""A partner is killed at every message of a meeting, on either side: both end before the meeting or after it, and go on."""

from __future__ import annotations

import pytest

from tests.swarm.trials import LATE_S, QUICK_S, Death, Result, check, deaths, one_sided, trial, undisturbed

EACH = [("int8", "node"), ("modulo4", "peer")]  # a codec without and one with a sketch stage, and what dies; `make faults` has all of both
WITH_COMPANY = 8  # every so manyth trial goes on with a third peer


def play(codec: str, found: list[Death]) -> list[Result]:
    results = []
    for number, death in enumerate(found):
        result = trial(codec, death, goes_on=number % WITH_COMPANY == 0)
        check(codec, death, result)
        results.append(result)
    assert len(found) >= 19
    return results


@pytest.mark.parametrize(("codec", "what"), EACH)
def test_initiator_dies_and_is_soon_back(codec: str, what: str) -> None:
    """Its journal answers for it, so the two never differ."""
    assert not one_sided(play(codec, deaths(codec, 0, what=what, back_s=QUICK_S)))


@pytest.mark.parametrize(("codec", "what"), EACH)
def test_an_initiator_that_restarts_after_the_responder_gave_up(codec: str, what: str) -> None:
    """Only the one death that takes the decision with it leaves them different."""
    found = deaths(codec, 0, what=what, back_s=LATE_S)
    results = play(codec, found)
    assert one_sided(results) == {(True, False): 1}
    lost = next(death for death, result in zip(found, results, strict=True) if result.decided == (True, False))
    assert lost.sent == undisturbed(codec).num_messages[0][0] and not lost.is_delivered, "not the Commit that was lost"


@pytest.mark.parametrize(("codec", "what"), EACH)
def test_responder_dies(codec: str, what: str) -> None:
    """Only a responder that dies between its verdict and the decision cannot be told."""
    found = deaths(codec, 1, what=what, back_s=QUICK_S)
    results = play(codec, found)
    assert one_sided(results) == {(True, False): 2}
    num_sent, num_received = undisturbed(codec).num_messages[1]
    for death, result in zip(found, results, strict=True):
        if result.decided == (True, False):
            assert (death.sent == num_sent - 1 and death.is_delivered) or death.received == num_received, death


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize(("codec", "what"), [("int8", "peer"), ("modulo4", "trainer")])
def test_trainer_dies_after_each_request(codec: str, victim: int, what: str) -> None:
    """Before the decision nothing counts; after it, only the trainer that died has lost it."""
    num_handled = undisturbed(codec).num_handled[victim]
    found = [Death(victim, handled=k, what=what) for k in range(1, num_handled + 1)]
    for death in found:
        result = trial(codec, death, goes_on=True)
        check(codec, death, result)
        assert result.decided == ((True, True) if death.handled == num_handled else (False, False))
