"""The only import of hivemind: its bindings to p2pd and the messages of its directory, without the rest of the package.

Importing hivemind normally imports torch too: two seconds and 200 MB. Two packages are therefore created here without running their
__init__, after which no code in the process can use the real ones. Changes to logging are undone.
"""

from __future__ import annotations

import importlib.util
import logging
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

BARE_PACKAGES = ("hivemind", "hivemind.utils")


@contextmanager
def contained_import() -> Iterator[None]:
    """Undo on exit the changes that importing hivemind makes to warnings and logging: it logs only errors, through the root logger."""
    warning_name = logging.getLevelName(logging.WARNING)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            yield
        finally:
            logging.addLevelName(logging.WARNING, warning_name)
            log = logging.getLogger("hivemind")
            log.handlers.clear()
            log.propagate = True
            log.setLevel(logging.ERROR)


with contained_import():  # "import x as x" marks a re-export
    for _name in BARE_PACKAGES:
        _spec = importlib.util.find_spec(_name)
        assert _spec is not None, f"{_name} is not installed"
        sys.modules[_name] = importlib.util.module_from_spec(_spec)  # without running its __init__

    from hivemind import hivemind_cli as hivemind_cli
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
