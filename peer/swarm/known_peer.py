"""What this peer knows of another: where it may be, what it reports, and how calls, meetings and hops with it went."""

from __future__ import annotations

import math
from dataclasses import dataclass

from gossamer.protocol.addresses import network_of, route
from gossamer.protocol.identity import PeerId
from gossamer.protocol.messages.records import MemberRecord
from gossamer.protocol.run.invite import Credential

TIMEOUT = (3.0, 5.0)  # for a silent partner: times the typical duration of its meetings, and the least number of seconds
PARTNER_HOPS = 16  # answered between us in a staged run, until a peer is no stranger to admission...
HOP_S = 2.0  # ...of each span of so long one counts: many keys cannot earn that in a moment


@dataclass(slots=True)
class KnownPeer:
    """One peer in the book."""

    peer_id: PeerId
    addresses: tuple[str, ...] = ()
    global_step: int = 0
    finished: bool = False  # it reports that it has reached the end of the run
    paused: bool = False  # it reports that it is paused: it answers no call, and its global step stands still
    seen_s: float = 0.0  # when a record, a call, a meeting or a hop last showed it
    global_step_at_s: float = -math.inf  # when it last sent us its global step itself, in a Hello
    failures: int = 0  # in a row: not reached, or broke off
    refusals: int = 0  # in a row: answered, but did not meet us
    backs_off_until_s: float = 0.0  # it is not called
    unwelcome_until_s: float = 0.0  # its own calls are refused
    rests_until_s: float = 0.0  # both, whatever it announces or answers: what it has sent is wrong
    network: str = ""  # in which a connection has shown it; empty: it shares a relay with others, or no connection has
    was_met: bool = False  # a meeting with it completed in an earlier session
    num_hops: int = 0  # in a staged run: answered between us, in this session or earlier ones; one in HOP_S, PARTNER_HOPS at most
    hop_s: float = -math.inf  # when the last one of these was
    meetings: int = 0  # completed with it
    breaks_off: bool = False  # whether it broke off the last meeting
    typical_s: float = 0.0  # recent duration of its meetings; the last one's, if that was longer
    record: MemberRecord | None = None  # its newest, for peer exchange
    shown: Credential | None = None  # in its last Hello

    @property
    def credential(self) -> Credential | None:
        """The credential in its newest record; without a record, which nobody has to send, that of its last Hello."""
        return self.record.credential if self.record else self.shown

    @property
    def origins(self) -> tuple[str, str]:
        """Its network and its invite, which many identities of one operator share; empty strings where unknown."""
        network = next((network_of(address) for address in self.addresses if route(address) != "local"), "")
        credential = self.shown or self.credential
        return network, str(credential.bearer or "") if credential else ""

    @property
    def seen_origins(self) -> list[str]:
        """Its invite, and the network in which a connection has shown it: what it cannot choose."""
        return [origin for origin in (self.network, self.origins[1]) if origin]

    @property
    def place(self) -> object:
        """The network in which a connection has shown it, where many of one operator are; the peer itself where that is unknown."""
        return self.network or self.peer_id

    @property
    def stage(self) -> int:
        """The stage that it holds in a staged run, plus one; 0: unknown, or none."""
        return self.record.stage if self.record else 0

    @property
    def has_global_step(self) -> bool:
        """Whether its global step is known."""
        return self.record is not None or self.global_step > 0

    @property
    def has_met(self) -> bool:
        """Whether a meeting with it has ever completed: only then it has a vote."""
        return self.meetings > 0 or self.was_met

    @property
    def has_carried(self) -> bool:
        """Whether a hop was ever answered between us."""
        return self.num_hops > 0

    @property
    def has_worked(self) -> bool:
        """Whether a meeting or a hop with it has ever completed."""
        return self.has_met or self.has_carried

    @property
    def is_partner(self) -> bool:
        """Whether a meeting, or hops for half a minute, completed with it: it is no stranger to admission, and keeps its entry."""
        return self.has_met or self.num_hops >= PARTNER_HOPS

    @property
    def is_familiar(self) -> bool:
        """Whether we have met it and nothing has failed since."""
        return self.meetings > 0 and not self.failures

    @property
    def timeout_s(self) -> float:
        """How long it may be silent in a meeting, by earlier meetings and waits; infinite for a peer that is not familiar."""
        times, least_s = TIMEOUT
        return max(least_s, times * self.typical_s) if self.is_familiar else math.inf

    @property
    def callable_s(self) -> float:
        """From when it may be called."""
        return max(self.backs_off_until_s, self.rests_until_s)

    @property
    def welcome_s(self) -> float:
        """From when its calls are answered."""
        return max(self.unwelcome_until_s, self.rests_until_s)

    def is_newer(self, record: MemberRecord) -> bool:
        """Return whether this record is newer than ours."""
        return self.record is None or record.supersedes(self.record)

    def end_back_off(self) -> None:
        """Forget its failures, and call and answer it again; a rest goes on."""
        self.failures, self.backs_off_until_s, self.unwelcome_until_s = 0, 0.0, 0.0
