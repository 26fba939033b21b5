"""A run of many members: their records are signed, checked and folded by the code that real peers use, over virtual hours."""

from __future__ import annotations

import asyncio
import hashlib
import math
import random
import time
from dataclasses import dataclass, replace

from gossamer.peer.machine.events import Event, MembersSeen
from gossamer.peer.machine.run_view import RunView
from gossamer.peer.swarm.address_book import AddressBook
from gossamer.peer.swarm.member_report import MemberReporter
from gossamer.peer.swarm.peer_exchange import PeerExchange
from gossamer.peer.swarm.swarm_time import SwarmTime
from gossamer.protocol.identity import Identity
from gossamer.protocol.memory.virtual_time import run
from gossamer.protocol.messages.figures import MemberFigures, loss_milli
from gossamer.protocol.messages.records import MemberRecord
from gossamer.protocol.messages.terms import RunTerms
from gossamer.protocol.run.manifest import Manifest

HOURS, EVERY_S = 2.0, 60.0
STEP_S = 4.0


@dataclass
class Life:
    """When a member takes part, and how: seconds since the beginning."""

    identity: Identity
    joins_s: float
    speed: float  # of the run's steps, the share that it makes
    leaves_s: float = math.inf
    dies_s: float = math.inf
    pauses_s: float = math.inf
    claims_all: bool = False  # a member that lies about everything


def lives(num_members: int) -> list[Life]:
    """Return that many members; some come later, leave, die, pause, and one lies."""
    rng = random.Random(7)
    found = []
    for number in range(num_members):
        identity = Identity(hashlib.sha256(f"member {number}".encode()).digest())
        begin_s = 0.0 if number < num_members // 2 else rng.uniform(0, 0.9 * HOURS * 3600)
        life = Life(identity, begin_s, rng.uniform(0.6, 1.0))
        match number % 13:
            case 5:
                life.leaves_s = begin_s + rng.uniform(600, 3600)
            case 7:
                life.pauses_s = begin_s + rng.uniform(300, 3000)
            case 9:
                life.dies_s = HOURS * 3600 - rng.uniform(120, 290)
        found.append(life)
    if num_members > 10:
        found[11].claims_all = True
    return found


def run_of(num_members: int, manifest: Manifest, ends_s: float | None = None) -> RunView:
    """Return what the first member has seen of a run of `HOURS` that ends now, or at `ends_s` (Unix seconds)."""
    view, members = RunView(), lives(num_members)
    begin_s = (time.time() if ends_s is None else ends_s) - HOURS * 3600
    view.begin(manifest.run_id.hex(), manifest.run.total_steps, manifest.step_tokens)
    terms, me, clock = RunTerms.from_manifest(manifest), members[0].identity.peer_id, [begin_s]

    def take(event: Event) -> None:
        assert isinstance(event, MembersSeen)
        view.take(replace(event, ts=clock[0]))

    async def story() -> None:
        exchange = PeerExchange(terms, AddressBook(me), SwarmTime(lambda: clock[0]), random.Random(0))
        reporter = MemberReporter(take, exchange)
        rng = random.Random(3)
        for number in range(int(HOURS * 3600 / EVERY_S) + 1):
            clock[0] = begin_s + number * EVERY_S
            for life in members:
                record = record_of(life, manifest, begin_s, clock[0], rng)
                if record is not None and life.identity.peer_id == me:
                    exchange.own = record
                elif record is not None:
                    exchange.take(record)
            reporter.report()
            view.look(clock[0])
            await asyncio.sleep(EVERY_S)

    run(story())
    return view


def record_of(life: Life, manifest: Manifest, begin_s: float, now_s: float, rng: random.Random) -> MemberRecord | None:
    """Return what a member publishes at a time; None while it is not there."""
    passed_s = now_s - begin_s
    if passed_s < life.joins_s or passed_s >= life.dies_s or passed_s >= life.leaves_s + EVERY_S:
        return None
    step = 600 + int(passed_s / STEP_S)
    own = max(0, int((min(passed_s, life.pauses_s) - life.joins_s) / STEP_S * life.speed))
    loss = 1.45 + 4.0 * math.exp(-step / 700) + rng.gauss(0, 0.04)
    figures = MemberFigures(own, loss_milli(loss), int(begin_s + life.joins_s), int(own * 0.11))
    tokens = own * manifest.step_tokens
    if life.claims_all:
        step, tokens, figures = 1 << 48, 1 << 53, MemberFigures(1 << 30, loss_milli(0.001), 1, 1 << 34)
    return MemberRecord(
        run_id=manifest.run_id,
        peer_id=life.identity.peer_id,
        addresses=(),
        global_step=step,
        finished=False,
        sequence=int(now_s),
        expires_s=int(now_s) + (1 if passed_s >= life.leaves_s else 300),
        paused=passed_s >= life.pauses_s,
        tokens=tokens,
        figures=figures,
    ).signed(life.identity)
