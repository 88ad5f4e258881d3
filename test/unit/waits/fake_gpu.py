"""A GPU that is not there: operations on its tensors have shapes and no values, and each is noted where it was issued.

    FakeGpu        a context: tensors made on "cuda" inside are the fake GPU's; CPU tensors stay real
    watching       what is issued inside: operations, and calls that may make the host wait
    catch_up       the GPU has done everything that it was given

With values, tensors stay the CPU's and real, and only Triton kernels do nothing: an operation then takes the host about
as long as a launch, where one without values takes a hundred times as long. Nothing is noted of them.

What the host gets from the GPU is ones. Which calls wait is taken from PyTorch's CUDA code: whatever needs a value or a
count on the host, and every copy that is not non-blocking with the host's side of it page-locked. PyTorch does not wait
for a non-blocking copy from ordinary memory, but the driver may.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any
from unittest import mock

import torch
import triton
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from sgl_kernel_ext import transfer

OURS = ("/sglang_chunk_cache/", "/sgl_kernel_ext/", "/chunk_cache/")
_HELPER = "sgl_kernel_ext/transfer.py"  # its callers are named
aten, prim = torch.ops.aten, torch.ops.prim

_MAKES_LIKE = (aten.empty_like.default, aten.zeros_like.default, aten.full_like.default, aten.ones_like.default)
_SILENT = (prim.device.default, aten.lift_fresh.default, aten.is_pinned.default)
_NEEDS_A_COUNT = (
    *(aten.nonzero.default, aten.masked_select.default, aten.unique_dim.default, aten._unique2.default),
    *(aten.repeat_interleave.Tensor, aten.bincount.default, aten.unique_consecutive.default),
)
# Operations that take one number of the host as a tensor, and copy it to the GPU first.
_COPIES_NUMBERS = (aten.index_put_.default, aten.index_put.default, aten._index_put_impl_.default)


@dataclass(frozen=True)
class Call:
    """Something that was issued: its name, and the innermost file and line of SGLang or ours that it came from."""

    name: str
    place: str
    is_ours: bool
    is_view: bool = False

    def __str__(self) -> str:
        return f"{self.place} {self.name}"


@dataclass
class Watch:
    """What was issued in a scope."""

    operations: list[Call] = field(default_factory=list)
    waits: list[Call] = field(default_factory=list)

    @property
    def own_waits(self) -> list[str]:
        return [str(call) for call in self.waits if call.is_ours]

    @property
    def own_operations(self) -> list[Call]:
        return [call for call in self.operations if call.is_ours]


class Event:
    """Done as soon as the GPU has caught up, which it does while the host asks in vain."""

    def __init__(self, gpu: FakeGpu, *args: Any, **kwargs: Any) -> None:
        self._gpu = gpu
        self._recorded_at: int | None = None

    def record(self, stream: Any = None) -> None:
        self._recorded_at = self._gpu.num_issued

    def query(self) -> bool:
        is_done = self._recorded_at is None or self._recorded_at <= self._gpu.num_done
        if not is_done:
            self._gpu.go_on()
        return is_done

    def synchronize(self) -> None:
        self._gpu.note_wait("Event.synchronize", up_to=self._recorded_at)

    def wait(self, stream: Any = None) -> None:
        """Of a stream."""

    def elapsed_time(self, other: Event) -> float:
        return 1.0


class Stream:
    """Whatever it is given is done when the GPU has caught up."""

    cuda_stream = 0

    def __init__(self, gpu: FakeGpu, *args: Any, **kwargs: Any) -> None:
        self._gpu = gpu

    def synchronize(self) -> None:
        self._gpu.note_wait("Stream.synchronize")

    def wait_stream(self, other: Any) -> None: ...

    def wait_event(self, event: Any) -> None: ...

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event(self._gpu)
        event.record()
        return event

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: Any) -> None: ...


class _TritonDriver:
    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


class FakeGpu(TorchDispatchMode):
    """See the head of this file; enter it by `with FakeGpu.there() as gpu`."""

    def __init__(self) -> None:
        super().__init__()
        self.has_values = False
        self.num_issued = 0
        self.num_done = 0
        self._watches: list[Watch] = []
        self._pinned: list[torch.Tensor] = []
        self._stream = Stream(self)
        self.module = SimpleNamespace(
            Event=lambda *args, **kwargs: Event(self),
            Stream=lambda *args, **kwargs: Stream(self),
            current_stream=lambda *_: self._stream,
            default_stream=lambda *_: self._stream,
            stream=lambda _: contextlib.nullcontext(),
            StreamContext=lambda _: contextlib.nullcontext(),
            synchronize=lambda *_: self.note_wait("synchronize"),
            set_stream=lambda _: None,
            current_device=lambda: 0,
            get_device_properties=lambda *_: SimpleNamespace(multi_processor_count=132),
            get_device_capability=lambda *_: (9, 0),
            is_available=lambda: False,  # to PyTorch, which would initialise it
        )

    @classmethod
    @contextlib.contextmanager
    def there(cls, has_values: bool = False) -> Iterator[FakeGpu]:
        """Inside, there is a GPU."""
        gpu = cls()
        gpu.has_values = has_values
        real_module, real_tolist = torch.get_device_module, torch.Tensor.tolist

        def get_device_module(device: Any = None) -> Any:
            return real_module(device) if device is not None and torch.device(device).type == "cpu" else gpu.module

        def pinning(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
            def made(*args: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
                tensor = make(*args, **kwargs)
                if pin_memory:
                    gpu._pinned.append(tensor)
                return tensor

            return made

        def tolist(self: torch.Tensor) -> Any:
            if not isinstance(self, FakeTensor):
                return real_tolist(self)
            gpu.note_wait("tolist")
            with unset_fake_temporarily():
                return real_tolist(torch.ones(self.shape, dtype=self.dtype))

        def hold(self: torch.Tensor, stream: Any) -> None:
            gpu._note("record_stream", is_view=True)

        def run(kernel: JITFunction, *args: Any, **kwargs: Any) -> None:
            gpu._note(kernel.__name__)

        patches = [
            mock.patch.object(torch, "get_device_module", get_device_module),
            *(mock.patch.object(torch, name, pinning(getattr(torch, name))) for name in ("tensor", "empty")),
            mock.patch.object(torch.Tensor, "tolist", tolist),
            mock.patch.object(torch.Tensor, "record_stream", hold),
            mock.patch.object(torch.Tensor, "pin_memory", lambda self, device=None: gpu._pin(self)),
            mock.patch.object(torch.Tensor, "is_pinned", lambda self, device=None: gpu._is_pinned(self)),
            mock.patch.object(JITFunction, "run", run),
            mock.patch.object(triton.runtime.driver, "_active", _TritonDriver()),
            mock.patch.object(transfer, "_has_gpu", return_value=True),
            *(mock.patch.object(torch.cuda, name, value) for name, value in vars(gpu.module).items()),
        ]
        with contextlib.ExitStack() as stack:
            for patch in patches:
                stack.enter_context(patch)
            if not has_values:
                stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
                stack.enter_context(gpu)
            yield gpu

    @contextlib.contextmanager
    def watching(self) -> Iterator[Watch]:
        """What is issued inside."""
        watch = Watch()
        self._watches.append(watch)
        try:
            yield watch
        finally:
            self._watches.remove(watch)

    def catch_up(self) -> None:
        """The GPU has done everything that it was given."""
        self.num_done = self.num_issued

    def go_on(self) -> None:
        """The GPU has done some more."""
        self.num_done += max(1, (self.num_issued - self.num_done) // 2)

    def note_wait(self, name: str, up_to: int | None = None) -> None:
        """The host waits until the GPU has done what was issued up to some time; None = until now."""
        if threading.current_thread() is not threading.main_thread():
            return  # workers may
        place, is_ours = _place()
        for watch in self._watches:
            watch.waits.append(Call(name, place, is_ours))
        self.num_done = max(self.num_done, self.num_issued if up_to is None else up_to)

    def _note(self, name: str, is_view: bool = False) -> None:
        self.num_issued += 1
        place, is_ours = _place()
        for watch in self._watches:
            watch.operations.append(Call(name, place, is_ours, is_view))

    def _pin(self, tensor: torch.Tensor) -> torch.Tensor:
        pinned = tensor.clone()
        self._pinned.append(pinned)
        return pinned

    def _is_pinned(self, tensor: torch.Tensor) -> bool:
        at = tensor.untyped_storage().data_ptr()
        return any(one.untyped_storage().data_ptr() == at for one in self._pinned)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        tensors = [one for one in tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor)]
        goes_to = getattr(kwargs.get("device"), "type", None)
        if goes_to != "cuda" and not any(isinstance(one, FakeTensor) for one in tensors):
            return self._on_host(func, args, kwargs)
        if func in _SILENT:
            return func(*args, **kwargs)
        name = str(func).removeprefix("aten.")
        if func is aten._local_scalar_dense.default:
            self.note_wait(name)
            with unset_fake_temporarily():
                return torch.ones((), dtype=args[0].dtype).item()
        if func is aten.copy_.default and not isinstance(args[0], FakeTensor):
            self._note_copy(name, args[0], kwargs.get("non_blocking") or (len(args) > 2 and args[2]))
            return self._on_host(aten.fill_.Scalar, (args[0], 1), {})
        if func is aten._to_copy.default and goes_to == "cpu" and isinstance(args[0], FakeTensor):
            return self._copied_to_host(name, args[0], kwargs)
        self._note_waits_of(func, name, args, kwargs, tensors)
        self._note(name, is_view=func.is_view)
        return func(*args, **kwargs)

    def _on_host(self, func: Any, args: Any, kwargs: Any) -> Any:
        pins = kwargs.pop("pin_memory", False) or func is aten._pin_memory.default
        with unset_fake_temporarily():
            made = args[0].clone() if func is aten._pin_memory.default else func(*args, **kwargs)
        if pins:
            self._pinned.append(made)
        return made

    def _copied_to_host(self, name: str, source: torch.Tensor, kwargs: dict[str, Any]) -> torch.Tensor:
        # PyTorch gives a non-blocking copy page-locked memory by itself.
        if not kwargs.get("non_blocking"):
            self.note_wait(name)
        self._note(name)
        with unset_fake_temporarily():
            made = torch.ones(source.shape, dtype=kwargs.get("dtype") or source.dtype)
        self._pinned.append(made)
        return made

    def _note_copy(self, name: str, host: torch.Tensor, is_non_blocking: Any) -> None:
        if not (is_non_blocking and self._is_pinned(host)):
            self.note_wait(f"{name} {'from pageable memory' if is_non_blocking else 'blocking'}")
        self._note(name)

    def _note_waits_of(self, func: Any, name: str, args: Any, kwargs: Any, tensors: list[torch.Tensor]) -> None:
        on_host = [one for one in tensors if not isinstance(one, FakeTensor)]
        if func is aten.repeat_interleave.Tensor and kwargs.get("output_size") is not None:
            return
        if func in _NEEDS_A_COUNT:
            self.note_wait(name)
        if func in (aten.index.Tensor, aten.index_put_.default, aten.index_put.default):
            indices = [one for one in args[1] if isinstance(one, torch.Tensor)]
            if any(one.dtype in (torch.bool, torch.uint8) for one in indices):
                self.note_wait(f"{name} by a mask")
        if func in (aten._to_copy.default, aten.copy_.default):
            for one in on_host:
                non_blocking = kwargs.get("non_blocking") or (func is aten.copy_.default and len(args) > 2 and args[2])
                if not (non_blocking and self._is_pinned(one)):
                    self.note_wait(f"{name} {'from pageable memory' if non_blocking else 'blocking'}")
        elif func in _MAKES_LIKE:
            return
        elif any(one.ndim for one in on_host) or (on_host and func in _COPIES_NUMBERS):
            self.note_wait(f"{name} with values of the host")


def _place() -> tuple[str, bool]:
    """Where a call came from, and whether that is ours: the innermost line of SGLang or ours, and its function."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        code = frame.f_code
        is_ours = any(part in code.co_filename for part in OURS)
        if (is_ours and not code.co_filename.endswith(_HELPER)) or "/sglang/" in code.co_filename:
            path = "/".join(Path(code.co_filename).parts[-2:])
            return f"{path}:{frame.f_lineno} {code.co_qualname}", is_ours
        frame = frame.f_back
    return "elsewhere", False
