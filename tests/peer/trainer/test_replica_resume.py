"""A replica restored from its checkpoint files goes on bit for bit, wherever it was cut off."""

from __future__ import annotations

import functools
import tempfile
import time
from pathlib import Path

import pytest
import torch
from torch import Tensor

from gossamer.peer.link import messages
from gossamer.peer.link.messages import File, payload_name
from gossamer.peer.machine.config import PeerConfig
from gossamer.peer.machine.home import Home
from gossamer.peer.model.checkpoint import load_latest
from gossamer.peer.trainer.saver import Saver
from gossamer.protocol.messages.messages import RunPhase
from gossamer.protocol.run.manifest import Manifest
from tests.peer.small import AskedReplica, fingerprint, small_manifest, small_replica

NUM_STEPS = 26
FLIGHT_STEPS = 3  # between the opening and the decision of a meeting


class Story:
    """What happens to one replica: everything follows from the replica's own state, so it can be told again from any checkpoint.

    A due fragment takes a solo step or meets a partner. The partner is one fixed set of weights with noise, coded as a real one's.
    """

    def __init__(self, replica: AskedReplica, *, meets: bool) -> None:
        self.replica = replica
        self.num_meetings = 0
        self._meets = meets
        self._numbers = 0
        self._open: dict[int, tuple[int, int]] = {}  # meeting: fragment, the step at which it was opened

    @property
    def is_meeting(self) -> bool:
        return bool(self._open)

    def run(self, until_step: int) -> None:
        while self.replica.own_steps < until_step:
            self._boundary()
            self.replica.inner_step()
            self.replica.countdown.tick()

    def _boundary(self) -> None:
        step = self.replica.own_steps
        for number, (fragment, opened) in list(self._open.items()):
            if step - opened >= FLIGHT_STEPS:
                self._decide(number, fragment, opened)
        for fragment in self.replica.countdown.due():
            if self.replica.fragments[fragment].meeting is None:
                if self._meets and (step + fragment) % 3:
                    self._begin(fragment, step)
                else:
                    self.replica.handle(messages.Solo(fragment))

    def _begin(self, fragment: int, step: int) -> None:
        self._numbers += 1
        number, seed = self._numbers, 1000 * step + fragment
        assert isinstance(self.replica.handle(messages.Open(number, fragment)), messages.Opened)
        reply = self.replica.handle(messages.Prepare(number, 40, step + 2, seed, RunPhase.TRAIN))
        codec, folder = self.replica.fragments[fragment].codec, self.replica.payloads
        message, none = partner_message(self.replica.manifest, fragment, seed), torch.empty(0, dtype=torch.uint8)
        own_sketch, partner_sketch = none, none
        if isinstance(reply, messages.SketchReady):
            own_sketch = torch.frombuffer(folder.read(payload_name(number, File.OWN_SKETCH)), dtype=torch.uint8)
            partner_sketch = codec.sketch(message, seed)
            folder.write(payload_name(number, File.PARTNER_SKETCH), partner_sketch.numpy().data)
            reply = self.replica.handle(messages.Encode(number))
        assert isinstance(reply, messages.PayloadReady), reply
        payload = codec.encode(message, seed, partner_sketch, own_sketch).payload
        folder.write(payload_name(number, File.PARTNER_PAYLOAD), payload.numpy().data)
        self._open[number] = (fragment, step)

    def _decide(self, number: int, fragment: int, opened: int) -> None:
        del self._open[number]
        verdict = self.replica.handle(messages.Check(number))
        assert isinstance(verdict, messages.Checked) and verdict.accepted, verdict
        applied = self.replica.handle(messages.Apply(number, f"{fragment:016x}{opened:016x}", verdict.failed_blocks))
        assert applied == messages.Applied(number)
        self.num_meetings += 1

    def forget_meetings(self) -> None:
        """The node is gone."""
        self._open.clear()
        self.replica.exchange.drop_all()


_INITIAL: dict[bytes, list[Tensor]] = {}


def partner_message(manifest: Manifest, fragment: int, seed: int) -> Tensor:
    if manifest.run_id not in _INITIAL:
        _INITIAL[manifest.run_id] = [f.slow for f in small_replica(Path(tempfile.gettempdir()), manifest).fragments]
    slow = _INITIAL[manifest.run_id][fragment]
    noise = torch.randn(slow.shape, generator=torch.Generator().manual_seed(seed))
    return slow + 0.0005 * noise


def saver(tmp_path: Path) -> Saver:
    home = Home(tmp_path / "home")
    home.create()
    return Saver(home, PeerConfig(home=home.path), lambda event: None, time.monotonic)


def resumed(tmp_path: Path, replica: AskedReplica) -> AskedReplica:
    """Save a replica and restore it in a fresh one, as a new process would."""
    keeper = saver(tmp_path)
    keeper.save(replica)
    assert not keeper.trouble
    loaded = load_latest(tmp_path / "home" / "checkpoints", replica.manifest.run_id)
    assert loaded is not None
    fresh = small_replica(tmp_path / "fresh", replica.manifest)
    fresh.inner_step()  # whatever it did before must not show
    fresh.program.inner.devices.forget()
    keeper.restore(fresh, loaded)
    return fresh


def cut_off(tmp_path: Path, manifest: Manifest, step: int, *, meets: bool) -> tuple[Story, Story]:
    """Tell a story to `step`; return how it goes on in the same process (without its open meetings) and after a restart."""
    story = Story(small_replica(tmp_path / "payloads", manifest), meets=meets)
    story.run(step)
    again = Story(resumed(tmp_path, story.replica), meets=meets)
    story.forget_meetings()
    return story, again


@functools.cache
def whole_run(optimizer: str) -> str:
    """Return the fingerprint after a run with outer steps alone that nothing cut off."""
    with tempfile.TemporaryDirectory() as folder:
        whole = Story(small_replica(Path(folder), small_manifest(inner={"optimizer": optimizer})), meets=False)
        whole.run(NUM_STEPS)
        return fingerprint(whole.replica)


@pytest.mark.parametrize("step", [0, 1, 2, 3, 5, 8, 13, 21, NUM_STEPS])
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_with_outer_steps_alone(tmp_path: Path, step: int, optimizer: str) -> None:
    _, again = cut_off(tmp_path, small_manifest(inner={"optimizer": optimizer}), step, meets=False)
    again.run(NUM_STEPS)
    assert fingerprint(again.replica) == whole_run(optimizer)


@pytest.mark.parametrize("codec", ["int8", "modulo4"])
@pytest.mark.parametrize("step", range(1, NUM_STEPS, 4))
def test_with_meetings(tmp_path: Path, codec: str, step: int) -> None:
    story, again = cut_off(tmp_path, small_manifest(codec={"name": codec}, inner={"optimizer": "adamw"}), step, meets=True)
    assert fingerprint(again.replica) == fingerprint(story.replica)
    assert again.replica.countdown.due() == story.replica.countdown.due()  # what was in a meeting is due again
    for one in (story, again):
        one.run(NUM_STEPS)
    assert fingerprint(again.replica) == fingerprint(story.replica)


def test_the_cuts_meet_every_case(tmp_path: Path) -> None:
    """Guard the test above: its steps must include open meetings, fragments just due, and neither; and its meetings must count."""
    story = Story(small_replica(tmp_path, small_manifest()), meets=True)
    seen = set()
    for step in range(1, NUM_STEPS, 4):
        story.run(step)
        waits = [f for f in story.replica.countdown.due() if story.replica.fragments[f].meeting is None]
        seen.add("open" if story.is_meeting else "due" if waits else "neither")
    assert seen >= {"open", "neither"}
    story.run(NUM_STEPS)
    assert story.num_meetings >= 3
    untouched = Story(small_replica(tmp_path, small_manifest()), meets=False)
    untouched.run(NUM_STEPS)
    assert fingerprint(untouched.replica) != fingerprint(story.replica)


def test_while_a_fragment_is_due(tmp_path: Path) -> None:
    replica = small_replica(tmp_path / "payloads", small_manifest())
    while not replica.countdown.due():
        replica.inner_step()
        replica.countdown.tick()
    fresh = resumed(tmp_path, replica)
    assert fresh.countdown.due() == replica.countdown.due() != []
    for one in (replica, fresh):
        one.handle(messages.Solo(one.countdown.due()[0]))
        Story(one, meets=True).run(NUM_STEPS)
    assert fingerprint(fresh) == fingerprint(replica)


def test_with_dropout(tmp_path: Path) -> None:
    gpt2 = {"n_embd": 64, "n_layer": 2, "n_head": 2, "n_positions": 32, "vocab_size": 256}
    manifest = small_manifest(model={"architecture": "gpt2", "config": gpt2})
    story, again = cut_off(tmp_path, manifest, 4, meets=False)
    torch.manual_seed(99)  # what others draw in the same process must not show
    story.run(9)
    again.run(9)
    assert fingerprint(again.replica) == fingerprint(story.replica)


def test_a_second_cut(tmp_path: Path) -> None:
    story, again = cut_off(tmp_path, small_manifest(), 7, meets=True)
    story.run(15)
    again.run(15)
    again.forget_meetings()
    story.forget_meetings()
    third = Story(resumed(tmp_path, again.replica), meets=True)
    for one in (story, third):
        one.run(NUM_STEPS)
    assert fingerprint(third.replica) == fingerprint(story.replica)
