"""What the operator sees of a staged run: hops by outcome, lanes, and which neighbouring stage nobody holds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from gossamer.peer.machine.events import (
    Event,
    HopsCarried,
    LaneSeen,
    PipelineSeen,
    ProcessReported,
    StepsLost,
    Warned,
)
from gossamer.peer.machine.states import CARRYING, CUT_OFF, IDLE, PAUSED, REFUSED, STARVED
from gossamer.peer.pipeline.carrier import Carrier
from gossamer.peer.pipeline.commands import AnswersCompared, HopOver, SourceOpposed
from gossamer.peer.pipeline.driver import Pipeline
from gossamer.peer.swarm.address_book import AddressBook
from gossamer.protocol.errors import Refused
from gossamer.protocol.identity import PeerId
from gossamer.protocol.limits import RECORD_NEWS_S
from gossamer.protocol.messages.terms import BATCHES_AWAY, StageTerms
from gossamer.protocol.tasks import loop_s

MISSING_S = 5.0  # a shorter absence of a neighbour is not reported
WORKLESS_S = 15.0  # nor a shorter time in which the trainer has no micro-batch, though there are lanes
ONLY_S = 60.0  # without another holder of our stage, until a warning
HOPS_S = 5.0  # between two reports of hops
LOST_STEPS = 2 * BATCHES_AWAY  # no more than these are under way while nothing is lost
CLAIM_S = 60.0  # after the death of a peer, until the last record that it has signed is here
NAMED = 4  # paused holders, at most
ROUND_S = 5  # an age below a minute is rounded down to this


@dataclass(slots=True)
class StageReport:
    """Counts hops and reports changes. `look` is called about once a second.

    `gave_weights` returns whether a peer has had weights of ours since a moment; loop time.
    """

    stage: StageTerms
    book: AddressBook
    emit: Callable[[Event], None]
    gave_weights: Callable[[PeerId, float], bool]
    _outcomes: Counter[str] = field(default_factory=Counter)
    _num_repeated: int = 0
    _loss: float | None = None
    _reported: HopsCarried | None = None
    _reported_s: float = 0.0
    _whole_s: float | None = None  # when both neighbours were last there, since training began; loop time
    _worked_s: float = 0.0  # when the trainer last had a micro-batch, since training began; loop time
    _num_over: int = 0  # hops
    _without_work: tuple[str, str] = ("", "")  # the state and the reason that were reported last
    _seen: PipelineSeen | None = None
    _shared_s: float | None = None  # when another holder of our stage was last known, since training began; loop time
    _is_only: bool = False
    _followed_step: int = 0  # the highest global step of a neighbour that own trainer has followed since it went back
    _num_lost: int = 0  # steps that are not reported yet
    _lost_s: float = 0.0  # when own trainer followed over the first of them; loop time
    _refusals: dict[int, str] = field(default_factory=dict)  # the last one of each stage, counted from one
    _num_compared: int = 0
    _num_odd: int = 0
    _is_disputed: bool = False  # the last answers that were compared are unlike, and nobody can tell which are right

    def count(self, report: HopOver) -> None:
        """Count a hop that is over."""
        self._outcomes[report.outcome.value.replace(" ", "_")] += 1
        self._num_repeated += max(0, report.tries - 1)
        self._loss = report.loss if report.loss is not None else self._loss

    def compare(self, compared: AnswersCompared) -> None:
        """Count answers to the same micro-batch; warn where nobody can tell which of them are right."""
        self._num_compared += 1
        self._num_odd += compared.odd is not None
        is_disputed = compared.odd is None and bool(compared.evidence)
        if is_disputed or self._is_disputed:
            names = " and ".join(partner.short() for partner in compared.partners)
            stage = self.stage.name_of(self.stage.stage + 2)
            words = (
                f"{names} answer the same micro-batch in unlike ways ({compared.evidence}), and no other holder of {stage} can tell which "
                "is right: that micro-batch was not used; invite another peer that holds this stage"
            )
            self.emit(Warned("answers", words if is_disputed else ""))
        self._is_disputed = is_disputed

    def odd_text(self, partner: PeerId, compared: AnswersCompared) -> str:
        """Say what speaks against a holder of the next stage."""
        others = f"other holders of {self.stage.name_of(self.stage.stage + 2)}"
        return (
            f"{partner.short()} answered {compared.num_odd} micro-batches unlike {others}: {compared.evidence}; these answers were not used"
        )

    def opposed_text(self, opposed: SourceOpposed) -> str:
        """Say what speaks against a holder of the stage before."""
        others = f"all other holders of {self.stage.name_of(self.stage.stage)}"
        return f"{opposed.partner.short()} sends micro-batches that lead the weights against those of {others}: {opposed.evidence}"

    def follow(self, own_steps: int, global_step: int) -> None:
        """Note that own trainer follows a neighbour. `look` reports the steps that are lost by it, unless another peer holds our stage.

        Where another peer holds the stage its weights have these steps, and ours are merged with them.
        """
        if own_steps:
            num_steps = global_step - max(own_steps, self._followed_step)
            self._followed_step = max(self._followed_step, global_step)
            if num_steps > LOST_STEPS:
                self._lost_s = self._lost_s if self._num_lost else loop_s()
                self._num_lost += num_steps

    def go_back(self) -> None:
        """Note that own trainer's global step was set back, or that it goes on from an earlier checkpoint."""
        self._followed_step = 0

    def refused(self, stage: int, refusal: Refused) -> None:
        """Note why a holder of a stage, counted from one, refused a lane."""
        self._refusals[stage] = refusal.detail or str(refusal)

    def look(self, pipeline: Pipeline, *, is_training: bool) -> None:
        """Report what has changed."""
        carrier = pipeline.carrier
        missing = 0 if not is_training else self.stage.stage + 2 if not carrier.is_complete else 0
        missing = missing or (self.stage.stage if is_training and not self.stage.is_first and not carrier.up else 0)
        self._note_work(carrier, is_training=is_training)
        self._report_missing(carrier, missing)
        self._report_lost()
        if is_training:
            self._warn_of_only_holder()
        if loop_s() - self._reported_s >= HOPS_S:
            self._report_hops(pipeline)
            self._report_lanes(carrier)

    def _note_work(self, carrier: Carrier, *, is_training: bool) -> None:
        num_over = sum(self._outcomes.values())
        if not (is_training and self._worked_s) or num_over != self._num_over or any(hop.is_work for hop in carrier.hops.values()):
            self._worked_s, self._num_over = loop_s(), num_over

    def _report_missing(self, carrier: Carrier, missing: int) -> None:
        """Report why the trainer has no work, and when it has some again."""
        found = CARRYING, ""
        if missing:
            self._whole_s = self._whole_s or loop_s()
            if loop_s() - self._whole_s < MISSING_S:
                return
            found = self._why(missing)
        else:
            self._whole_s = loop_s()
            if loop_s() - self._worked_s >= WORKLESS_S:
                found = IDLE, self._why_idle(carrier)
        if found != self._without_work and (found[0] != CARRYING or self._without_work[0]):
            self._without_work = found if found[0] != CARRYING else ("", "")
            self.emit(ProcessReported(*found))

    @property
    def _is_shared(self) -> bool:
        """Whether another peer in sight holds our stage."""
        return any(not entry.failures for entry in self.book.claimed(self.stage.stage + 1, loop_s()))

    def _report_lost(self) -> None:
        """Report lost steps once it is known that no other peer has the weights that hold them.

        A peer that has had our weights since has no others. The record of a dead one is here for minutes.
        """
        passed_s = loop_s() - self._lost_s
        if not self._num_lost or passed_s < CLAIM_S:
            return
        claims = self.book.claimed(self.stage.stage + 1, loop_s())
        mates = [mate for mate in claims if not self.gave_weights(mate.peer_id, self._lost_s)]
        if any(mate.global_step > 0 and mate.seen_s - self._lost_s >= CLAIM_S for mate in mates):
            self._num_lost = 0
        elif not mates or passed_s >= CLAIM_S + RECORD_NEWS_S:
            self.emit(StepsLost(self._followed_step - self._num_lost, self._followed_step))
            self._num_lost = 0

    def _warn_of_only_holder(self) -> None:
        """Warn while no other peer has a copy of this stage."""
        now_s = loop_s()
        if self._shared_s is None or self._is_shared:
            self._shared_s = now_s
        hears = (self.book.heard_s or 0.0) > self._shared_s  # else our own line may be down
        is_only = now_s - self._shared_s >= ONLY_S and (hears or self._is_only)
        if is_only is not self._is_only:
            self._is_only = is_only
            words = f"no other peer holds {self.stage.name}: with this peer's disk the stage would be lost; invite another peer"
            self.emit(Warned("stage", words if is_only else ""))

    def _why(self, missing: int) -> tuple[str, str]:
        """Return the state and the reason why no holder of a stage, counted from one, carries hops with us."""
        name = self.stage.name_of(missing)
        if any(not entry.failures for entry in self.book.holders(missing, loop_s())):
            refusal = self._refusals.get(missing)
            return REFUSED, f"no holder of {name} carries hops with this peer" + (f", the last one said: {refusal}" if refusal else "")
        heard_s = self.book.heard_s
        if heard_s is not None and loop_s() - heard_s > RECORD_NEWS_S:
            age = _age(loop_s() - heard_s)
            return CUT_OFF, f"no other peer is in reach, last seen {age} ago: this peer's line may be down, or all others are"
        if names := [entry.peer_id.short() for entry in self.book.claimed(missing, loop_s()) if entry.paused]:
            return PAUSED, f"the holders of {name} are paused, or just start: {', '.join(names[:NAMED])}"
        seen_s = self.book.last_seen_s(missing)
        return STARVED, f"no holder of {name} is in reach" + ("" if seen_s is None else f", last seen {_age(loop_s() - seen_s)} ago")

    def _why_idle(self, carrier: Carrier) -> str:
        """Say where the micro-batches are that this peer's trainer waits for."""
        own, ago = self.stage.stage + 1, _age(loop_s() - self._worked_s)
        sent_s = [hop.away.sent_s for hop in carrier.hops.values() if hop.away is not None]
        if sent_s:
            oldest, plural = _age(loop_s() - min(sent_s)), "es" * (len(sent_s) > 1)
            return f"no work for {ago}: stage {own + 1} has not answered {len(sent_s)} micro-batch{plural}, the oldest for {oldest}"
        if self.stage.is_first or (carrier.hops and not self.stage.is_last):
            return f"no work for {ago}: the holders of stage {own + 1} take no micro-batch now"
        return f"no work for {ago}: no micro-batch comes from stage {own - 1}"

    def _report_hops(self, pipeline: Pipeline) -> None:
        carrier, (sent, received) = pipeline.carrier, pipeline.carried_bytes()
        now = HopsCarried(
            outcomes=dict(self._outcomes),
            repeated=self._num_repeated,
            lanes_below=len(carrier.up),
            lanes_above=len(carrier.down),
            sent=sent,
            received=received,
            loss=self._loss,
            late=carrier.num_late,
            compared=self._num_compared,
            odd=self._num_odd,
        )
        self._reported_s = loop_s()
        last = self._reported
        if last is None or (now.outcomes, now.lanes_below, now.lanes_above) != (last.outcomes, last.lanes_below, last.lanes_above):
            self._reported = now
            self.emit(now)

    def _report_lanes(self, carrier: Carrier) -> None:
        below, above = self.stage.stage, self.stage.stage + 2
        lanes = [
            LaneSeen(str(lane.partner), above, lane.last, len(lane.unanswered), lane.window, lane.usual_s if lane.answers else None)
            for lane in carrier.down.values()
        ]
        lanes += [LaneSeen(str(lane.partner), below, lane.last, len(lane.unanswered), lane.window, None) for lane in carrier.up.values()]
        there = [entry for entry in self.book.everybody(loop_s()) if not entry.failures]
        unheard = Counter(entry.stage for entry in there if loop_s() - entry.seen_s > RECORD_NEWS_S)
        heard = Counter(entry.stage for entry in there) - unheard
        heard[self.stage.stage + 1] += 1
        stages = range(1, self.stage.count + 1)
        now = PipelineSeen(tuple(lanes), tuple(heard[stage] for stage in stages), tuple(unheard[stage] for stage in stages))
        if now != self._seen:
            self._seen = now
            self.emit(now)


def _age(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds // ROUND_S * ROUND_S:.0f} s"
    return f"{seconds // 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
