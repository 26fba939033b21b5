"""A PyTorch program in a swarm: `host` or `join`, then one call of `Swarm.step` after each optimizer step.

The node and its supervisor run beside the program, in processes of their own. In the program there are two more threads: one answers the
node while the weights are only read, and one writes checkpoints.
"""

from __future__ import annotations

import atexit
import contextlib
import copy
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self, TypeVar

import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from gossamer.module_program import Evaluate, Model, ModuleProgram, Stateful, fenced
from gossamer.optim.codecs.hadamard import keep_products_exact
from gossamer.optim.inner import InnerSettings, learning_rate
from gossamer.peer.machine.child import GuestRequest
from gossamer.peer.machine.config import PeerConfig, peer_config, saved_settings
from gossamer.peer.machine.control_socket import ask
from gossamer.peer.machine.events import OVER, ModelBuilt, ProcessReported, RunKnown
from gossamer.peer.machine.held_manifest import checked_invite, held_manifest
from gossamer.peer.machine.home import Home
from gossamer.peer.machine.own_supervisor import OwnSupervisor
from gossamer.peer.machine.port import free_port
from gossamer.peer.model.accelerator import try_coding
from gossamer.peer.model.trainable import is_sharded, need_model_of, shapes_of
from gossamer.peer.trainer.boundary import Boundary, State, open_boundary
from gossamer.peer.trainer.replica import Replica, peer_seed
from gossamer.peer.trainer.stopwatch import InnerStep
from gossamer.peer.trainer.weights import uninterrupted
from gossamer.protocol.errors import BadSettings
from gossamer.protocol.identity import Identity, PeerId
from gossamer.protocol.messages.messages import RunPhase
from gossamer.protocol.run.manifest import ProgramManifest, SignedManifest
from gossamer.run import Run

Batch = TypeVar("Batch")
Optimizers = Optimizer | Sequence[Optimizer] | None

OWN_HOME: Final = "give the new run a home of its own; a changed model or Run is a new run"
LEFT: Final = "the program has left the run"
PAUSE_LOOK_S: Final = 0.05


def host(
    run: Run,
    model: Model,
    optimizer: Optimizers,
    *,
    evaluate: Evaluate | None,
    home: str | os.PathLike[str],
    state: Mapping[str, Stateful] | None = None,
    settings: Mapping[str, object] | None = None,
) -> Swarm:
    """Start a run as its first peer, or go on with the one that this peer hosts from `home`. Returns before others are there.

    `model`: a module, or tensors by name. Of a module the trainable parameters and the persistent buffers of floats travel, of a mapping
    all tensors. They are float32, on one device, and change in place. Call `requires_grad_`, `to` and `torch.compile` before.

    `optimizer`: none, one or several. Others read the weights until the next step of one of them; without any, only inside `step`.

    `evaluate`: returns the held-out loss, or one loss for each part of the held-out data, of any sign: smaller is better. It decides
    which weights of others are taken over; None takes them over unjudged. It is called twice here, because it must give the same for the
    same weights. It is also called every 100 steps, to judge messages and states, and at the end. Each call is on this thread, without
    gradients, with modules in `eval()` mode, and with the same numbers of the global generators of torch, numpy and `random`.

    `home`: a folder of this peer alone, created if it is missing: identity, run, checkpoints, log. A later start with it continues the run.

    `state`: objects with `state_dict` and `load_state_dict`, by name, which checkpoints keep too: a scheduler, a GradScaler, a loader, an
    average of the weights. Their states hold numbers, texts, bytes, tensors, lists and dictionaries.

    `settings`: of this peer alone and this start, as `peer config` lists them; also `wait_for_peers`, the number of other peers that must
    be known before training begins, and `alone`, which trains without meetings.

    Several ranks of torch.distributed are one peer: initialize the process group, then wrap the model in DistributedDataParallel, or shard
    it by `fully_shard` (FSDP2, by rows over one mesh of all ranks). Make the same calls on all ranks but `leave`, `status` and `invite`.
    Rank 0 has the home and the node. `tokens` are summed.

    With DDP `evaluate` runs on rank 0 alone, so it must call the bare module: DDP's forward would wait for the others. Of a sharded model
    it runs on all ranks, and rank 0's losses count. A checkpoint keeps rank 0's `state`, and restores it on all ranks. It keeps sharded
    tensors whole, so any number of ranks can continue from it.

    Raises OperatorError, with a hint, for what cannot be: another model than that of the run in `home`, bf16 weights, an `evaluate` that
    varies, a home in use.
    """
    return _started(model, _all(optimizer), evaluate, state or {}, lambda own: _hosting(own, run, home, settings))


def _hosting(own: ModuleProgram, run: Run, home: str | os.PathLike[str], settings: Mapping[str, object] | None) -> GuestRequest:
    folder = _folder(home)
    folder.create()
    identity = Identity.load_or_create(folder.identity)
    manifest = run.manifest(shapes_of(own.parameters), own.base).with_host(identity.peer_id)
    signed = SignedManifest.sign(manifest, identity)
    if (held := held_manifest(folder)) is not None:
        if held.run_id != signed.run_id:
            raise BadSettings(
                f"{folder.path} already holds another run, {held.run_id.hex()[:12]}; this one is {signed.run_id.hex()[:12]}",
                hint=OWN_HOME if held.host == identity.peer_id else "this peer joined that run: gossamer.join(None, ...) goes on with it",
            )
        signed = held
    return GuestRequest(config=_config(folder, settings), manifest=signed.to_bytes())


def join(
    invite: str | None,
    model: Model,
    optimizer: Optimizers,
    *,
    evaluate: Evaluate | None,
    home: str | os.PathLike[str],
    state: Mapping[str, Stateful] | None = None,
    settings: Mapping[str, object] | None = None,
) -> Swarm:
    """Join a run with an invite, or go on with the run in `home` (None, or the same invite). The other arguments are those of `host`.

    Returns when the weights are those of the newest checkpoint, or of the run's members if there is none. While the members' weights have
    a worse held-out loss than those that the model comes with, it waits, for about a minute; then it keeps these, and `peer status` says
    so. Raises OperatorError with a hint: BadInvite, BadSettings for another model than the run's, RunRefusesUs, or SwarmUnreachable after
    a minute without an answer.
    """
    swarm = _started(model, _all(optimizer), evaluate, state or {}, lambda own: _joining(invite, home, settings))
    swarm.wait()
    return swarm


def _joining(invite: str | None, home: str | os.PathLike[str], settings: Mapping[str, object] | None) -> GuestRequest:
    folder = _folder(home)
    checked_invite(folder, invite, "ask a member of the run for an invite", "give the new run a home of its own")
    return GuestRequest(config=_config(folder, settings), invite=invite or "")


class Clock:
    """The run's shared clock, in steps."""

    def __init__(self, replica: Replica) -> None:
        self._replica = replica

    @property
    def steps(self) -> int:
        """The global step: how far the run is, as far as this peer knows."""
        return self._replica.global_step

    @property
    def total_steps(self) -> int:
        """The length of the run."""
        return self._replica.manifest.run.total_steps

    @property
    def since_join(self) -> int:
        """This peer's own steps since it last took weights over from other peers; of the host, the steps of the run."""
        return self._replica.steps_since_join()


class Swarm:
    """This program's place in a run; `host` and `join` make it. Use it as a context manager.

    The block begins with `wait` and ends with `finish`, also at Ctrl-C. Any other exception leaves the run without a checkpoint of the last
    steps. All methods but `leave`, `status` and `invite` belong to the thread that called `host` or `join`.

    `clock` is the run's Clock.
    """

    def __init__(self, supervisor: OwnSupervisor, boundary: Boundary, optimizers: Sequence[Optimizer]) -> None:
        self.clock = Clock(boundary.replica)
        self._supervisor = supervisor
        self._boundary = boundary
        self._replica = boundary.replica
        self._home = Home(supervisor.settings.config.home)
        self._thread = threading.get_ident()
        self._optimizers = optimizers
        self._is_leaving = threading.Event()
        self._is_closed = False
        self._rate = 0.0
        self._reading: contextlib.ExitStack | None = None  # open while the weights are only read
        self._since_s = time.monotonic()
        self._open = contextlib.ExitStack()
        self._open.enter_context(fenced(optimizers, self._before_weights_move))
        atexit.register(self._abandon, os.getpid())
        self._open.callback(atexit.unregister, self._abandon)

    # ------------------------------------------------------------------ training

    def wait(self) -> None:
        """Wait until training may begin: until the weights of the run are there, and as many peers as the settings ask for.

        The `with` block and `batches` begin with it. Raises OperatorError if the run cannot be joined.
        """
        self._need_usable()
        boundary = self._boundary
        try:
            while boundary.state is State.READY and not self._must_go():
                boundary.answer()
                boundary.wait()
        except BaseException as error:
            self._close(error)
            raise
        self._since_s = time.monotonic()
        if self._supervisor.stop_requested() and boundary.state is State.READY:
            self._close(None)
            raise self._supervisor.failure(self._home)

    def step(self, *, tokens: int, loss: float | Tensor | None = None) -> None:
        """End a training step: call this once after each optimizer step, on the thread that trains.

        Moves the weights by what meetings have decided, and calls partners, answers, saves and reports what is due. `tokens`: how much this
        step has trained on, in the run's unit; it weighs this peer's progress. `loss`: of this step, for the status; a tensor on a GPU is
        not waited for. While losses are not finite nothing is saved, and the tenth in a row raises OperatorError. Blocks while the peer is
        paused. Raises BadSettings for another thread and after `finish`; trouble of the network never raises.
        """
        self._need_usable()
        self._before_weights_move()
        step = InnerStep.of(tokens, loss, self._rate)
        boundary, now_s = self._boundary, time.monotonic()
        boundary.watch.add(now_s - self._since_s)
        boundary.move()
        self._replica.count_step(step.num_tokens)
        boundary.after_step(step)
        boundary.answer()
        self._rest_while_paused()
        self._since_s = time.monotonic()
        if self._optimizers and not self.over:  # else nothing says when the weights move again
            self._let_others_read()

    @property
    def over(self) -> bool:
        """Whether to stop training: the run is over, the peer was asked to leave, or the supervisor has ended. `batches` ends then."""
        return self._is_leaving.is_set() or not self._boundary.is_training or self._supervisor.stop_requested()

    def batches(self, loader: Iterable[Batch]) -> Iterator[Batch]:
        """Loop over a loader, epoch after epoch, until training is `over`. Raises BadSettings for a loader without a batch.

        Each loop begins the loader anew: a loop that is left with `break` goes on with a new epoch at the next call.
        """
        self.wait()
        while not self.over:
            num_batches = 0
            for batch in loader:
                num_batches += 1
                if self.over:
                    return
                yield batch
            if not num_batches:
                raise BadSettings("the loader has no batches", hint="an iterator can be used once only: pass a loader or a list")

    def rate(self, peak: float, *, warmup_steps: int = 0, rewarm_steps: int = 0, floor: float = 0.1) -> float:
        """Return the learning rate of this moment: warm-up, then a cosine over the run to `floor` times the peak.

        It follows the shared clock, so that members who joined late decay with the others; who took weights over warms up again over
        `rewarm_steps`.
        """
        settings = InnerSettings(self.clock.total_steps, peak, floor, warmup_steps, rewarm_steps)
        self._rate = learning_rate(self.clock.steps, self.clock.since_join, settings)
        return self._rate

    # ------------------------------------------------------------------ the peer

    @property
    def status(self) -> dict[str, Any]:
        """The object that `peer status --json` prints, from any thread. Raises BadSettings if the peer does not answer."""
        return ask(self._home.path, {"verb": "status"})

    @property
    def is_alone(self) -> bool:
        """Whether the settings keep this peer from all others (`alone`)."""
        return self._supervisor.settings.config.alone

    def invite(self, *, uses: int | None = None) -> str:
        """Return an invite for up to `uses` others, 16 by default, valid for 30 days. Waits until this peer knows its addresses.

        Only the run's host may write invites. Raises BadSettings for others, and for a peer that is alone by its settings.
        """
        if self.is_alone:
            raise BadSettings("this peer trains alone, so nobody can join it", hint="leave `alone` out of the settings")
        from gossamer.cli.invite import issued_to_anybody, need_issuer  # the command line is not loaded for training

        identity = Identity.load_or_create(self._home.identity)
        need_issuer(self._replica.manifest, identity.peer_id)
        while not (addresses := self.status["addresses"]):
            time.sleep(PAUSE_LOOK_S)
        run_id = self._replica.manifest.run_id
        return issued_to_anybody(self._home, identity, run_id, tuple(addresses), uses).to_text()

    def save(self) -> None:
        """Write a checkpoint into the home, and wait for it."""
        self._need_usable()
        with self._standing_still():
            self._boundary.save()

    def on_adopted(self, call: Callable[[], None]) -> None:
        """Call this inside `step` whenever the weights have become other peers' and the optimizers' state was cleared.

        An average of the weights that the program keeps is of another model then. `join` has taken the first weights over when it returns.
        """
        self._boundary.on_adopted = call

    def state_dict(self) -> dict[str, Any]:
        """Return this peer's place in the run, with copies of all tensors, for a program that keeps checkpoints of its own."""
        self._need_usable()
        with self._standing_still():
            tensors, state = self._replica.kept()
            return {"tensors": {name: tensor.detach().clone() for name, tensor in tensors.items()}, "state": copy.deepcopy(state)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go back to what `state_dict` returned: weights, optimizers and place. Raises KeyError or ValueError for another model's."""
        self._need_usable()
        with self._standing_still():
            self._boundary.drop_meetings()
            self._replica.restore({name: tensor.clone() for name, tensor in state["tensors"].items()}, state["state"])

    def leave(self) -> None:
        """Ask training to end: `over` becomes true, and the end of the `with` block saves and leaves. From any thread."""
        self._is_leaving.set()

    def finish(self) -> None:
        """End: at the run's end, average with the others and take the result; else save and leave. The end of the `with` block does it.

        Raises the error for which the peer has ended, if it was not asked to.
        """
        self._need_thread()
        if self._is_closed:
            return
        boundary = self._boundary
        self._before_weights_move()
        try:
            while boundary.state is State.BEGUN and self._replica.phase is RunPhase.FINISH and not self._must_go():
                boundary.idle()
                boundary.wait()
            boundary.end()
        except BaseException as error:
            self._close(error)
            raise
        is_lost = self._supervisor.has_ended and not self._is_leaving.is_set() and boundary.state is not State.OVER
        self._close(None)
        if is_lost or self._supervisor.error:
            raise self._supervisor.failure(self._home)

    def __enter__(self) -> Self:
        self.wait()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is None or isinstance(error, KeyboardInterrupt):
            self.finish()
        elif not self._is_closed:  # the last good checkpoint stays
            self._before_weights_move()
            self._close(error)

    # ------------------------------------------------------------------ inside

    def _before_weights_move(self) -> None:
        """End the time in which others may read the weights: an optimizer is about to move them."""
        if self._reading is not None:
            self._boundary.watch.add(time.monotonic() - self._since_s)
            with uninterrupted(), self._boundary.ending_to_read():
                reading, self._reading = self._reading, None
                reading.close()
            self._since_s = time.monotonic()

    def _let_others_read(self) -> None:
        with uninterrupted():
            self._reading = contextlib.ExitStack()
            self._reading.enter_context(self._boundary.reading())

    @contextlib.contextmanager
    def _standing_still(self) -> Iterator[None]:
        """Have the weights to ourselves, as at a step boundary."""
        was_open = self._reading is not None
        self._before_weights_move()
        self._replica.move_fast_weights()
        try:
            yield
        finally:
            if was_open:
                self._let_others_read()

    def _rest_while_paused(self) -> None:
        supervisor, boundary = self._supervisor, self._boundary
        if self.over or not supervisor.settings.paused:
            return
        boundary.save()
        supervisor.emit(ProcessReported("paused", "the program waits in step()"))
        while supervisor.settings.paused and not self.over:
            boundary.answer()
            boundary.wait(PAUSE_LOOK_S)
        supervisor.emit(ProcessReported("training", ""))

    def _must_go(self) -> bool:
        return self._is_leaving.is_set() or self._supervisor.stop_requested()

    def _abandon(self, pid: int) -> None:
        """Leave at the end of a process that did not: with the last good checkpoint. Not in a child that the program has forked."""
        if os.getpid() == pid and threading.get_ident() == self._thread:
            self._before_weights_move()
            self._close(None)

    def _close(self, failure: BaseException | None) -> None:
        self._is_closed = True
        self._open.close()
        self._boundary.close()
        known = failure if isinstance(failure, Exception) else None
        self._supervisor.close(OVER if self._boundary.state is State.OVER else LEFT, known)

    def _need_usable(self) -> None:
        self._need_thread()
        if self._is_closed:
            raise BadSettings("this peer has left the run", hint="join again: `gossamer.join(None, ..., home=...)` goes on from the home")

    def _need_thread(self) -> None:
        if threading.get_ident() != self._thread:
            raise BadSettings("this is another thread than the one that joined the run", hint="call it on the thread that trains")


def _started(
    model: Model,
    optimizers: Sequence[Optimizer],
    evaluate: Evaluate | None,
    kept: Mapping[str, Stateful],
    request: Callable[[ModuleProgram], GuestRequest],
) -> Swarm:
    if not _is_of_ranks(model):
        own = ModuleProgram(model, optimizers, evaluate, kept)
        return Swarm(*_opened(own, request(own)), optimizers)
    from gossamer.ranks import started  # which builds on this module

    return started(model, optimizers, evaluate, kept, lambda own: _opened(own, request(own)))


def _is_of_ranks(model: Model) -> bool:
    """Return whether other ranks run this program too, or the model is sharded, be it over one rank."""
    if not (dist.is_available() and dist.is_initialized()):
        return False
    tensors = model.parameters() if isinstance(model, nn.Module) else model.values()
    return dist.get_world_size() > 1 or any(map(is_sharded, tensors))


def _opened(own: ModuleProgram, request: GuestRequest) -> tuple[OwnSupervisor, Boundary]:
    own.need_steady()
    keep_products_exact()
    supervisor = OwnSupervisor(request)
    try:
        home = Home(request.config.home)
        manifest = SignedManifest.from_bytes(home.manifest.read_bytes()).manifest()
        if not isinstance(manifest, ProgramManifest):
            raise BadSettings("this run trains a language model on text, not a program", hint="join it with `peer join`")
        need_model_of(manifest, shapes_of(own.parameters), own.base)
        supervisor.emit(RunKnown.of(manifest))
        replica = Replica(manifest, own, peer_seed(manifest.run.seed, PeerId.from_text(supervisor.settings.peer_id)))
        num_params = sum(tensor.numel() for tensor in own.parameters.values())
        coding = try_coding(replica.fragments[0].codec.codec, own.device)
        supervisor.emit(ModelBuilt(num_params, 8 * replica.plan.round_bytes / num_params, coding=coding))
        boundary = open_boundary(supervisor, home, replica)
        try:
            boundary.start()
        except BaseException:
            boundary.close()
            raise
    except BaseException as error:
        supervisor.close(LEFT, error if isinstance(error, Exception) else None)
        raise
    return supervisor, boundary


def _folder(home: str | os.PathLike[str]) -> Home:
    return Home(Path(home).expanduser().absolute())


def _config(folder: Home, settings: Mapping[str, object] | None) -> PeerConfig:
    """Return the settings of this start: those given, else those of `config.toml`. Raises BadSettings."""
    values = saved_settings(folder) | dict(settings or {})
    config = peer_config(values | {"home": folder.path, "trains": True})
    return config.model_copy(update={"port": free_port(folder, config.listen, config.port if "port" in values else None)})


def _all(optimizer: Optimizers) -> tuple[Optimizer, ...]:
    return () if optimizer is None else tuple(optimizer) if isinstance(optimizer, Sequence) else (optimizer,)
