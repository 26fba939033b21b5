"""A signed statement of one's own part in a run: who holds the file can show that the member's key signed these figures, and no more."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from gossamer.protocol import limits
from gossamer.protocol.errors import BadMessage, BadSettings, BadSignature
from gossamer.protocol.identity import Identity, PeerId, signable

CONTEXT: Final = b"gossamer/credit/1"
MOST_BYTES: Final = 16 * limits.KIB
Count = Annotated[int, Field(ge=0, le=limits.TOKENS)]
Seconds = Annotated[int, Field(ge=0, le=limits.UNIX_SECONDS)]
_HINT: Final = "ask the member for the file that its `peer credit` has printed"


class Credit(BaseModel):
    """One member's part in one run, as it states it itself, over all its starts."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    run_id: str = Field(pattern=r"^[0-9a-f]{64}$")
    run: str = Field(min_length=1, max_length=200)  # the run's name
    peer_id: str = Field(max_length=64)  # base58; its key signs
    unit: str = Field(min_length=1, max_length=32)  # what training is counted in
    tokens: Count  # trained, in this unit
    own_steps: Count
    meetings: Count  # completed
    sent_bytes: Count  # in meetings
    received_bytes: Count
    seconds: Count  # that the peer ran
    watt_hours: Count
    joined_s: Seconds  # Unix time
    signed_s: Seconds  # Unix time

    def to_sign(self) -> bytes:
        """Return the bytes that the signature covers: the fields in the order of their names, as JSON."""
        return signable(CONTEXT, json.dumps(self.model_dump(), sort_keys=True, separators=(",", ":")).encode())


class SignedCredit(BaseModel):
    """A statement and its signature, as the file holds them."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    credit: Credit
    signature: str = Field(pattern=r"^[0-9a-f]{128}$")  # Ed25519


def signed_credit(status: Mapping[str, Any], run: str, identity: Identity, now_s: float) -> SignedCredit:
    """State and sign the part of the peer with this status, as `peer status --json` shows it. `run`: the run's name."""
    life = status["lifetime"]
    whole = {name: min(limits.TOKENS, max(0, round(life[name]))) for name in ("meetings", "seconds", "watt_hours", "sent", "received")}
    credit = Credit(
        run_id=status["run_id"],
        run=run,
        peer_id=str(identity.peer_id),
        unit=status["unit"],
        tokens=status["tokens"],
        own_steps=status["own_steps"],
        meetings=whole["meetings"],
        sent_bytes=whole["sent"],
        received_bytes=whole["received"],
        seconds=whole["seconds"],
        watt_hours=whole["watt_hours"],
        joined_s=int(life["joined"]),
        signed_s=int(now_s),
    )
    return SignedCredit(credit=credit, signature=identity.sign(credit.to_sign()).hex())


def verified_credit(file: Path) -> Credit:
    """Return the statement in a file. Raises BadSettings unless the key of the peer that it names has signed it as it stands."""
    try:
        with file.open("rb") as opened:
            text = opened.read(MOST_BYTES + 1)
    except OSError as error:
        raise BadSettings(f"{file} cannot be read: {error.strerror}", hint=_HINT) from error
    try:
        if len(text) > MOST_BYTES:
            raise ValueError("it is too large")
        signed = SignedCredit.model_validate_json(text)
    except (ValidationError, ValueError) as error:
        raise BadSettings(f"{file} is not a statement of `peer credit`", hint=_HINT) from error
    try:
        PeerId.from_text(signed.credit.peer_id).verify(bytes.fromhex(signed.signature), signed.credit.to_sign())
    except (BadSignature, BadMessage) as error:
        raise BadSettings(f"{file} was changed after it was signed, or {signed.credit.peer_id} has not signed it", hint=_HINT) from error
    return signed.credit
