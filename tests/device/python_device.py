"""An accelerator made in Python, for machines without a GPU: its memory is the host's, and it is as strict as a GPU is.

torch sees a device `pygpu` with tensors of its own (torch.utils.backend_registration, PrivateUse1). Every operation on them comes to
`_Kernels`, which computes it on the host's memory, and

- refuses operands on different devices, but for scalars on the CPU, which a GPU takes too;
- counts every synchronization, that is what torch's sync debug mode counts on CUDA: values read by the program (`item`, `bool`, `tolist`,
  `equal`), shapes that depend on values (`nonzero`, a mask as index), blocking copies from and to the host, and waiting for an event, a
  stream or the device. Inside `no_synchronization` it raises;
- carries out a copy to pinned memory that does not block as late as it may: when an event behind it, its stream or the device is waited
  for. Until then the host reads NaN there;
- refuses to use a tensor on one stream while another stream may still write to it, and to write to it while another may still read it.

It does not show what the allocator of a GPU does: memory that one stream frees may be written to while another reads it (`record_stream`).

torch's own interface for Python has streams and events that do nothing, and neither pinned memory nor memory queries. `install` puts the
classes below in place of these few names of torch. It changes the process for good: tests that need it run in a process of their own.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._device import _device_constructors
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

NAME: Final = "pygpu"
EXTERNAL, HOST = 12, 1  # DLPack's numbers of PrivateUse1 and of the CPU
FREE_BYTES, TOTAL_BYTES = 8 * 10**9, 10**10
aten = torch.ops.aten
# They only make another view; torch's own code for the CPU does it for any tensor.
VIEWS: Final = (aten.as_strided.default, aten.view.default, aten._reshape_alias.default, aten.unfold.default)
MASKED: Final = ("aten::index", "aten::_index_put_impl_", "aten::_unsafe_index")
LAST_FRAMES: Final = 12


class Synchronized(RuntimeError):
    """The host has waited for the device where it must not."""


class OnTwoDevices(RuntimeError):
    """An operation got tensors on different devices."""


class Unordered(RuntimeError):
    """Two streams use the same tensor, and nothing orders them."""


# ---------------------------------------------------------------------- streams and events


@dataclass(slots=True)
class _Seen:
    """Who has used a tensor's memory: stream and number of the operation."""

    written: tuple[int, int] = (0, 0)
    read: dict[int, int] = field(default_factory=dict)


class Stream(torch.Stream):
    """Operations in their order. They are computed at once, but copies to the host that do not block wait until somebody waits for them."""

    def __new__(cls, device: Any = None, priority: int = 0) -> Stream:
        return super().__new__(cls, device=torch.device(NAME, 0))

    def __init__(self, device: Any = None, priority: int = 0) -> None:
        self.id = len(_STREAMS)
        _STREAMS.append(self)
        self.number = 0  # of its last operation
        self.known: dict[int, int] = {}  # the last operation of each stream that this one comes after
        self._late: list[tuple[int, Callable[[], object]]] = []
        self._outer: list[Stream] = []

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        with _LOCK:
            _merge(self.known, event.known)

    def synchronize(self) -> None:
        self.record_event().synchronize()

    def run_until(self, number: int) -> None:
        while self._late and self._late[0][0] <= number:
            self._late.pop(0)[1]()

    def copy_late(self, copy: Callable[[], object]) -> None:
        self._late.append((self.number, copy))

    def __enter__(self) -> Stream:
        self._outer.append(current_stream())
        _CURRENT.stream = self
        return self

    def __exit__(self, *_: object) -> None:
        _CURRENT.stream = self._outer.pop()


class Event:
    """A point in a stream."""

    def __init__(self, device: Any = None, **_: Any) -> None:
        self.known: dict[int, int] = {}

    def record(self, stream: Stream | None = None) -> None:
        stream = stream or current_stream()
        with _LOCK:
            self.known = {**stream.known, stream.id: stream.number}

    def synchronize(self) -> None:
        _synchronize("waiting for an event", self.known)

    def query(self) -> bool:
        return all(_ON_HOST.get(stream, 0) >= number for stream, number in self.known.items())


_LOCK: Final = threading.RLock()
_CURRENT: Final = threading.local()
_ON_HOST: Final[dict[int, int]] = {}  # the last operation of each stream that the program has waited for
_STREAMS: Final[list[Stream]] = []
_MEMORY: Final[dict[int, _Seen]] = {}  # by the address where an allocation begins
_PINNED: Final[set[int]] = set()
_FOUND: Final[list[str]] = []  # the synchronizations
_FORBIDDEN: Final[list[bool]] = []


def current_stream(device: Any = None) -> Stream:
    return getattr(_CURRENT, "stream", _STREAMS[0])


def synchronize(device: Any = None) -> None:
    _synchronize("waiting for the device", {stream.id: stream.number for stream in _STREAMS})


def _merge(known: dict[int, int], more: dict[int, int]) -> None:
    for stream, number in more.items():
        known[stream] = max(number, known.get(stream, 0))


def _synchronize(what: str, known: dict[int, int]) -> None:
    """Note that the program waits for some operations; carry out what was still to come of them."""
    where = "".join(traceback.format_list(traceback.extract_stack()[-LAST_FRAMES:-2]))
    if _FORBIDDEN:
        raise Synchronized(f"{what}:\n{where}")
    with _LOCK:
        _FOUND.append(f"{what}:\n{where}")
        for stream in _STREAMS:
            stream.run_until(known.get(stream.id, 0))
        _merge(_ON_HOST, known)


def _wait_for_current(what: str) -> None:
    stream = current_stream()
    _synchronize(what, {**stream.known, stream.id: stream.number})


@contextlib.contextmanager
def no_synchronization() -> Iterator[None]:
    """Raise Synchronized from any synchronization inside."""
    _FORBIDDEN.append(True)
    try:
        yield
    finally:
        _FORBIDDEN.pop()


@contextlib.contextmanager
def synchronizations() -> Iterator[list[str]]:
    """Yield the list of synchronizations inside, each with the place of its call; it is complete at the end."""
    found, first = list[str](), len(_FOUND)
    yield found
    found += _FOUND[first:]


# ---------------------------------------------------------------------- tensors


class _DLTensor(ctypes.Structure):
    _fields_ = (("data", ctypes.c_void_p), ("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32))


ctypes.pythonapi.PyCapsule_GetPointer.restype = ctypes.c_void_p
ctypes.pythonapi.PyCapsule_GetPointer.argtypes = [ctypes.py_object, ctypes.c_char_p]


def _seen_as(tensor: Tensor, device_type: int) -> Tensor:
    """Return a tensor of the same memory on the other device."""
    capsule = torch.utils.dlpack.to_dlpack(tensor)  # type: ignore[attr-defined]
    place = _DLTensor.from_address(ctypes.pythonapi.PyCapsule_GetPointer(capsule, b"dltensor"))
    place.device_type, place.device_id = device_type, 0
    return torch.utils.dlpack.from_dlpack(capsule)


def _is_ours(value: object) -> bool:
    return isinstance(value, Tensor) and value.device.type == NAME


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class _Kernels:
    """What torch calls for operations on the device."""

    def __call__(self, op: Any, *args: Any, **kwargs: Any) -> Any:
        flat, spec = pytree.tree_flatten((args, kwargs))
        tensors = [value for value in flat if isinstance(value, Tensor)]
        ours = [tensor for tensor in tensors if _is_ours(tensor)]
        if ours and (strange := [tensor for tensor in tensors if not _is_ours(tensor) and tensor.dim()]):
            raise OnTwoDevices(f"{op} got tensors on {NAME} and on {strange[0].device}, of shape {tuple(strange[0].shape)}")
        self._look_for_synchronization(op, args, ours)
        written = self._written(op, args, kwargs)
        self._order([tensor for tensor in ours if not any(tensor is one for one in written)], written)
        there = {
            id(tensor): _seen_as(tensor.detach(), HOST) if tensor.numel() else _UNPINNED(tensor.shape, dtype=tensor.dtype)
            for tensor in ours
        }
        args, kwargs = pytree.tree_unflatten([self._on_host(value, there) for value in flat], spec)
        result = op(*map(self._as_declared, args, op._schema.arguments), **kwargs)
        if written:
            for tensor in written:
                if (filled := there[id(tensor)]).shape != tensor.shape:  # torch gives some operations an empty output to resize
                    tensor.data = self._onto_device(filled)
            return (written[0] if len(written) == 1 else tuple(written)) if op._schema.returns else None
        return pytree.tree_map_only(Tensor, self._onto_device, result)

    @staticmethod
    def _on_host(value: Any, there: dict[int, Tensor]) -> Any:
        if isinstance(value, torch.device):
            return torch.device("cpu")
        return there.get(id(value), value)

    @staticmethod
    def _as_declared(value: Any, argument: Any) -> Any:
        """Return a number as the tensor that torch has made it from."""
        is_number = isinstance(value, int | float) and isinstance(argument.type, torch.TensorType)
        return torch.tensor(value) if is_number else value

    @staticmethod
    def _onto_device(tensor: Tensor) -> Tensor:
        result = _seen_as(tensor, EXTERNAL)
        stream = current_stream()
        with _LOCK:
            _MEMORY[_address(result)] = _Seen((stream.id, stream.number))
        return result

    @staticmethod
    def _written(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
        """Return the arguments that an operation writes to."""
        written = list[Tensor]()
        for number, argument in enumerate(op._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                value = kwargs.get(argument.name, args[number] if number < len(args) else None)
                written += [one for one in pytree.tree_leaves(value) if _is_ours(one)]
        return written

    @staticmethod
    def _look_for_synchronization(op: Any, args: tuple[Any, ...], ours: list[Tensor]) -> None:
        is_dynamic = torch.Tag.data_dependent_output in op.tags or torch.Tag.dynamic_output_shape in op.tags
        if op.name().split(".")[0] in MASKED:
            masks = [one for one in args[1] if one is not None and one.dtype in (torch.bool, torch.uint8)]
            is_dynamic = bool(masks) and not (len(args) > 2 and args[2].numel() == 1)
        if is_dynamic and ours:
            _wait_for_current(f"{op}")

    @staticmethod
    def _order(read: list[Tensor], written: list[Tensor]) -> None:
        """Refuse what another stream may still be writing to, or reading; note who uses it now."""
        stream = current_stream()
        with _LOCK:
            _merge(stream.known, _ON_HOST)
            stream.number += 1
            read, written = ([one for one in tensors if one.numel()] for tensors in (read, written))  # others have no address
            for tensor in (*read, *written):
                seen = _MEMORY.setdefault(_address(tensor), _Seen())
                users = [seen.written, *(seen.read.items() if any(tensor is one for one in written) else ())]
                if behind := [user for user, number in users if user != stream.id and stream.known.get(user, 0) < number]:
                    raise Unordered(f"stream {stream.id} uses a tensor of shape {tuple(tensor.shape)} that stream {behind[0]} still uses")
            for tensor in read:
                _MEMORY[_address(tensor)].read[stream.id] = stream.number
            for tensor in written:
                _MEMORY[_address(tensor)] = _Seen((stream.id, stream.number))

    def copy(self, source: Tensor, target: Tensor, non_blocking: bool = False) -> Tensor:
        """Copy within the device, or from or to the host: `aten::_copy_from`."""
        self._order([source] if _is_ours(source) else [], [target] if _is_ours(target) else [])
        here, there = (_seen_as(one.detach(), HOST) if _is_ours(one) else one for one in (source, target))
        is_late = non_blocking and any(_address(one) in _PINNED for one in (source, target) if not _is_ours(one))
        if not _is_ours(target) and is_late:
            values = here.clone()
            there.view(-1).view(torch.uint8).fill_(255)
            current_stream().copy_late(lambda: there.copy_(values))
            return target
        there.copy_(here)
        if not (_is_ours(source) and _is_ours(target)) and not is_late:
            _wait_for_current(f"a blocking copy from {source.device} to {target.device}")
        return target


# ---------------------------------------------------------------------- the device


class _Module:
    """torch.pygpu."""

    @staticmethod
    def is_initialized() -> bool:
        return True

    @staticmethod
    def is_available() -> bool:
        return True

    @staticmethod
    def current_device() -> int:
        return 0

    @staticmethod
    def device_count() -> int:
        return 1

    @staticmethod
    def _is_in_bad_fork() -> bool:
        return False

    @staticmethod
    def manual_seed(seed: int) -> None:
        """Its generator is the CPU's."""

    manual_seed_all = manual_seed

    @staticmethod
    def get_rng_state(device: Any = None) -> Tensor:
        return torch.get_rng_state()

    @staticmethod
    def set_rng_state(state: Tensor, device: Any = None) -> None:
        torch.set_rng_state(state)

    @staticmethod
    def get_amp_supported_dtype() -> list[torch.dtype]:
        return [torch.bfloat16]

    @staticmethod
    def get_device_name(device: Any = None) -> str:
        return "a device made in Python"

    @staticmethod
    def mem_get_info(device: Any = None) -> tuple[int, int]:
        return FREE_BYTES, TOTAL_BYTES


_KEPT: Final[list[object]] = []


def _empty(*size: Any, pin_memory: bool = False, **kwargs: Any) -> Tensor:
    tensor: Tensor = _UNPINNED(*size, **kwargs)
    if pin_memory:
        _PINNED.add(_address(tensor))
        _KEPT.append(tensor)  # or another tensor would get its address
    return tensor


def _pinned(tensor: Tensor) -> Tensor:
    assert tensor.device.type == "cpu", "only memory of the host can be pinned"
    return _empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor)


def _deep_copy(tensor: Tensor, memo: dict[int, Any]) -> Any:
    """torch would copy the storage, whose allocator a device made in Python cannot have."""
    if not _is_ours(tensor):
        return _COPY_STORAGE(tensor, memo)
    if id(tensor) not in memo:
        memo[id(tensor)] = tensor.detach().clone().requires_grad_(tensor.requires_grad)
    return memo[id(tensor)]


_UNPINNED: Final = torch.empty
_COPY_STORAGE: Final = Tensor.__deepcopy__


def install() -> None:
    """Make the device this process's accelerator. Call it once, before anything of the product is imported."""
    _setup_privateuseone_for_python_backend(NAME, backend_module=_Module())
    kernels = _Kernels()
    everything = torch.library.Library("_", "IMPL")
    everything.fallback(kernels, "PrivateUse1")
    library = torch.library.Library("aten", "IMPL")
    for view in VIEWS:
        library.impl(view, lambda *args, _view=view: _view._op_dk(torch._C.DispatchKey.CPU, *args), "PrivateUse1")
    library.impl("_copy_from", kernels.copy, "PrivateUse1")
    library.impl("record_stream", lambda tensor, stream: None, "PrivateUse1")
    _KEPT.extend((everything, library))
    Stream()  # the one in which all is computed where no other is current
    torch.Stream, torch.Event = Stream, Event  # type: ignore[assignment,misc]
    torch.accelerator.current_stream, torch.accelerator.synchronize = current_stream, synchronize  # type: ignore[assignment]
    torch.accelerator.empty_cache = torch.accelerator.memory.empty_cache = lambda: None
    _device_constructors()  # remembers torch's own `empty`, so that `with torch.device(...)` still places what ours makes
    torch.empty, Tensor.pin_memory, Tensor.__deepcopy__ = _empty, _pinned, _deep_copy  # type: ignore[assignment,method-assign]
