"""Revocations, the closing of invites that are used up, and this peer's own credential.

A revoked peer is not called any more, and its Hellos, requests and records fail the check against the run's terms. It may still fetch the
revocation: only the issuer's signature ends a node; refusals by other peers lead to a warning. An invite's expiry limits who joins: its
issuer gives any member that asks a credential for the whole run, in the member's own name (peer/sync/server.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import Callable
from dataclasses import dataclass

from gossamer.peer.machine.events import Event, Warned
from gossamer.peer.machine.home import Home, write_whole
from gossamer.peer.swarm.issued_invites import IssuedInvites
from gossamer.peer.swarm.membership import Membership, keep_revocations
from gossamer.peer.swarm.peer_exchange import PeerExchange
from gossamer.peer.sync.client import FetchClient
from gossamer.protocol.errors import BadMessage, GossamerError, PeerMisbehaved, RefusalCode, Refused, RunRefusesUs
from gossamer.protocol.identity import PeerId
from gossamer.protocol.messages.messages import ContentsKind
from gossamer.protocol.messages.revocations import Revocation, need_credential, read_revocations
from gossamer.protocol.messages.terms import RunTerms, check_revocation
from gossamer.protocol.run.invite import FOR_THE_RUN, Credential, closing_of
from gossamer.protocol.tasks import loop_s

log = logging.getLogger(__name__)

ROUND_S = 30.0
ASK_S = 10.0  # for an answer
DAY_S = 24 * 3600
WARN_S = 7 * DAY_S
UNWANTED = 3
TOPIC = "membership"


@dataclass(slots=True)
class MembershipWatch:
    """Take in revocations, and get this peer a credential in its name. `warned` is the warning that the operator sees now."""

    home: Home
    membership: Membership
    client: FetchClient
    gossip: PeerExchange
    issued: IssuedInvites
    rng: random.Random
    emit: Callable[[Event], None]
    warned: str = ""
    _num_unwanted: int = 0  # answers in a row that we are no member

    @property
    def terms(self) -> RunTerms:
        """The terms of the run; they hold its revocations."""
        return self.membership.terms

    async def run(self) -> None:
        """Ask and warn until cancelled. Raises RunRefusesUs once an issuer has revoked this peer."""
        while True:
            self.load_revocations()
            await self._close_used_up()
            self._pass_over_revoked()
            await self._ask_for_revocations()
            self._end_if_revoked()
            await self._ask_to_be_named()
            self._warn()
            await asyncio.sleep(self.rng.uniform(0.5, 1.5) * ROUND_S)

    def load_revocations(self) -> None:
        """Add the revocations in the home; a damaged file is ignored, since other peers hold them too."""
        with contextlib.suppress(OSError, PeerMisbehaved):
            self.take(self.home.revocations.read_bytes())

    def take(self, data: bytes) -> bool:
        """Add another peer's revocations; return whether any was new. Raises BadMessage or BadSignature; those before the bad one stay."""
        is_new, known = False, set(self.terms.revocations)
        for revocation in read_revocations(data):
            if revocation not in known:  # a whole set comes with each new one, and a signature takes 0.3 ms
                check_revocation(revocation, self.terms)
                is_new |= self.terms.revocations.add(revocation)
        if is_new:
            self._pass_over_revoked()
        return is_new

    def _pass_over_revoked(self) -> None:
        for entry in self.gossip.book.everybody(loop_s()):
            if self.terms.revocations.cover(entry.peer_id, entry.credential):
                self.gossip.book.note_leaving(entry.peer_id, loop_s())  # not banned: it must be able to fetch the revocation

    async def _close_used_up(self) -> None:
        """As an issuer, close the invites for anybody whose uses are taken."""
        me = self.membership.identity
        if me.peer_id not in self.terms.issuers:
            return
        shown = [(entry.peer_id, entry.credential) for entry in self.gossip.book.announced(loop_s())]
        seen = [(peer, credential.bearer) for peer, credential in shown if credential and credential.bearer]
        closed = [
            Revocation(self.client.run_id, me.peer_id, closing_of(bearer), int(self.gossip.time.now_s())).signed(me)
            for bearer in self.issued.to_close(seen)
        ]
        if any([self.terms.revocations.add(revocation) for revocation in closed]):
            log.warning("an invite has been used as often as it may be, and is closed; `peer invite` writes another")
            await self._keep()

    async def _ask_for_revocations(self) -> None:
        others = [entry for entry in self.gossip.book.everybody(loop_s()) if not entry.failures]
        if not others:
            return
        other = self.rng.choice(others)
        with contextlib.suppress(GossamerError, TimeoutError, OSError):
            try:
                async with asyncio.timeout(ASK_S):
                    known = self.terms.revocations.digest()
                    data = await self.client.document(other.peer_id, other.addresses, ContentsKind.REVOCATIONS, known)
                self._num_unwanted = 0
            except Refused as refusal:
                self._num_unwanted += refusal.code is RefusalCode.NOT_INVITED
                raise
            if data and self.take(data):
                await self._keep()

    async def _keep(self) -> None:
        """Add the revocations to those in the home. A failing disk loses the copy: they hold nevertheless."""
        with contextlib.suppress(OSError):
            await asyncio.to_thread(keep_revocations, self.home, list(self.terms.revocations))

    async def _ask_to_be_named(self) -> None:
        """Ask the issuer for a credential in this peer's name that lasts for the run."""
        credential = self.membership.credential
        if credential is None or credential.not_after_s == FOR_THE_RUN or self.client.identity.peer_id in self.terms.issuers:
            return
        for issuer in [
            entry for entry in self.gossip.book.everybody(loop_s()) if entry.peer_id == credential.issuer and not entry.failures
        ]:
            with contextlib.suppress(GossamerError, TimeoutError, OSError):
                async with asyncio.timeout(ASK_S):
                    data = await self.client.document(issuer.peer_id, issuer.addresses, ContentsKind.CREDENTIAL, b"")
                self._take_over(need_credential(data), credential)
                await asyncio.to_thread(write_whole, self.home.credential, data)
                return

    def _take_over(self, named: Credential, old: Credential) -> None:
        named.check(self.client.run_id, self.client.identity.peer_id)
        if named.issuer != old.issuer or named.not_after_s != FOR_THE_RUN:
            raise BadMessage("a credential that does not replace ours")
        self.membership.own_credential.current = named

    def _left_s(self) -> float:
        credential = self.membership.credential
        return credential.not_after_s - self.gossip.time.now_s() if credential else float("inf")

    def _warn(self) -> None:
        words = membership_warning(self._left_s(), is_unwanted=self._num_unwanted >= UNWANTED)
        if words != self.warned:
            self.warned = words
            self.emit(Warned(TOPIC, words))

    def _end_if_revoked(self) -> None:
        me, credential = self.client.identity.peer_id, self.membership.credential
        if self.terms.access != "invite" or credential is None or not self.terms.revocations.cover(me, credential):
            return
        again = "then `peer join` with that"
        if self.terms.revocations.has_revoked(credential.issuer, me):
            again += " in another folder (--home DIR): this key is refused for good"
        raise RunRefusesUs(
            "the peer that wrote this peer's invite has revoked or closed it: no other peer of the run meets this one any more",
            hint=f"what it has trained is kept (`peer export`); ask the host why, and for a new invite, {again}",
        )


def membership_warning(left_s: float, *, is_unwanted: bool) -> str:
    """Return the warning about this peer's membership for its operator; empty if all is well."""
    if is_unwanted:
        return (
            "others say that this peer is no member and do not meet it: its invite may have been revoked; ask the host, and for a new one"
        )
    if left_s <= 0:
        return "this peer's membership has ended: others meet it no more; ask the host for a new invite, then `peer join` with it"
    if left_s < WARN_S:
        days = max(1, round(left_s / DAY_S))
        return (
            f"this peer's membership ends in {days} {'day' if days == 1 else 'days'}, and the issuer of its invite was "
            "not reachable to prolong it: ask the host to start its peer, or for a new invite"
        )
    return ""


def latest_credential(home: Home, from_invite: Credential | None, run_id: bytes, me: PeerId) -> Credential | None:
    """Return the credential to show: the one in the home, where it is ours, by this invite, and lasts longer than the invite's."""
    with contextlib.suppress(OSError, PeerMisbehaved):
        kept = need_credential(home.credential.read_bytes())
        kept.check(run_id, me)
        invite = from_invite or kept
        if (kept.issuer, kept.bearer) == (invite.issuer, invite.bearer) and kept.not_after_s >= invite.not_after_s:
            return kept  # of another invite it may have been revoked, which is why there is a new one
    return from_invite
