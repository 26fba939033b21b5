"""The partner records in the home: read at the start, saved when they have changed, and corrected by the operator while the peer runs."""

from __future__ import annotations

from collections.abc import Callable

from gossamer.peer.machine.events import Event, PartnerShunned, Warned
from gossamer.peer.machine.home import Home, write_whole
from gossamer.peer.swarm.partner_records import PartnerRecords, rest_text
from gossamer.protocol.errors import BadSettings
from gossamer.protocol.identity import PeerId

SHUNNED_TOPIC, FILE_TOPIC = "shunned partners", "partner records"  # of warnings
NAMED = 5  # partners in a warning


class PartnerFile:
    """Keeps the records of one peer in its home. `emit` gets a warning while partners rest for good."""

    def __init__(self, home: Home, records: PartnerRecords, emit: Callable[[Event], None]) -> None:
        self._home, self._records, self._emit = home, records, emit
        self._num_saved = 0
        self._warned = ""

    def load(self) -> None:
        """Read the records of earlier starts. An unreadable file counts as none, with a warning."""
        try:
            if self._home.partners.exists():
                self._records.load(self._home.partners.read_bytes())
        except (OSError, BadSettings) as error:
            self._emit(Warned(FILE_TOPIC, f"{error}; this peer goes on without them"))
        self._num_saved = self._records.num_changes

    def save(self) -> None:
        """Forget what the operator has forgiven, save the records if they have changed, and warn. Raises OSError."""
        self._forgive()
        self._warn()
        if self._records.num_changes != self._num_saved:
            write_whole(self._home.partners, self._records.to_bytes(), is_synced=False)
            self._num_saved = self._records.num_changes

    def _forgive(self) -> None:
        if self._home.forgiven.exists():
            for peer in forgiven(self._home):
                self._records.forgive(peer)
            self._home.forgiven.unlink()

    def _warn(self) -> None:
        words = shunned_warning(self._records.shunned_for_good())
        if words != self._warned:
            self._emit(Warned(SHUNNED_TOPIC, words))
            self._warned = words


def forgiven(home: Home) -> list[PeerId]:
    """Return the peers that the operator has forgiven and that are still to be forgotten."""
    try:
        return [PeerId.from_text(line) for line in home.forgiven.read_text().split()]
    except (OSError, ValueError, BadSettings):
        return []


def shunned(partner: PeerId, evidence: str, now_s: float, rest_s: float) -> PartnerShunned:
    """Describe for the event log why a partner rests, and for how long. `now_s`: Unix time."""
    return PartnerShunned(str(partner), f"{evidence}; the partner rests {rest_text(rest_s)}", now_s + rest_s)


def shunned_warning(peers: list[PeerId]) -> str:
    """Return the warning about partners that rest for good; empty if there are none."""
    if not peers:
        return ""
    named = ", ".join(peer.short() for peer in peers[:NAMED]) + (" and others" if len(peers) > NAMED else "")
    return (
        f"partners that are not met any more, because message after message would have raised the loss here: {named}; "
        "`peer peers` shows the records, `peer peers --forgive PEERID` gives another chance"
    )
