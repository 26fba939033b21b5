"""An issuer's records of its invites: for whom each is and until when, how many peers it may admit, and which it has admitted.

An invite for anybody can be used offline by any number of keys. Its issuer's peer therefore gives each key that shows it a credential in
that key's own name, and closes the invite once its uses are taken. Closing ends what rests on the invite alone, not what is in a name.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Final, Generic, Self, TypeVar

from gossamer.peer.machine.home import Home, write_whole
from gossamer.protocol.errors import GossamerError
from gossamer.protocol.identity import PeerId
from gossamer.protocol.newest import keep_newest

log = logging.getLogger(__name__)

V = TypeVar("V")

USES: Final = 16  # of an invite for anybody, unless its issuer says otherwise
MAX_ADMITTED: Final = 4096  # keys cost nothing; the oldest are forgotten, but stay members
KEPT_S: Final = 90 * 24 * 3600  # after its expiry, for `peer invite --list`
LAST_ROUNDS: Final = 10  # for which a full invite stays open, so that members that rest on it come for a credential in their name


@dataclass(frozen=True, slots=True)
class IssuedInvite:
    """What is noted of an invite. Its text, a secret, is not: to revoke it takes its name alone."""

    uses: int | None  # how many peers it may admit; None: the one that it names
    issued_s: int | None = None  # Unix seconds; None: an earlier release has noted the uses alone
    expires_s: int | None = None

    @classmethod
    def from_json(cls, found: Any) -> Self:
        """Read a value of the file. Raises KeyError, TypeError or ValueError."""
        if not isinstance(found, dict):
            return cls(int(found))
        uses, issued_s, expires_s = (None if found[key] is None else int(found[key]) for key in ("uses", "issued_s", "expires_s"))
        return cls(uses, issued_s, expires_s)

    def is_long_over(self, now_s: float) -> bool:
        """Whether it expired so long ago that nobody asks for it."""
        return self.expires_s is not None and self.expires_s + KEPT_S < now_s


class IssuedInvites:
    """The issuer's files about its invites: `peer invite` adds to one, the running peer to the other."""

    def __init__(self, home: Home) -> None:
        self._home = home
        self._noted = _Table(home.invites, IssuedInvite.from_json, "its invites have no limit, and are not listed")
        self._members = _Table(home.members, PeerId.from_text, "the members so far do not count towards the limit of their invite")
        self._rounds: dict[PeerId, int] = {}  # for which an invite has been full, by its bearer key

    def noted(self) -> dict[PeerId, IssuedInvite]:
        """Return the invites by the name that revokes each: its bearer key, or the peer that it is for; the oldest first."""
        return self._noted.read()

    def uses(self) -> dict[PeerId, int]:
        """Return how many peers each invite for anybody may admit, by its bearer key; those without a limit are not listed."""
        return {name: invite.uses for name, invite in self.noted().items() if invite.uses is not None}

    def note(self, name: PeerId, invite: IssuedInvite) -> bool:
        """Note an invite; return False, and note nothing, for an invite for anybody that is noted already. Raises OSError.

        Several invites for one peer are one entry, with the latest expiry date. An invite is forgotten if it expired KEPT_S ago and has
        admitted nobody by its key.
        """
        with self._home.updating():
            noted, used, now_s = self.noted(), {*self.admitted().values()}, time.time()
            if (before := noted.pop(name, None)) is not None:
                if invite.uses is not None:
                    return False
                invite = replace(invite, expires_s=max(invite.expires_s or 0, before.expires_s or 0))
            kept = {other: one for other, one in noted.items() if other in used or not one.is_long_over(now_s)}
            self._noted.write(kept | {name: invite})
        return True

    def admitted(self) -> dict[PeerId, PeerId]:
        """Return the peers with a credential in their name, each with the bearer key of its invite."""
        return self._members.read()

    def admit(self, peer: PeerId, bearer: PeerId) -> bool:
        """Note that a peer gets a credential in its name; return False, and note nothing, if the invite's uses are taken by others."""
        admitted = self.admitted()
        if admitted.get(peer) == bearer:
            return True
        if list(admitted.values()).count(bearer) >= self.uses().get(bearer, MAX_ADMITTED):
            return False
        keep_newest(admitted, peer, bearer, MAX_ADMITTED)
        with contextlib.suppress(OSError):  # a full disk: the count is lost, the member is not
            self._members.write(admitted)
        return True

    def to_close(self, seen: Iterable[tuple[PeerId, PeerId]]) -> list[PeerId]:
        """Return the bearer keys of the invites to close in this round. `seen`: peers that announce themselves, with theirs."""
        limits = self.uses()
        if not limits:
            return []
        named = self.admitted()
        holders = {*named.items(), *seen}
        due = []
        for bearer, uses in limits.items():
            num_named = sum(its == bearer for its in named.values())
            is_full = sum(its == bearer for _, its in holders) >= uses
            self._rounds[bearer] = self._rounds.get(bearer, 0) + 1 if is_full else 0
            if num_named >= uses or self._rounds[bearer] > LAST_ROUNDS:
                due.append(bearer)
        return due


@dataclass(slots=True)
class _Table(Generic[V]):
    """A file of values by peer id, which other processes write too. It is parsed only when it has changed."""

    file: Path
    value: Callable[[Any], V]
    without: str  # what it means that the file is damaged
    _read: dict[PeerId, V] = field(default_factory=dict)
    _version: tuple[int, int, int] | None = None

    def read(self) -> dict[PeerId, V]:
        """Return a copy of the values. A damaged file counts as empty, with a warning."""
        try:
            status = os.stat(self.file)
            version = status.st_mtime_ns, status.st_size, status.st_ino
            if version != self._version:
                content = self.file.read_bytes()
                self._version, self._read = version, {}
                self._read = {PeerId.from_text(peer): self.value(text) for peer, text in json.loads(content).items()}
        except FileNotFoundError:
            self._version, self._read = None, {}
        except OSError as error:  # too many open files, say: what was read last stands, and the next call tries again
            log.warning("%s cannot be read now: %s", self.file, error.strerror)
        except (ValueError, KeyError, RecursionError, TypeError, AttributeError, GossamerError):
            log.warning("%s is damaged: %s; restore the file, or delete it", self.file, self.without)
        return dict(self._read)

    def write(self, values: dict[PeerId, V]) -> None:
        """Replace the file. Raises OSError."""
        write_whole(self.file, json.dumps({str(peer): value for peer, value in values.items()}, default=_json).encode())


def _json(value: object) -> object:
    return asdict(value) if isinstance(value, IssuedInvite) else str(value)
