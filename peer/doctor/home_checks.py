"""Checks of the home folder: owner, running peer, key, settings, port, invite."""

from __future__ import annotations

import os
import stat
import time
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from gossamer.peer.doctor.case import Case
from gossamer.peer.doctor.finding import Finding, fail, ok, skipped, warn
from gossamer.peer.machine.config import saved_settings
from gossamer.peer.machine.home import ANOTHER_HOME
from gossamer.peer.machine.port import free_port
from gossamer.peer.node.membership_watch import latest_credential
from gossamer.protocol.run.invite import FOR_THE_RUN
from gossamer.protocol.run.manifest import ProgramManifest

SOON_S = 3 * 24 * 3600  # a warning for an invite that expires within this time


def home(path: Path) -> Finding:
    """Check that the home is a folder that belongs to this user and that no other user may open."""
    if not path.exists():
        place = next(parent for parent in path.parents if parent.exists())
        if not os.access(place, os.W_OK | os.X_OK):
            return fail(f"{path} is not there, and you may not make it in {place}", ANOTHER_HOME)
        return ok(f"{path} is not there yet; the first `peer join` makes it")
    found, user = path.stat(), os.geteuid()
    mode = stat.S_IMODE(found.st_mode)
    if not stat.S_ISDIR(found.st_mode):
        return fail(f"{path} is not a folder", ANOTHER_HOME)
    if found.st_uid != user:
        return fail(f"{path} belongs to user {found.st_uid}, and you are user {user}", f"run as that user, or {ANOTHER_HOME}")
    if mode & 0o077:
        return fail(f"other users may enter {path} (mode {mode:03o}), so no peer starts from it", f"chmod 700 {path}")
    if not os.access(path, os.R_OK | os.W_OK | os.X_OK):
        return fail(f"{path} cannot be written to (mode {mode:03o}, or a read-only disk)", f"chmod 700 {path}, or {ANOTHER_HOME}")
    return ok(f"{path} is yours alone")


def key(case: Case) -> Finding:
    """Check that the peer's private key is there, whole and private."""
    identity = case.identity()
    return ok(f"this peer is {identity.peer_id}" if identity else "there is none yet; the first `peer join` makes it")


def settings(case: Case) -> Finding:
    """Check that the settings in the home can work."""
    num_set = len(saved_settings(case.home))
    return ok(f"{num_set} in {case.home.config}" if num_set else "all as by default")


def other_peer(case: Case) -> Finding:
    """Find out whether a peer runs from this home already."""
    holder = case.home.holder()
    if not holder:
        return ok("none runs from this home")
    return warn(
        f"one runs from this home already: {holder}",
        f"`peer status --home {case.home.path}` shows its state; a second peer needs its own folder with --home DIR",
    )


def port(case: Case) -> Finding:
    """Check that a peer could listen where it wants to."""
    if case.home.holder() and case.port is None:
        return ok("the peer that runs from this home listens already")
    wanted = free_port(case.home, case.settings.listen, case.port)
    return ok(f"{case.settings.listen} port {wanted} is free" if wanted else f"{case.settings.listen}, any free port")


def run(case: Case) -> Finding:
    """Tell what the run trains."""
    if case.given_manifest is None and case.signed() is None:
        return skipped(
            "not known: no peer sent its manifest" if case.is_about_a_run else "none: the needs below are those of the default run"
        )
    manifest = case.manifest()
    name = f"{manifest.run.name!r}, {manifest.run.total_steps} steps"
    if isinstance(manifest, ProgramManifest):
        return ok(f"{name}: a program of its members ({manifest.program_words}); what it computes is not counted below")
    if manifest.num_stages > 1:
        return warn(
            f"{name}: a language model in {manifest.num_stages} stages; peers of every stage can read the text that is trained on",
            "join only with people to whom you would show the text",
        )
    return ok(f"{name}: a language model on text")


def invite(case: Case) -> Finding:
    """Check that the invite is whole, in force, for this peer, and for the run that the home holds."""
    found, held, own = case.invite(), case.held(), case.identity()
    if found is None and held is None and case.given_manifest is not None:
        return skipped("none was given: only the machine was checked, for the manifest")
    if found is None:
        if held is not None:
            return ok(f"not needed: the home holds run {held.run_id.hex()[:12]}, which this peer hosts")
        return warn("none was given: the run, its peers and its needs were not checked", "`peer doctor gossamer1...` checks them too")
    if held is not None and held.run_id != found.run_id:
        return fail(
            f"it is for run {found.run_id.hex()[:12]}, and {case.home.path} holds run {held.run_id.hex()[:12]}",
            "give the new run its own folder with --home DIR",
        )
    if own is None and found.credential.subject is not None:
        return fail(f"it is for {found.credential.subject}, and this home has no key yet", "use the home folder of that peer (--home)")
    if own is not None and (latest := latest_credential(case.home, found.credential, found.run_id, own.peer_id)) is not None:
        found = replace(found, credential=latest)
    found.check(own.peer_id if own else found.credential.issuer, time.time())
    if found.credential.not_after_s == FOR_THE_RUN:
        return ok(f"for run {found.run_id.hex()[:12]}, of which this peer is a member")
    left_s, until = found.credential.not_after_s - time.time(), datetime.fromtimestamp(found.credential.not_after_s, UTC)
    sentence = f"for run {found.run_id.hex()[:12]}, good until {until:%Y-%m-%d %H:%M} UTC"
    return ok(sentence) if left_s > SOON_S else warn(sentence, "ask the host for a later expiry: after this date no peer meets this one")
