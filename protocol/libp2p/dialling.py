"""Dialling on the word of records, which strangers write: only where somebody can be, and no more often than a liar's victim can bear.

Whoever signs a record may name any address in it. A hundred records that name one host would have a whole swarm call it; so a host at which
eight peers in a row were not to be found is left alone for a while.
"""

from __future__ import annotations

import asyncio
import ipaddress
from collections.abc import Callable, Sequence

from gossamer.protocol.addresses import NEAR, host_of, is_loopback, route
from gossamer.protocol.errors import Unreachable
from gossamer.protocol.identity import PeerId
from gossamer.protocol.libp2p.p2pd import Control
from gossamer.protocol.nearby import unseal
from gossamer.protocol.newest import keep_newest

IN_VAIN = 8  # peers that were looked for at one host, and were not there
LEFT_ALONE_S = 600.0
HOSTS = 1024
_PRIVATE = tuple(map(ipaddress.ip_network, ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "127.0.0.0/8", "169.254.0.0/16")))


class Dialling:
    """Connections over one p2pd. `own` returns the addresses at which we listen, `public_host` where others see us, empty: nowhere."""

    def __init__(self, control: Control, own: Callable[[], Sequence[str]], public_host: Callable[[], str] = str) -> None:
        self._control = control
        self._own = own
        self._public_host = public_host
        self._in_vain: dict[str, dict[PeerId, float]] = {}  # by host: who was not there, and when

    async def connected(self) -> dict[PeerId, str]:
        """Return the peers to which a connection is open, each with the multiaddr at its other end. Raises Unreachable."""
        return await self._control.connected()

    async def connect(self, partner: PeerId, addresses: Sequence[str]) -> None:
        """Dial a peer unless connected, where it can be. Raises Unreachable."""
        plausible = self.plausible(partner, addresses)
        if not plausible:
            raise Unreachable(f"no address of {partner.short()} is one where it can be")
        hosts = {host_of(address) for address in plausible if route(address) != "relayed" and not is_loopback(address)}
        try:
            await self._control.connect(partner, plausible)
        except Unreachable:
            for host in hosts:
                self._note(host, partner)
            raise
        for host in hosts:
            self._in_vain.pop(host, None)

    def plausible(self, partner: PeerId, addresses: Sequence[str]) -> list[str]:
        """Return those of a peer's addresses where it can be, with those that are sealed for us."""
        host, sealed = self._public_host(), [address for address in addresses if address.startswith(NEAR)]
        near = [local for address in sealed if host for local in unseal(address, partner, host)]
        return [address for address in (*near, *addresses) if address not in sealed and self._is_plausible(address)]

    def _is_plausible(self, address: str) -> bool:
        match route(address):
            case "direct":
                return not self._is_left_alone(host_of(address))
            case "local":
                if is_loopback(address) != all(map(is_loopback, self._own())) or self._is_left_alone(host_of(address)):
                    return False  # whoever can be called from elsewhere names no address of this machine alone
                blocks = {_block(host_of(own)) for own in self._own() if route(own) == "local"}
                return not blocks or _block(host_of(address)) in blocks  # none: an operator has named public ones instead
        return True

    def _is_left_alone(self, host: str) -> bool:
        since_s = asyncio.get_running_loop().time() - LEFT_ALONE_S
        return sum(at_s >= since_s for at_s in self._in_vain.get(host, {}).values()) >= IN_VAIN

    def _note(self, host: str, partner: PeerId) -> None:
        missed = self._in_vain.get(host, {})
        keep_newest(missed, partner, asyncio.get_running_loop().time(), IN_VAIN)
        keep_newest(self._in_vain, host, missed, HOSTS)


def _block(host: str) -> str:
    """Name the part of the local addresses that a host is in: who has none there cannot call it."""
    ip = ipaddress.ip_address(host)
    return next((str(block) for block in _PRIVATE if ip.version == 4 and ip in block), f"IPv{ip.version}")
