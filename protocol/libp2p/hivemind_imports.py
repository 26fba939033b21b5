"""The one door to hivemind: its bindings to p2pd and its Kademlia, loaded without the rest.

hivemind's packages import all of it when any part is wanted: torch, averaging, experts. That takes two seconds and 200 MB in a process
that merely has a network, compiles deprecated torch functions and changes torch's way to share memory. So those three packages are
entered without running their own __init__. What is loaded still installs a coloured log handler and renames the level WARNING; that is
undone. Nothing else in a process that imports this file can use hivemind's own top level.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

BARE_PACKAGES = ("hivemind", "hivemind.utils", "hivemind.dht")
TAKEN_FROM_UTILS = {"logging": "get_logger", "serializer": "MSGPackSerializer", "timed_storage": "get_dht_time"}  # by its Kademlia


def _bring_in_bare(name: str) -> ModuleType:
    """Make a package importable from, without its own content."""
    spec = importlib.util.find_spec(name)
    assert spec is not None, f"{name} is not installed"
    sys.modules[name] = package = importlib.util.module_from_spec(spec)
    return package


@contextmanager
def contained_import() -> Iterator[None]:
    """Undo, on the way out, what importing hivemind does to warnings and logging."""
    warning_name = logging.getLevelName(logging.WARNING)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            yield
        finally:
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
    for _name in BARE_PACKAGES:
        _bring_in_bare(_name)
    for _module, _name in TAKEN_FROM_UTILS.items():
        setattr(sys.modules["hivemind.utils"], _name, getattr(importlib.import_module(f"hivemind.utils.{_module}"), _name))

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
