"""Who we are in this run, and by whose word."""

from __future__ import annotations

from dataclasses import dataclass

from protocol.identity import Identity
from protocol.messages.terms import RunTerms
from protocol.run.credential import Credential


@dataclass(frozen=True, slots=True)
class Membership:
    """Who we are in this run, and by whose word."""

    identity: Identity
    terms: RunTerms
    credential: Credential | None
    deadline_s: float  # to find a partner; and again for the meeting itself
    defer: bool  # without a partner: wait on instead of a solo step
