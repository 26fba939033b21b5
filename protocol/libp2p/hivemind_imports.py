"""The one door to hivemind: what we use of it, imported so that its side effects stay outside.

Importing hivemind compiles deprecated torch functions (warnings), adds warning filters, changes torch's way to share memory,
installs a coloured log handler and renames the level WARNING. None of that may reach a process that merely has a network. What
cannot be kept out: torch and pydantic.v1 are loaded, about 2 s and 280 MB, so only the node process imports this file.
"""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

_SHARING = "HIVEMIND_MEMORY_SHARING_STRATEGY"


@contextmanager
def contained_import() -> Iterator[None]:
    """Undo, on the way out, what importing hivemind does to warnings, logging and torch."""
    warning_name = logging.getLevelName(logging.WARNING)
    given = os.environ.get(_SHARING)
    os.environ.setdefault(_SHARING, "file_descriptor" if sys.platform == "linux" else "file_system")  # torch's own defaults
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            yield
        finally:
            if given is None:
                del os.environ[_SHARING]
            logging.addLevelName(logging.WARNING, warning_name)
            _route_log()


def _route_log() -> None:
    """Send hivemind's log where all others go, without its own handler and colours, and only what matters to an operator."""
    log = logging.getLogger("hivemind")
    for handler in list(log.handlers):
        log.removeHandler(handler)
    log.propagate = True
    log.setLevel(logging.ERROR)


with contained_import():  # "as" says that it is for others to import
    from hivemind import hivemind_cli as hivemind_cli
    from hivemind.dht.protocol import DHTProtocol as DHTProtocol
    from hivemind.p2p import P2P as P2P
    from hivemind.p2p import P2PContext as P2PContext
    from hivemind.p2p import PeerID as PeerID
    from hivemind.p2p.p2p_daemon_bindings.control import P2PDaemonError as P2PDaemonError
    from hivemind.p2p.p2p_daemon_bindings.control import P2PHandlerError as P2PHandlerError
    from hivemind.p2p.p2p_daemon_bindings.p2pclient import Client as Client
    from hivemind.p2p.p2p_daemon_bindings.utils import read_pbmsg_safe as read_pbmsg_safe
    from hivemind.p2p.p2p_daemon_bindings.utils import write_pbmsg as write_pbmsg
    from hivemind.proto import dht_pb2 as dht_pb2
    from hivemind.proto import p2pd_pb2 as p2pd_pb2
    from hivemind.utils.multiaddr import Multiaddr as Multiaddr
