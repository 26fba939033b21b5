"""A staged run small enough for a test: its trainers' loops, and a scripted node that carries hops from one to the next."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gossamer.optim.inner import learning_rate
from gossamer.peer.link.messages import Backward, Begin, Declined, Forward, Forwarded, HopFile, HopReply, Returned, hop_file
from gossamer.peer.link.payload_folder import PayloadFolder
from gossamer.peer.model.computing import Computing
from gossamer.peer.model.plan import inner_settings
from gossamer.peer.model.stages import Cut, build_stage, manifest_cuts
from gossamer.peer.trainer.hop_queue import HopQueue
from gossamer.peer.trainer.stage_loop import StageLoop
from gossamer.protocol.run.manifest import Manifest, StagedManifest
from tests.peer.small import LLAMA, ignored, small_corpus, small_manifest

SESSION = 1
MODEL = LLAMA | {"tie_word_embeddings": False, "num_hidden_layers": 4}


def staged_manifest(
    count: int = 2, *, activations: str = "fp32", micro_batch: int = 2, dropout: float = 0.0, **inner: Any
) -> StagedManifest:
    """Batches of six sequences, without clipping."""
    model = {"config": MODEL | {"attention_dropout": dropout}}
    given = small_manifest(run={"access": "invite"}, model=model, inner={"batch_size": 6, "clip_norm": 1e6, **inner})
    tables = given.model_dump(exclude_unset=True)
    stages = {"count": count, "activations": activations, "micro_batch": micro_batch}
    made = Manifest.checked(tables | {"stages": stages})
    assert isinstance(made, StagedManifest)
    return made


class Holder:
    """One stage's loop, with its folder and what it has replied."""

    def __init__(self, manifest: StagedManifest, cut: Cut, folder: Path) -> None:
        self.manifest = manifest
        self.payloads = PayloadFolder(folder / f"stage-{cut.stage}")
        self.replies: list[HopReply] = []
        self.hops = HopQueue(lambda reply, session: self.replies.append(reply))
        self.stage = build_stage(manifest.model, cut, manifest.run.seed)
        self.corpus = small_corpus(manifest) if cut.is_first else None
        self.loop = StageLoop(manifest, self.stage, cut, self.corpus, Computing(), ignored, self.payloads, self.hops)
        self.own_steps = 0
        self.losses: list[float] = []

    def serve(self) -> bool:
        """Let the loop serve what waits; step if a batch is whole, and return whether it was."""
        found = self.loop.gradient(self.own_steps, 0)
        if found is None:
            return False
        self.losses.append(float(found[0]))
        self.loop.devices.step(learning_rate(self.own_steps, self.own_steps, inner_settings(self.manifest)))
        self.own_steps += 1
        return True

    def taken(self) -> list[HopReply]:
        """Return the replies since the last call."""
        replies, self.replies = self.replies, []
        return replies

    def forward(
        self, hop: int, tokens: bytes, values: bytes, *, name: str = "", measure: bool = False, lower_step: int = 0, source: str = ""
    ) -> None:
        """Bring it a micro-batch, as its node does."""
        self.payloads.write(hop_file(hop, HopFile.PARTNER_TOKENS), tokens)
        self.payloads.write(hop_file(hop, HopFile.PARTNER_FORWARD), values)
        self.hops.put(Forward(hop, name or f"{hop:032x}", measure, lower_step, source), SESSION)

    def backward(
        self,
        hop: int,
        gradient: bytes,
        loss: float,
        *,
        name: str = "",
        measure: bool = False,
        source: str = "",
        own_steps: int | None = None,
    ) -> None:
        """Bring it the gradient of its output. `own_steps`: its own ones at the forward pass; None: those of now."""
        self.payloads.write(hop_file(hop, HopFile.PARTNER_BACKWARD), gradient)
        own_steps = self.own_steps if own_steps is None else own_steps
        self.hops.put(Backward(hop, name or f"{hop:032x}", measure, source, own_steps, loss), SESSION)

    def own(self, hop: int, file: HopFile) -> bytes:
        """Return a file that its trainer has written."""
        return bytes(self.payloads.read(hop_file(hop, file)))


class ScriptedNode:
    """One holder of each stage in a line, and the way between them. No hop runs ahead of the step of its batch."""

    def __init__(self, manifest: StagedManifest, folder: Path) -> None:
        self.holders = [Holder(manifest, cut, folder) for cut in manifest_cuts(manifest)]
        self._in_batch = manifest.inner.batch_size // manifest.stages.micro_batch
        self._next_hop = 0

    def step(self) -> None:
        """Let all holders take an inner step on one batch of the driver's text."""
        first, *others = self.holders
        hops = range(self._next_hop, self._next_hop + self._in_batch)
        self._next_hop = hops.stop
        for hop in hops:
            first.hops.put(Begin(hop, f"{hop:032x}"), SESSION)
        assert not first.serve()
        for below, holder in zip(self.holders[:-1], others, strict=True):
            for reply in below.taken():
                assert isinstance(reply, Forwarded), reply
                tokens = HopFile.OWN_TOKENS if below is first else HopFile.PARTNER_TOKENS
                holder.forward(reply.hop, below.own(reply.hop, tokens), below.own(reply.hop, HopFile.OWN_FORWARD))
            assert holder.serve() is (holder is self.holders[-1])
        for holder, below in zip(reversed(others), reversed(self.holders[:-1]), strict=True):
            for reply in holder.taken():
                assert isinstance(reply, Returned), reply
                below.backward(reply.hop, holder.own(reply.hop, HopFile.OWN_BACKWARD), reply.loss)
            assert below.serve()
        assert [type(reply) for reply in first.taken()] == [Returned] * self._in_batch
        for holder in self.holders:
            for hop in hops:
                holder.payloads.remove_hop(hop)


def reasons(replies: list[HopReply]) -> list[str]:
    """Return why hops were declined; fails for a reply of another kind."""
    assert all(isinstance(reply, Declined) for reply in replies), replies
    return [reply.reason for reply in replies if isinstance(reply, Declined)]
