"""What a run needs of a machine, counted from its manifest before anything is downloaded or built.

The counts repeat what the code holds, file by file: change them with it. tests/peer/trainer/test_need.py compares them with a real trainer;
the constants are measured (docs/log.md, "What a run needs").
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Final

import torch

from gossamer.optim.inner import divide_parameters, num_state_values
from gossamer.optim.resting import most_values_at_once
from gossamer.peer.machine.config import PeerConfig
from gossamer.peer.machine.home import Home
from gossamer.peer.machine.room import (
    OTHERS_BYTES,
    TRAINER_BYTES,
    Room,
    at_most,
    container_size,
    disk_room,
    home_room,
    memory_room,
    need_room,
)
from gossamer.peer.model.accelerator import has_own_memory, memory_bytes
from gossamer.peer.model.activation_memory import activation_bytes
from gossamer.peer.model.computing import Computing
from gossamer.peer.model.model import frozen_shapes, model_config, need_layout, parameter_shapes
from gossamer.peer.model.plan import fragment_codecs, model_plan
from gossamer.protocol.errors import BadSettings
from gossamer.protocol.messages.terms import ModelPlan
from gossamer.protocol.run.layout import Shapes
from gossamer.protocol.run.manifest import Manifest, ProgramManifest

VALUE_BYTES: Final = 4  # f32 everywhere
GPU_RUNTIME_BYTES: Final = 600_000_000  # what CUDA takes for itself; other kinds are not measured
MEETINGS: Final = 4  # at once: two begun here, two elsewhere (peer/node/meetings.py)
MEETING_VALUES: Final = 5  # snapshot, message, gap; slow weights and shift of the outer step (peer/trainer/meeting.py); momentum likewise
CHECKPOINTS: Final = 3  # two that are kept, one that is being written (peer/model/checkpoint.py)
PROGRAMS: Final = "for the programs"
FROZEN: Final = "for the frozen weights under the adapter"
TRIED_ON: Final = "for another peer's weights while they are judged"  # peer/trainer/shared_state.py
OPTIMIZER: Final = "for the optimizer"
WORKING: Final = "for the part of the optimizer that steps"  # optim/resting.py
BROUGHT: Final = "for the model while it is built, or another peer's while it is judged"  # on its way to a device with its own memory
SYNCED: Final = "for fragments that are synchronized, until all have come"  # peer/trainer/fragment_syncs.py
COPY: Final = "for the copy that a checkpoint is written from"  # peer/trainer/saver.py
HOPS_BYTES: Final = 60_000_000  # of node and trainer of a stage: two holders held 33 and 47 MB more than was counted without it
STAGED: Final = "; so does a run in stages, of which each peer holds one: its host starts it with `peer host --stages N`"

Parts = Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Need:
    """What a run needs: bytes by purpose."""

    memory: Parts  # of the machine, shared memory included
    device: Parts  # of a device with its own memory; else empty
    payloads: Parts  # of the folder in shared memory through which node and trainer exchange bulk bytes
    disk: Parts  # of the home's
    plan: ModelPlan
    num_params: int
    whose: str = "this run"
    less: str = "a run with a smaller model needs less"
    can_be_cut: bool = False  # into stages, as far as the model's config tells


def run_need(manifest: Manifest, device: str, computing: Computing | None = None) -> Need:
    """Count what a peer of this run needs on devices of this kind; without `computing`, on one device, one sequence at a time.

    Each of several devices holds weights, gradients, the activations of its rows and a share of the optimizer; the first, of kind `device`,
    holds the rest. Raises BadManifest for a model that cannot be.
    """
    computing = computing or Computing(micro_batch=1, recompute=True)
    shapes = parameter_shapes(manifest.model)
    need_layout(manifest.model, shapes)
    num_rows = computing.micro_batch or computing.rows(manifest.inner.batch_size)
    left = activation_bytes(manifest.model, num_rows, manifest.inner.sequence_length, computing.dtype, computing.recompute)
    return replace(model_need(manifest, shapes, device, computing, left), can_be_cut=_can_be_cut(manifest))


def _can_be_cut(manifest: Manifest) -> bool:
    if manifest.run.access == "open" or manifest.is_fine_tuning or manifest.model.hub is not None:
        return False
    config = model_config(manifest.model)
    return bool(getattr(config, "base_model_pp_plan", None)) and getattr(config, "num_hidden_layers", 1) > 1


def model_need(
    manifest: Manifest, shapes: Shapes, device: str, computing: Computing, activations: int, hops: Parts = MappingProxyType({})
) -> Need:
    """Count what a peer needs that trains tensors of these shapes, of which a step leaves `activations` bytes; see `run_need`.

    `hops`: what passes through the payload folder beside meetings.
    """
    codecs = fragment_codecs(manifest, shapes)
    plan = model_plan(codecs, manifest.outer.alpha)
    sizes = sorted((codec.fragment.numel for codec in codecs), reverse=True)
    num_params = sum(sizes)
    count, is_apart = computing.num_devices, has_own_memory(device)
    name = manifest.inner.optimizer
    optimizer = VALUE_BYTES * num_state_values(name, shapes)
    shares = [{name: shapes[name] for name in names} for names in divide_parameters(name, shapes, count)]
    share = VALUE_BYTES * max(num_state_values(name, one) for one in shares)
    weights, has_momentum = VALUE_BYTES * num_params, manifest.outer.alpha > 0.0
    rests = is_apart and computing.optimizer_on_host
    frozen = VALUE_BYTES * sum(map(math.prod, frozen_shapes(manifest.model).values()))
    under = {FROZEN: frozen * (1 if is_apart else count)} if frozen else {}
    slow = {"for slow weights and momentum": 2 * weights} if has_momentum else {"for slow weights": weights}
    tensors = {
        **under,
        "for weights and their gradients": 2 * weights * (1 if is_apart else count),
        **(_working_part(name, shares, device) if rests else {OPTIMIZER: share if is_apart else optimizer}),
        **({} if is_apart else {**slow, COPY: weights + optimizer}),
        **_largest_temporary(manifest, computing, weights, VALUE_BYTES * sum(sizes[:MEETINGS]), activations, is_apart),
    }
    payloads = {**_payloads(plan), **hops}
    resting = {OPTIMIZER: optimizer} if rests else {}
    copied = {**slow, **resting, COPY: weights + optimizer, BROUGHT: (1 + has_momentum) * weights + frozen}
    programs = {PROGRAMS: count * TRAINER_BYTES + OTHERS_BYTES, "for payloads": sum(payloads.values())}
    checkpoints = CHECKPOINTS * ((2 + has_momentum) * weights + optimizer)
    return Need(
        memory=programs | (copied if is_apart else tensors),
        device=tensors | {"for the GPU's runtime": GPU_RUNTIME_BYTES} if is_apart else {},
        payloads=payloads,
        disk={"for checkpoints": checkpoints, "for weights that are fetched": plan.state_bytes},
        plan=plan,
        num_params=num_params,
    )


def program_need(manifest: ProgramManifest, shapes: Shapes, device: str, checkpoint_bytes: int) -> Need:
    """Count what a member of a program run needs, as far as the shapes of its tensors and its last checkpoint tell.

    What the program computes, and its optimizer, are its own affair: they are counted only in the checkpoint. Raises BadManifest.
    """
    codecs = fragment_codecs(manifest, shapes)
    plan = model_plan(codecs, manifest.outer.alpha)
    sizes = sorted((codec.fragment.numel for codec in codecs), reverse=True)
    weights, has_momentum = VALUE_BYTES * sum(sizes), manifest.outer.alpha > 0.0
    slow, payloads = (1 + has_momentum) * weights, _payloads(plan)
    checkpoint = max(slow + weights, checkpoint_bytes)
    trained = {"for weights and their gradients": 2 * weights}
    return Need(
        memory={
            PROGRAMS: TRAINER_BYTES + OTHERS_BYTES,
            "for payloads": sum(payloads.values()),
            "for slow weights and momentum" if has_momentum else "for slow weights": slow,
            COPY: checkpoint - slow,
            "for meetings under way": (MEETING_VALUES + has_momentum) * VALUE_BYTES * sum(sizes[:MEETINGS]),
            **({} if has_own_memory(device) else trained),
        },
        device=trained if has_own_memory(device) else {},
        payloads=payloads,
        disk={"for checkpoints": CHECKPOINTS * checkpoint, "for weights that are fetched": plan.state_bytes},
        plan=plan,
        num_params=sum(sizes),
    )


def _payloads(plan: ModelPlan) -> dict[str, int]:
    largest = sorted((fragment.slow_bytes for fragment in plan.fragments), reverse=True)
    return {"for meetings under way": 2 * sum(largest[:MEETINGS]), "for a copy of the weights that others fetch": plan.state_bytes}


def computing_that_fits(manifest: Manifest, device: str, there: Rooms, wanted: Computing) -> Computing:
    """Return how a peer should compute so that the run fits. Raises BadSettings if nothing does.

    As wanted; else with fewer sequences at a time; then with the optimizer's state on the host; then with recomputed activations.
    """
    sizes = [wanted.micro_batch or wanted.rows(manifest.inner.batch_size)]
    while sizes[-1] > 1:
        sizes.append(-(-sizes[-1] // 2))
    tries = [replace(wanted, micro_batch=size) for size in sizes]
    hosted = [replace(one, optimizer_on_host=True) for one in tries] if has_own_memory(device) else []
    for computing in [*tries, *hosted, replace(tries[-1], recompute=True), *(replace(one, recompute=True) for one in hosted[-1:])]:
        try:
            need_to_fit(run_need(manifest, device, computing), there)
            return computing
        except BadSettings as error:
            refusal = error
    raise refusal


def least_need(manifest: Manifest, device: str, room: Room | None, num_devices: int = 1) -> Need:
    """Count the least that a peer needs where a device has this room: its optimizer's state rests on the host only if it must.

    Raises BadManifest for a model that cannot be.
    """
    least = Computing(micro_batch=1, recompute=True, num_devices=num_devices)
    need = run_need(manifest, device, least)
    is_too_large = room is not None and sum(need.device.values()) > room.num_bytes
    return run_need(manifest, device, replace(least, optimizer_on_host=True)) if is_too_large else need


def _working_part(name: str, shares: Sequence[Shapes], device: str) -> Parts:
    """Return what the largest part of an optimizer takes on the device while it steps: at most two values a parameter."""
    values = max(most_values_at_once(name, share, torch.device(device)) for share in shares)
    return {WORKING: 2 * VALUE_BYTES * values}


def _largest_temporary(manifest: Manifest, computing: Computing, weights: int, fragments: int, activations: int, is_apart: bool) -> Parts:
    """Return the larger of what is never held at once: an inner step beside meetings, and another peer's weights while they are judged."""
    step = {
        "for what a batch leaves in the model": activations * (1 if is_apart else computing.num_devices),
        "for meetings under way": (MEETING_VALUES + (manifest.outer.alpha > 0.0)) * fragments,
        **({} if is_apart else {SYNCED: weights}),  # beside a GPU they rest on the host, where another model was brought before
    }
    tried_on = {TRIED_ON: weights if is_apart else 2 * weights}  # a copy of ours; the other peer's slow ones rest on the host
    return max(step, tried_on, key=lambda parts: sum(parts.values()))


@dataclass(frozen=True, slots=True)
class Rooms:
    """The room that a peer has, including what it already holds."""

    memory: Room
    device: Room | None  # None: the device has no memory of its own
    payloads: Room
    disk: Room


def rooms(devices: Sequence[torch.device], config: PeerConfig, payloads: Path, held_bytes: int) -> Rooms:
    """Measure the room that the machine and the settings leave; `held_bytes` is the memory that the peer, or this program, holds."""
    device = device_room(devices, config.gpu_memory) if has_own_memory(devices[0].type) else None
    return Rooms(memory_room(held_bytes, config.max_memory), device, disk_room(payloads), home_room(Home(config.home), config.max_disk))


def device_room(devices: Sequence[torch.device], gpu_memory: str) -> Room:
    """Return the free memory of the fullest of some devices with their own memory, as far as this setting allows."""
    free = min((Room(memory_bytes(device)[0], f"free on {device}") for device in devices), key=lambda room: room.num_bytes)
    return at_most(free, gpu_memory, "gpu_memory")


def need_to_fit(need: Need, there: Rooms) -> None:
    """Raise BadSettings, with the sum, its parts and what would fit, if a run needs more than there is."""
    need_memory(need, there.memory)
    if there.device is not None:
        need_device_memory(need, there.device)
    need_payload_room(need, there.payloads)
    need_disk(need, there.disk)


def need_memory(need: Need, room: Room) -> None:
    """Raise BadSettings unless the machine's memory is enough, with what would need less if any model would fit."""
    fixed, total = need.memory[PROGRAMS], sum(need.memory.values())
    num_params = int(need.num_params * (room.num_bytes - fixed) / (total - fixed))
    fits = f"here would fit {num_params / 1e6:.3g} of its {need.num_params / 1e6:.3g} million parameters"
    staged = STAGED if need.can_be_cut and (total - fixed) / 2 > HOPS_BYTES else ""
    less = f"{fits}; {need.less}{staged}" if num_params > 0 else ""
    need_room("memory", need.memory, room, f"give it that much (a container: --memory {container_size(total)})", need.whose, less)


def need_device_memory(need: Need, room: Room) -> None:
    """Raise BadSettings unless the device's memory is enough."""
    need_room(
        "memory on the device",
        need.device,
        room,
        "use --devices cpu, or a device with more memory",
        need.whose,
        need.less + (STAGED if need.can_be_cut else ""),
    )


def need_payload_room(need: Need, room: Room) -> None:
    """Raise BadSettings unless the payload folder can hold enough."""
    wanted = container_size(2 * sum(need.payloads.values()))
    need_room("shared memory", need.payloads, room, f"give /dev/shm more room (a container: --shm-size {wanted})", need.whose)


def need_disk(need: Need, room: Room) -> None:
    """Raise BadSettings unless the home's disk can hold enough."""
    need_room("disk space", need.disk, room, "free some space, or choose a folder on a larger disk with --home DIR", need.whose)


def needs(manifest: Manifest) -> dict[str, Need]:
    """Return the least that a peer needs, one sequence at a time, on a GPU in bf16 and on a CPU. Raises BadManifest."""
    return {
        device: run_need(manifest, device, Computing(dtype, micro_batch=1, recompute=True))
        for device, dtype in (("cuda", torch.bfloat16), ("cpu", torch.float32))
    }


def places(need: Need) -> dict[str, int]:
    """Return the bytes that a run needs, by kind of memory."""
    parts = {"device": need.device, "memory": need.memory, "shared_memory": need.payloads, "disk": need.disk}
    return {place: sum(sizes.values()) for place, sizes in parts.items()}
