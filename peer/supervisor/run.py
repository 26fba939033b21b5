"""A session: one start of a peer from its home folder, from taking the folder's lock to letting go of it.

Not here: what happens in between (peer/supervisor/supervisor.py). As light as the supervisor: no torch, no hivemind.
"""

from __future__ import annotations

from peer.machine.atomic_file import write_whole
from peer.machine.config import PeerConfig
from peer.machine.home import Home
from peer.machine.runtime_folder import runtime_folder
from peer.machine.status import Status
from peer.supervisor.supervisor import Supervisor, Watch
from protocol.errors import GossamerError
from protocol.identity import Identity
from protocol.run.invite import Invite
from protocol.run.manifest import SignedManifest

PAYLOAD_BYTES = 64 << 20  # room wanted in the runtime folder before the model's size is known


async def run_peer(config: PeerConfig, identity: Identity, manifest: SignedManifest | None, invite: Invite | None, watch: Watch) -> Status:
    """Run one peer until its run ends, it is asked to leave, or it cannot go on. Its home folder is there (`Home.create`).

    A manifest makes it the run's host, an invite a member; with neither, it goes on with what its home folder holds. A new run that
    fails before it has trained leaves no manifest: only the children, which load torch, can tell that a codec or a model cannot be, and
    the corrected command shall find the home free. `watch` is called with the live status after every change, on the event loop. Returns
    the last status. Raises GossamerError; KeyboardInterrupt after Ctrl-C.
    """
    home = Home(config.home)
    with home.locked(), runtime_folder(PAYLOAD_BYTES) as runtime:
        is_new = manifest is not None and not home.manifest.exists()
        if manifest is not None:
            write_whole(home.manifest, manifest.to_bytes(), private=True)
        if invite is not None:
            write_whole(home.invite, invite.to_text().encode() + b"\n", private=True)  # it is a secret
        supervisor = Supervisor(config, str(identity.peer_id), watch)
        try:
            await supervisor.run(runtime)
        except GossamerError:
            if is_new and not supervisor.has_trained:
                home.manifest.unlink(missing_ok=True)
            raise
        if supervisor.interrupted:
            raise KeyboardInterrupt
        return supervisor.status
