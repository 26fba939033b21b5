"""How a newcomer gets the run's manifest: from whichever of the invite's addresses answers first."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from peer.home import Home
from peer.joining import as_final
from peer.state_transfer import Asker
from peer.whole_file import write_whole
from protocol.errors import PeerMisbehaved, SwarmUnreachable, TransportError
from protocol.identity import PeerId
from protocol.manifest import SignedManifest
from protocol.refusals import Refused

PATIENCE_S = 60.0  # for the first address that answers
PAUSE_S = 1.0


async def find_manifest(asker: Asker, addresses: Sequence[str], say: Callable[[str], None]) -> SignedManifest:
    """Ask the peers at `addresses` (multiaddrs that end in a peer id) again and again, until one gives the manifest of the asker's run.

    `say` is told whom it asks. Raises SwarmUnreachable when none did for a minute, RunRefusesUs or WrongVersion when they do not
    want us, BadManifest or WrongVersion when this build cannot read it. Cancel-safe.
    """
    loop = asyncio.get_running_loop()
    until_s, last = loop.time() + PATIENCE_S, "none was asked"
    while loop.time() < until_s:
        for address in addresses:
            say(f"asking {address} for the run's manifest")
            try:
                return await _ask(asker, address)
            except Refused as refusal:
                if (final := as_final(refusal)) is not None:
                    raise final from refusal
                last = str(refusal)
            except (TransportError, PeerMisbehaved) as error:
                last = f"{address}: {error}"
        await asyncio.sleep(PAUSE_S)
    raise SwarmUnreachable(
        f"none of the invite's addresses gave the manifest in {PATIENCE_S:.0f} s (last: {last})",
        hint="check that the host is running and that its address can be reached from here, then join again",
    )


def store_manifest(home: Home, signed: SignedManifest) -> None:
    """Keep the manifest in the home folder; a crash leaves the whole file or none."""
    write_whole(home.manifest, signed.to_bytes(), private=True)


async def _ask(asker: Asker, address: str) -> SignedManifest:
    data = await asker.manifest(PeerId.from_text(address.rpartition("/p2p/")[2]), (address,))
    signed = SignedManifest.from_bytes(data, expect=asker.run_id)
    signed.manifest()  # can this build read it?
    return signed
