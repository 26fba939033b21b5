"""A session's settings, and how it ends in words: what was reached, and what can be done next."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gossamer.cli import session as module
from gossamer.cli.invite import issued_to_anybody
from gossamer.cli.session import farewell, news, remember_text, settings, undone_if_it_fails
from gossamer.peer.machine.config import PeerConfig, save_settings, saved_settings
from gossamer.peer.machine.events import StageMoved, StepsGivenUp, StepsLost, TextRead
from gossamer.peer.machine.home import Home
from gossamer.peer.machine.status import Status, apply
from gossamer.peer.supervisor.children import ChildFailed
from gossamer.protocol.errors import BadInvite, BadSettings, ExitCode
from gossamer.protocol.identity import Identity

LOCAL: dict[str, object] = {"listen": "127.0.0.1", "port": 0}
CONFIG = PeerConfig(home=Path("/home/somebody/peer"))


def test_options_become_settings(tmp_path: Path) -> None:
    given = {"data": tmp_path / "text", "devices": "cpu", "threads": 2, "listen": "127.0.0.1", "port": 4001}
    config = settings(tmp_path, given | {"announce": ["/ip4/203.0.113.7/tcp/4001"]})
    assert (config.home, config.data, config.threads, config.port) == (tmp_path, tmp_path / "text", 2, 4001)
    assert config.announce == ("/ip4/203.0.113.7/tcp/4001",)


def test_options_override_the_file_and_the_file_the_defaults(tmp_path: Path) -> None:
    save_settings(Home(tmp_path), {"threads": 3, "devices": "cpu", "port": 0})
    config = settings(tmp_path, {"threads": 2})
    assert (config.threads, config.devices, config.checkpoint_interval_s) == (2, "cpu", 60.0)
    assert saved_settings(Home(tmp_path))["threads"] == 3


def test_a_path_in_the_file_may_begin_with_a_tilde(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    save_settings(Home(tmp_path), {"data": "~/texts", "port": 0})
    assert settings(tmp_path, {}).data == tmp_path / "texts"


def test_a_given_checkpoint_interval_in_seconds_switches_steps_off(tmp_path: Path) -> None:
    config = settings(tmp_path, LOCAL | {"checkpoint_interval_s": 600.0})
    assert (config.checkpoint_interval_s, config.checkpoint_interval_steps) == (600.0, 0)
    config = settings(tmp_path, LOCAL)
    assert (config.checkpoint_interval_s, config.checkpoint_interval_steps) == (60.0, 100)


def test_home_may_begin_with_a_tilde(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert settings(Path("~/peer"), LOCAL).home == tmp_path / "peer"


def test_the_farewell_after_the_run_names_export() -> None:
    result = farewell(Status(state="done", step=800, total_steps=800, loss=2.04), CONFIG)
    assert result.startswith("the run is over: step 800 of 800, loss 2.040\nhint: ")
    assert "peer export FOLDER --home /home/somebody/peer" in result


def test_the_farewell_of_a_holder_names_the_other_stages() -> None:
    result = farewell(Status(state="done", step=800, total_steps=800, stage="2 of 3"), CONFIG)
    assert "`peer export FOLDER --home /home/somebody/peer --with HOME` writes the model, with a home of each other stage" in result


def test_the_screen_says_why_a_peer_moves_and_which_steps_of_its_stage_are_lost() -> None:
    before = Status(step=480, stage="2 of 2")
    moved = apply(before, StageMoved(2, 1, "nobody holds it"))
    lost = apply(moved, StepsLost(480, 500))
    assert list(news(before, moved)) == ["moves from stage 2 to stage 1: nobody holds it"]
    [line] = news(moved, lost)
    assert line.startswith("20 steps of this stage are lost: no other peer held it")
    assert not list(news(lost, lost)), "once"


def test_the_farewell_after_leaving_names_join() -> None:
    result = farewell(Status(state="left", step=12, total_steps=800), CONFIG)
    assert result.startswith("left the run: step 12 of 800, loss -\nhint: ")
    assert "peer join --home /home/somebody/peer" in result
    assert farewell(Status(state="left"), CONFIG).startswith("left before a member had sent the run's manifest\nhint: ")


def test_the_screen_says_what_was_read_and_which_steps_are_given_up() -> None:
    before = Status(step=1595)
    read = apply(before, TextRead("/texts", 1, 500, 0, ()))
    back = apply(read, StepsGivenUp(1595, 664))
    assert list(news(before, read)) == ["read 1 file of /texts, 500 B of text"]
    [line] = news(read, back)
    assert line.startswith("931 steps given up, back at step 664: too far ahead of all others")
    assert not list(news(back, back)), "once"


def test_a_new_home_whose_start_fails_is_removed(tmp_path: Path) -> None:
    home = Home(tmp_path / "home")
    with pytest.raises(BadInvite), undone_if_it_fails(home):
        home.create()
        Identity.load_or_create(home.identity)
        raise BadInvite("closed", hint="ask again")
    assert not home.path.exists()


def test_a_new_home_keeps_its_key_once_the_run_has_seen_it(tmp_path: Path) -> None:
    home = Home(tmp_path / "home")
    with pytest.raises(BadSettings), undone_if_it_fails(home):
        home.create()
        Identity.load_or_create(home.identity)
        home.manifest.write_bytes(b"of the run")
        home.invite.write_text("gossamer1")
        raise BadSettings("too little memory", hint="give it more")
    assert list(home.path.iterdir()) == [home.identity]


@pytest.mark.parametrize("place", ["manifest", "invite"])
def test_after_ctrl_c_a_home_from_which_a_peer_has_run_is_kept(tmp_path: Path, place: str) -> None:
    home = Home(tmp_path / "home")
    with pytest.raises(KeyboardInterrupt), undone_if_it_fails(home):
        home.create()
        vars(home)[place].write_bytes(b"of the run")
        raise KeyboardInterrupt
    assert vars(home)[place].exists()


@pytest.mark.parametrize("place", ["checkpoints", "downloads"])
def test_what_was_trained_or_downloaded_is_kept(tmp_path: Path, place: str) -> None:
    home = Home(tmp_path / "home")
    with pytest.raises(BadSettings), undone_if_it_fails(home):
        home.create()
        home.manifest.write_bytes(b"of the run")
        (home.path / place).mkdir(exist_ok=True)
        (home.path / place / "something").touch()
        raise BadSettings("no", hint="yes")
    assert home.manifest.exists()


def test_a_home_from_before_and_the_traces_of_a_bug_are_kept(tmp_path: Path) -> None:
    home = Home(tmp_path / "home")
    home.create()
    home.log.write_text("before")
    with pytest.raises(BadInvite), undone_if_it_fails(home):
        raise BadInvite("closed", hint="ask again")
    assert home.log.exists()
    fresh = Home(tmp_path / "fresh")
    with pytest.raises(ChildFailed), undone_if_it_fails(fresh):
        fresh.create()
        raise ChildFailed("died", hint="see its log", exit_code=ExitCode.OUR_FAULT)
    assert fresh.path.exists()


def test_a_second_start_leaves_the_home_of_the_first_alone(tmp_path: Path) -> None:
    home = Home(tmp_path / "home")
    with contextlib.ExitStack() as first:
        with pytest.raises(BadInvite), undone_if_it_fails(home):
            first.enter_context(running(home))
            raise BadInvite("closed", hint="ask again")
        assert home.identity.exists() and home.manifest.exists()
    later = Home(tmp_path / "later")
    with pytest.raises(BadSettings, match="already runs"), undone_if_it_fails(later), running(later), later.locked():
        pass
    assert later.identity.exists() and later.manifest.exists(), "also where the first has ended meanwhile"


@contextlib.contextmanager
def running(home: Home) -> Iterator[None]:
    """Lock the home as another process does, once it has begun a run there."""
    other = Home(home.path)
    other.create()
    with other.locked():
        Identity.load_or_create(other.identity)
        other.manifest.write_bytes(b"of the run")
        yield


def test_a_home_whose_invite_is_out_is_kept(tmp_path: Path) -> None:
    home = Home(tmp_path / "home")
    with pytest.raises(BadSettings), undone_if_it_fails(home):
        home.create()
        identity = Identity.load_or_create(home.identity)
        home.manifest.write_bytes(b"of the run")
        issued_to_anybody(home, identity, bytes(32), (f"/ip4/203.0.113.5/tcp/4001/p2p/{identity.peer_id}",), 2)
        home.revocations.write_bytes(b"of members")
        raise BadSettings("too little memory", hint="give it more")
    assert all(file.exists() for file in (home.manifest, home.invites, home.revocations))


def test_a_text_that_cannot_be_remembered_ends_no_peer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    read = Status(peer_id="12D3KooX", text={"path": "a", "num_files": 1, "num_bytes": 9, "num_skipped": 0, "skipped": ()})

    async def run_peer(config: object, identity: object, manifest: object, invite: object, watch: Callable[[Status], None]) -> Status:
        watch(read)
        return read

    monkeypatch.setattr(module, "run_peer", run_peer)
    Home(tmp_path).config.mkdir()
    module.hold_session(PeerConfig(home=tmp_path, data=tmp_path / "text"), Identity(b"m" * 32), None, None)
    assert "the text is not remembered" in capsys.readouterr().err


@pytest.mark.parametrize(("state", "words"), [("left", "left the run: step 12 of 800"), ("leaving", "")])
def test_after_ctrl_c_too_the_last_line_says_how_to_go_on(
    state: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def run_peer(config: object, identity: object, manifest: object, invite: object, watch: Callable[[Status], None]) -> Status:
        watch(Status(peer_id="12D3KooX", state=state, step=12, total_steps=800))
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "run_peer", run_peer)
    with pytest.raises(KeyboardInterrupt):
        module.hold_session(PeerConfig(home=tmp_path), Identity(b"m" * 32), None, None)
    shown = capsys.readouterr().err
    assert words in shown and ("goes on from here" in shown) is bool(words)


def test_where_nothing_can_be_printed_metrics_and_invite_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    served: list[Callable[[], Status]] = []
    invited: list[str] = []

    async def run_peer(config: object, identity: object, manifest: object, invite: object, watch: Callable[[Status], None]) -> Status:
        for state in ("starting", "training"):
            watch(Status(peer_id="12D3KooX", state=state))
            assert served[0]().state == state == invited[-1]
        return Status(state="left")

    def server(text: str | None, status: Callable[[], Status]) -> contextlib.AbstractContextManager[None]:
        served.append(status)
        return contextlib.nullcontext()

    monkeypatch.setattr(module, "run_peer", run_peer)
    monkeypatch.setattr(module, "metrics_server", server)
    with Path("/dev/full").open("w") as full, contextlib.redirect_stderr(full):
        module.hold_session(PeerConfig(home=tmp_path), Identity(b"m" * 32), None, None, lambda status, _: invited.append(status.state))
        with contextlib.suppress(OSError):
            full.close()


def test_the_text_of_a_start_becomes_a_setting(tmp_path: Path) -> None:
    save_settings(Home(tmp_path), {"threads": 3})
    remember_text(PeerConfig(home=tmp_path, data=tmp_path / "text"))
    assert saved_settings(Home(tmp_path)) == {"threads": 3, "data": str(tmp_path / "text")}
    remember_text(PeerConfig(home=tmp_path))
    assert saved_settings(Home(tmp_path))["data"] == str(tmp_path / "text")
