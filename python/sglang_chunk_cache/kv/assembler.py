"""KVAssembler: moves the KV of chunks into the slots of a request, at their new positions.

Verbs: `copy` (slots to slots, with the rotary phase of K shifted), `gather` (slots to host memory) and `fill` (back,
bit by bit).

A model that drafts has a KV pool of its own over the same slots: what is copied within the pool is copied there too.

Promises: a copy is enqueued behind every forward that was launched before it and before every later one, so its
sources are complete, and both sources and targets may change hands as soon as `copy` returns. Nothing waits on the
host.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from sglang.srt.arg_groups.overrides import resolution_result
from sglang.srt.runtime_context import get_schedule

from sgl_kernel_ext.backend import raw
from sgl_kernel_ext.copy_rotate import copy_rotate
from sgl_kernel_ext.rotary import RotarySpec, Turn
from sgl_kernel_ext.transfer import host_buffer
from sglang_chunk_cache.kv.fingerprint import Fingerprint, adapter_settings, rotary_digest, weights_digest
from sglang_chunk_cache.kv.layer_kv import kv_buffers
from sglang_chunk_cache.kv.state_layout import StateLayout
from sglang_chunk_cache.kv.stored_variant import host_memory
from sglang_chunk_cache.kv.transition import Transition

if TYPE_CHECKING:
    from sglang.srt.model_executor.model_runner import ModelRunner


MAX_STAGED_BYTES = 64 << 20
"""Bytes that one copy to or from the host takes on the device meanwhile; a copy is at least a layer of K or V."""


def hold(tensors: Iterable[torch.Tensor]) -> None:
    """Keeps the memory of tensors that another stream has made until the current one has read them."""
    for one in tensors:
        if one.device.type != "cpu":
            one.record_stream(torch.get_device_module().current_stream())


@dataclass(frozen=True)
class HostKV:
    """K and V of some tokens in host memory, or on their way there.

    Attributes:
        k, v: `[num_layers, num_tokens, num_kv_heads, head_dim]`, on the CPU, pinned where there is a GPU.
        copied: event behind the copy; None = K and V are there.
        transition: what the tokens do to states, in a model that has some; there as soon as K and V are.
    """

    k: torch.Tensor
    v: torch.Tensor
    copied: Any = None
    transition: Transition | None = None

    def wait(self) -> None:
        """Returns once K and V are there; for a worker thread."""
        if self.copied is not None:
            self.copied.synchronize()


class RotationGroup(NamedTuple):
    """Buffers of layers whose keys are rotated alike; without `is_rotated` not at all, whatever `rotary` is."""

    rotary: RotarySpec
    is_rotated: bool
    k: list[torch.Tensor]
    v: list[torch.Tensor]


class KVAssembler:
    """Copies KV between slots of one pool.

    Args:
        model_runner: owner of the model and of the stream that forwards run on.
        kv_pool: SGLang's.
        rotaries: `[num_layers]` how the keys of each layer are rotated; None = they carry no position.
        kernel: backend of the operations on this pool.
    """

    def __init__(
        self, model_runner: ModelRunner, kv_pool: Any, rotaries: Sequence[RotarySpec | None], kernel: str
    ) -> None:
        self._k_buffers, self._v_buffers = kv_buffers(kv_pool)
        self._rotaries = tuple(rotaries)
        self._all_alike = self._alike(range(len(self._rotaries)))
        self.kernel = kernel
        self._model_runner = model_runner
        self._is_cpu = torch.device(kv_pool.device).type == "cpu"
        self.draft: KVAssembler | None = None
        """The assembler of the model that drafts, once that is there."""

    def copy(
        self,
        src_loc: torch.Tensor,
        dst_loc: torch.Tensor,
        position_delta: torch.Tensor | Turn,
        layers: range | None = None,
    ) -> None:
        """Copies K and V of every layer, or of some, from `src_loc` to `dst_loc`, K rotated by `position_delta`.

        Args:
            src_loc, dst_loc: `[num_tokens]` int64 slots, on the pool's device, without overlap.
            position_delta: `[num_tokens]` int64, new minus old position; 0 copies bit by bit. Pass a `Turn` of them if
                calls for other layers follow.
        """
        turn = Turn.of(position_delta)
        with self._behind_launched_forwards(src_loc, dst_loc, turn.by):
            for alike in self._all_alike if layers is None else self._alike(layers):
                delta = turn if alike.is_rotated else torch.zeros_like(turn.by)
                copy_rotate(alike.k, alike.v, src_loc, dst_loc, delta, alike.rotary, backend=self.kernel)
        if self.draft is not None:
            assert layers is None, "chunks that arrive layer by layer have no draft"
            self.draft.copy(src_loc, dst_loc, turn.by)

    def pack(self, row: torch.Tensor, kept: torch.Tensor, slots: torch.Tensor) -> None:
        """Copies what each layer and KV head keeps of a request into `slots`, and makes them the slots of its row.

        Whatever the current stream is given next runs behind this, so it may write to the row again.

        Args:
            row: the request's row of SGLang's table, from its first token up to its last.
            kept: `[num_layers, num_kv_heads, num_kept]` int64 places in the row.
            slots: `[num_kept]` int64, not in the row.
        """
        with self._behind_launched_forwards(row, kept, slots):
            old = row.to(torch.int64)
            heads = torch.arange(kept.shape[1], device=kept.device)[:, None]
            for layer, places in enumerate(kept):
                for buffer in (raw(self._k_buffers[layer]), raw(self._v_buffers[layer])):
                    buffer[slots] = buffer[old[places], heads].transpose(0, 1)
            row[: len(slots)] = slots.to(row.dtype)
        if not self._runs_in_order:
            torch.get_device_module().current_stream().wait_stream(self._model_runner.forward_stream)

    def gather(self, slots: torch.Tensor) -> HostKV:
        """K and V of every layer at `slots` (`[num_tokens]` int64), in host memory; nothing waits for the GPU.

        Raises:
            TierError: full, host memory is used up.
        """
        copied = None
        kv = []
        with self._behind_launched_forwards(slots):
            for buffers in (self._k_buffers, self._v_buffers):
                shape = (len(buffers), len(slots), *buffers[0].shape[1:])
                with host_memory(math.prod(shape) * buffers[0].dtype.itemsize):
                    found = host_buffer(shape, buffers[0].dtype)
                for part in self._parts(found, range(len(buffers))):
                    target = raw(found[part.start : part.stop])
                    staged = target if self._is_cpu else torch.empty_like(target, device=buffers[0].device)
                    for layer, one in zip(part, staged, strict=True):
                        torch.index_select(raw(buffers[layer]), 0, slots, out=one)
                    if not self._is_cpu:
                        self._download(staged, target)
                kv.append(found)
            if not self._is_cpu:
                copied = self._side_stream.record_event()
        k, v = kv
        return HostKV(k, v, copied)

    def fill(self, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layers: range | None = None) -> None:
        """Writes what `gather` gave, of all layers or of some, to other slots of equal number.

        Args:
            k, v: of all layers, in memory of `host_buffer`.
        """
        layers = range(len(self._k_buffers)) if layers is None else layers
        with self._behind_launched_forwards(slots):
            for source, buffers in ((k, self._k_buffers), (v, self._v_buffers)):
                for part in self._parts(source, layers):
                    values = raw(source[part.start : part.stop])
                    values = values if self._is_cpu else self._upload(values, buffers[0].device)
                    for layer, value in zip(part, values, strict=True):
                        raw(buffers[layer]).index_copy_(0, slots, value)

    def erase(self, slots: torch.Tensor) -> None:
        """Overwrites K and V of every layer at `slots`, int64 on the pool's device, with zeros."""
        with self._behind_launched_forwards(slots):
            for buffer in (*self._k_buffers, *self._v_buffers):
                raw(buffer).index_fill_(0, slots, 0)
        if self.draft is not None:
            self.draft.erase(slots)

    def fingerprint(
        self, server_args: Any, tp_rank: int, tp_size: int, states: StateLayout | None = None
    ) -> Fingerprint:
        """What the KV of this rank depends on, and what is stored beside it of layers that keep states."""
        k, v = self._k_buffers[0], self._v_buffers[0]
        names = ("dtype", "quantization", "load_format", "model_impl", "json_model_override_args")
        has_adapters = resolution_result(server_args, "enable_lora")
        adapters = resolution_result(server_args, "lora_paths") if has_adapters else ()  # named by SGLang
        return Fingerprint(
            weights=weights_digest(server_args.model_path, server_args.revision),
            dtype=str(k.dtype).removeprefix("torch."),
            num_layers=len(self._k_buffers),
            kv_heads=k.shape[1],
            head_dim=k.shape[2],
            v_head_dim=v.shape[2],
            rotary=rotary_digest(self._rotaries),
            tp_rank=tp_rank,
            tp_size=tp_size,
            settings=(*((name, str(getattr(server_args, name, None))) for name in names), *adapter_settings(adapters)),
            states=states,
            model=server_args.model_path,
        )

    def _alike(self, layers: range) -> list[RotationGroup]:
        """The layers in groups by how their keys are rotated; most models have one group."""
        any_rotary = next(filter(None, self._rotaries))
        found: dict[RotarySpec | None, RotationGroup] = {}
        for layer in layers:
            rotary = self._rotaries[layer]
            alike = found.setdefault(rotary, RotationGroup(rotary or any_rotary, rotary is not None, [], []))
            alike.k.append(self._k_buffers[layer])
            alike.v.append(self._v_buffers[layer])
        return list(found.values())

    # Copies between host and device take a stream of their own, so that forwards run on meanwhile.

    @staticmethod
    def _parts(value: torch.Tensor, layers: range) -> Iterator[range]:
        """The layers in ranges that are copied at once, by the bytes of a layer of `value` `[num_layers, ...]`."""
        step = max(1, MAX_STAGED_BYTES // max(1, value[0].nbytes))
        for begin in range(layers.start, layers.stop, step):
            yield range(begin, min(begin + step, layers.stop))

    @functools.cached_property
    def _side_stream(self) -> Any:
        return torch.get_device_module().Stream()

    def _upload(self, value: torch.Tensor, device: torch.device) -> torch.Tensor:
        module, side = torch.get_device_module(), self._side_stream
        with module.stream(side):
            uploaded = value.to(device, non_blocking=True)
        module.current_stream().wait_stream(side)
        uploaded.record_stream(module.current_stream())
        return uploaded

    def _download(self, value: torch.Tensor, target: torch.Tensor) -> None:
        module, side = torch.get_device_module(), self._side_stream
        side.wait_stream(module.current_stream())
        with module.stream(side):
            target.copy_(value, non_blocking=True)
        value.record_stream(side)

    @property
    def _runs_in_order(self) -> bool:
        """Whether forwards run on the current stream."""
        return self._is_cpu or bool(get_schedule().disable_overlap_schedule)

    @contextlib.contextmanager
    def _behind_launched_forwards(self, *given: torch.Tensor) -> Iterator[None]:
        """Has what is enqueued inside run behind launched forwards; `given` are tensors from outside that it reads."""
        if self._runs_in_order:
            yield
            return
        device_module = torch.get_device_module()
        forward_stream = self._model_runner.forward_stream
        schedule_stream = device_module.current_stream()
        forward_stream.wait_stream(schedule_stream)  # the index tensors were made there
        with device_module.stream(forward_stream):
            yield
        # Their memory belongs to the schedule stream, which would hand it out again before the forward stream read it.
        for tensor in given:
            tensor.record_stream(forward_stream)
        # Slots that are freed and handed out again are written by later forwards, which run on the same stream.
