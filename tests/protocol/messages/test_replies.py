"""The encoding of the replies of peer exchange and of the run's curve, which are untrusted input."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gossamer.protocol.errors import BadMessage
from gossamer.protocol.limits import ADDRESS_CHARS, CURVE_FIELDS, CURVE_POINTS, MAX_LISTED, RECORD_BYTES
from gossamer.protocol.messages.replies import CURVE_BYTES, PEER_LIST_BYTES, SEEN_BYTES, PeerList, RunCurve
from gossamer.protocol.wire import peer_pb2
from tests.protocol.samples import RECORD

NAMED = PeerList((RECORD.to_bytes(),), 1_800_000_000_000, "/ip4/203.0.113.7/tcp/4001")


def test_an_introduction_survives_a_round_trip() -> None:
    assert PeerList.from_bytes(NAMED.to_bytes()) == NAMED
    largest = PeerList((b"r" * RECORD_BYTES,) * MAX_LISTED, NAMED.unix_ms, "x" * ADDRESS_CHARS)
    assert len(largest.to_bytes()) <= PEER_LIST_BYTES and len(replace(largest, members=()).to_bytes()) <= SEEN_BYTES


@pytest.mark.parametrize(
    "data",
    [
        b"\xff",
        bytes(PEER_LIST_BYTES + 1),
        peer_pb2.PeerList(members=[b""] * (MAX_LISTED + 1)).SerializeToString(),
        peer_pb2.PeerList(members=[b"r" * (RECORD_BYTES + 1)]).SerializeToString(),
        peer_pb2.PeerList(unix_ms=1 << 60).SerializeToString(),
        peer_pb2.PeerList(observed="x" * (ADDRESS_CHARS + 1)).SerializeToString(),
    ],
    ids=["noise", "too large", "too many", "a large record", "a far time", "a long address"],
)
def test_an_invalid_introduction_is_rejected(data: bytes) -> None:
    with pytest.raises(BadMessage):
        PeerList.from_bytes(data)


def curve(**changed: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    return {name: (5, 6) for name in CURVE_FIELDS} | changed


def test_a_curve_survives_a_round_trip_and_the_largest_fits() -> None:
    assert RunCurve.from_bytes(RunCurve(**curve()).to_bytes()) == RunCurve(**curve())
    assert RunCurve.from_bytes(b"") == RunCurve()
    largest = {name: tuple(range(most - CURVE_POINTS + 1, most + 1)) for name, most in CURVE_FIELDS.items()}
    assert len(RunCurve(**largest).to_bytes()) <= CURVE_BYTES


@pytest.mark.parametrize(
    "changed",
    [
        {"times_s": (6, 6)},
        {"times_s": (7, 6)},
        {"steps": (5,)},
        {"lows_milli": (6, 6)},
        {"highs_milli": (5, 5)},
        {"losses_milli": (5, 1 << 40)},
        {"times_s": (5, 1 << 50)},
        {name: tuple(range(CURVE_POINTS + 1)) for name in CURVE_FIELDS},
    ],
)
def test_a_curve_that_cannot_be_one_is_rejected(changed: dict[str, tuple[int, ...]]) -> None:
    wire = peer_pb2.RunCurve(**curve(**changed))
    with pytest.raises(BadMessage):
        RunCurve.from_bytes(wire.SerializeToString())
