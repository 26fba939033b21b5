"""Who we are in this run, and by whose word."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from protocol.identity import Identity
from protocol.messages.terms import ModelPlan, RunTerms
from protocol.run.invite import Credential
from protocol.run.manifest import Manifest


@dataclass(frozen=True, slots=True)
class Membership:
    """Who we are in this run, by whose word, and on what terms."""

    identity: Identity
    terms: RunTerms
    credential: Credential | None
    total_steps: int  # where the run ends
    deadline_s: float  # to find a partner; and again for the meeting itself
    defer: bool  # without a partner: wait on instead of a solo step

    @classmethod
    def of(cls, identity: Identity, manifest: Manifest, credential: Credential | None, plan: ModelPlan | None = None) -> Self:
        """Take the terms from the manifest; without the model's plan they suit no meeting."""
        terms, outer = RunTerms.from_manifest(manifest, plan), manifest.outer
        return cls(identity, terms, credential, manifest.run.total_steps, outer.deadline_s, outer.no_partner == "defer")
