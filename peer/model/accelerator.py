"""The accelerators of this machine by torch's one interface for all kinds: CUDA and ROCm (both are `cuda`), XPU, MPS, and those of plugins.

A kind differs from another in one respect only: MPS computes in the host's memory and has a single stream. There nothing rests in pinned
memory, and work for the node waits for the inner step that was started before it.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from typing import Final

import torch

from gossamer.optim.codecs import Codec
from gossamer.optim.coding_check import settle_coding
from gossamer.protocol.errors import BadSettings

IN_HOST_MEMORY: Final = ("cpu", "mps")
OTHERS: Final = "choose auto or cpu"


def has_own_memory(kind: str) -> bool:
    """Return whether devices of this kind have memory of their own, so that values are copied from and to the host's."""
    return kind not in IN_HOST_MEMORY


def choose_device(name: str) -> tuple[torch.device, str]:
    """Turn the device setting into a device, a GPU with its number, and the reason for it. Raises BadSettings if this machine lacks it."""
    if name == "cpu" or (name == "auto" and torch.accelerator.current_accelerator(check_available=True) is None):
        return torch.device("cpu"), "as asked" if name == "cpu" else "no GPU was found"
    kind = _need_accelerator(name).type
    if name == "auto":
        return torch.device(kind, 0), f"a GPU was found: {kind}"
    asked = re.fullmatch(rf"(?:gpu|{kind})(?::(\d{{1,4}}))?", name)
    if asked is None or int(asked[1] or 0) >= torch.accelerator.device_count():
        raise BadSettings(f"this machine has no device {name}", hint=OTHERS)
    return torch.device(kind, int(asked[1] or 0)), "as asked"


def choose_devices(names: str) -> tuple[tuple[torch.device, ...], str]:
    """Turn the devices setting into one device, or several of one kind, and the reason. Raises BadSettings if this machine lacks one.

    `cpu:2` is the CPU twice: two processes share its threads.
    """
    if names == "all":
        kind = _need_accelerator(names).type
        return tuple(torch.device(kind, number) for number in range(torch.accelerator.device_count())), f"all {kind} devices"
    if names[0].isdecimal():
        kind = _need_accelerator(names).type
        return tuple(choose_device(f"{kind}:{number}")[0] for number in names.split(",")), "as asked"
    if names.startswith("cpu:"):
        count, cores = int(names.removeprefix("cpu:")), os.cpu_count() or 1
        if count > cores:
            raise BadSettings(f"{names!r} needs {count} processor cores, and this machine has {cores}", hint=f"choose cpu:{cores}")
        return (torch.device("cpu"),) * count, "as asked"
    device, why = choose_device(names)
    return (device,), why


def _need_accelerator(names: str) -> torch.device:
    found = torch.accelerator.current_accelerator(check_available=True)
    if found is None:
        raise BadSettings(f"{names!r} needs a GPU: this machine has none, or this build of torch does not support it", hint=OTHERS)
    return found


def product_name(device: torch.device) -> str:
    """Return what the device is sold as, else its kind: torch does not tell it for each."""
    naming = getattr(torch.get_device_module(device), "get_device_name", None)
    return str(naming(device)) if naming is not None else device.type


def memory_bytes(device: torch.device) -> tuple[int, int]:
    """Return the free and the total memory of a device with its own."""
    free, total = torch.get_device_module(device).mem_get_info(device)  # torch.accelerator.get_memory_info is younger than torch 2.9
    return int(free), int(total)


def limit_memory(device: torch.device, num_bytes: float) -> None:
    """Limit what torch allocates on a GPU. Raises BadSettings where torch has no such limit."""
    module = torch.get_device_module(device)
    if device.type == "mps":
        module.set_per_process_memory_fraction(min(1.0, num_bytes / module.recommended_max_memory()))
    elif hasattr(module, "set_per_process_memory_fraction"):
        module.set_per_process_memory_fraction(min(1.0, num_bytes / memory_bytes(device)[1]), device)
    else:
        raise BadSettings(f"this build of torch cannot limit its memory on {device}", hint="unset gpu_memory, or install a newer torch")


def try_coding(coder: Codec, device: torch.device) -> str:
    """Return what codes messages on a device, for people, after a trial. Raises BadSettings where torch computes other bits on it."""
    try:
        return settle_coding(coder, device)
    except ArithmeticError as error:
        hint = "`peer doctor` checks it; --devices cpu trains without it"
        raise BadSettings(f"{error}: the device or its driver is broken", hint=hint) from error


def forked_generators(device: torch.device) -> contextlib.AbstractContextManager[None]:
    """Restore torch's random generators after the context, that of the device too."""
    return torch.random.fork_rng([] if device.type == "cpu" else [device], device_type=device.type)


def mark(device: torch.device) -> torch.Event | None:
    """Return a mark behind the work started so far on this thread's stream, for the host or another stream to wait for; None on the CPU."""
    return None if device.type == "cpu" else torch.accelerator.current_stream(device).record_event()


def finish(device: torch.device) -> None:
    """Wait for the work started so far on this thread's stream."""
    if (passed := mark(device)) is not None:
        passed.synchronize()


@contextlib.contextmanager
def behind(passed: torch.Event | None, stream: torch.Stream | None) -> Iterator[None]:
    """Run the code inside on a stream, after a mark, and wait for its end. Without a stream, on the CPU, just run it."""
    if stream is None:
        yield
        return
    if passed is not None:
        stream.wait_event(passed)
    with stream:
        yield
    stream.record_event().synchronize()  # MPS cannot wait for a stream, but for an event
