"""StoredVariant: one chunk in host memory, on its way to or from the tiers below the KV pool: its KV, and in a model
with states its transition.

`VariantInfo` is what is known of it without its KV, `EntrySummary` what a ledger keeps of it, `TierError` why a tier
could not store or give it.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import torch

from chunk_cache.index.chunk_statistics import ChunkStatistics
from chunk_cache.index.variant import variant_name
from chunk_cache.keys import DEFAULT_PARTITION
from chunk_cache.tiers.tier_ledger import EntryId, Traits, context_digest
from sglang_chunk_cache.kv.fingerprint import Fingerprint
from sglang_chunk_cache.kv.transition import Transition

TIER_REASONS = ("corrupt", "mismatch", "missing", "timeout", "unavailable", "full", "unreadable")
"""In this order: checksum, truncated or bad header; fingerprint or tokens differ; gone since it was found, which is no
fault of the medium; too slow; server or folder gone; no space, quota or host memory; permission or I/O error."""

Layer: TypeAlias = tuple[int, torch.Tensor, torch.Tensor]
"""Index, K `[length, kv_heads, head_dim]`, V `[length, kv_heads, v_head_dim]`, CPU."""

Parts: TypeAlias = tuple[torch.Tensor, ...]
"""K and V of a layer; operator, offset and tail of one that keeps states."""


class TierError(Exception):
    """Storage that failed; the message is ``<path or url>: <problem>; <remedy>``."""

    def __init__(self, reason: str, where: str, problem: str, remedy: str) -> None:
        assert reason in TIER_REASONS, f"unknown reason {reason!r}"
        super().__init__(f"{where}: {problem}; {remedy}")
        self.reason = reason
        self.where = where


@contextmanager
def host_memory(num_bytes: int) -> Iterator[None]:
    """Inside, tensors of so many bytes are allocated in host memory, and nothing else is done.

    Raises:
        TierError: full.
    """
    try:
        yield
    except (MemoryError, RuntimeError) as error:  # torch has no error class of its own for host memory
        remedy = "give the host tier fewer bytes, let fewer requests wait, or give the machine more"
        raise TierError("full", "host memory", f"no {num_bytes} bytes left ({error})", remedy) from error


class EntrySummary(NamedTuple):
    """What a ledger keeps of a stored variant."""

    entry_id: EntryId
    payload_len: int
    partition: bytes
    traits: Traits


@dataclass(frozen=True, slots=True)
class VariantInfo:
    """One stored variant without its KV."""

    key: bytes
    """`chunk_key` of the chunk."""
    token_ids: array[int]
    """int64, `[length]`; must not change."""
    start: int
    """Rotary position of the first token in the stored K."""
    generation: int
    context: tuple[bytes, ...]
    """Keys of the chunks in front of it."""
    statistics: ChunkStatistics | None
    payload_len: int
    """Bytes of KV and transition; media take about 500 more for the description, 11 per token, 22 with statistics."""
    is_prepared: bool = False
    """Whether it was computed ahead of time, behind the neighbours in `context`."""
    system: bytes = b""
    """Marks of the system prompt in front of these (`chunk_cache.index.system_prompt`)."""
    partition: bytes = DEFAULT_PARTITION
    """`Partition.key` of the tenant; `key` depends on it too, but does not give it away."""

    def __post_init__(self) -> None:
        assert self.token_ids.typecode == "q", "token ids are an array('q')"
        assert len(self.token_ids), "a chunk without tokens"
        assert min(self.start, self.generation, self.payload_len) >= 0, f"{self.start}, {self.generation}"

    @property
    def name(self) -> str:
        """See `variant_name`."""
        return variant_name(self.start, self.generation, self.is_prepared, self.system, self.context)

    @property
    def entry_id(self) -> EntryId:
        return EntryId(self.key, self.name)

    @property
    def traits(self) -> Traits:
        return Traits(self.generation, self.is_prepared, context_digest(self.context))

    @property
    def listed(self) -> EntrySummary:
        return EntrySummary(self.entry_id, self.payload_len, self.partition, self.traits)

    @property
    def length(self) -> int:
        """Tokens."""
        return len(self.token_ids)

    def identity(self) -> tuple[object, ...]:
        """What must agree for a stored entry to be the one that was asked for."""
        return (self.key, self.token_ids, self.start, self.generation, self.system, self.context, self.is_prepared)


@dataclass(frozen=True, slots=True, eq=False)
class StoredVariant:
    """A variant with KV, and a transition in one part, on the CPU and contiguous. Nobody changes its tensors."""

    info: VariantInfo
    k: torch.Tensor
    """`[num_layers, length, kv_heads, head_dim]`, rotated to position `info.start`."""
    v: torch.Tensor
    """`[num_layers, length, kv_heads, v_head_dim]`."""
    transition: Transition | None = None
    """None = the model keeps no states."""

    def __post_init__(self) -> None:
        k, v = self.k, self.v
        assert k.ndim == v.ndim == 4, f"{k.ndim} and {v.ndim} dimensions"
        assert (k.shape[:3], k.dtype) == (v.shape[:3], v.dtype), f"{k.dtype} {k.shape}, {v.dtype} {v.shape}"
        assert all(part.device.type == "cpu" and part.is_contiguous() for part in (k, v)), "not contiguous on the CPU"
        assert k.shape[1] == len(self.info.token_ids), f"{k.shape[1]} rows, {len(self.info.token_ids)} tokens"
        num_bytes = k.nbytes + v.nbytes + (0 if self.transition is None else self.transition.num_bytes)
        assert num_bytes == self.info.payload_len, f"{num_bytes} bytes, {self.info.payload_len}"

    @property
    def layers(self) -> list[Parts]:
        """In the order of an entry: `Fingerprint.layer_groups`."""
        with_states = () if self.transition is None else self.transition.layers
        return [*zip(self.k, self.v, strict=True), *(layer.parts for layer in with_states)]

    def check_fits(self, fingerprint: Fingerprint) -> None:
        """Asserts that it has the layers, heads, dimensions and dtype of `fingerprint`, and its layers with states."""
        f, (num_layers, _, kv_heads, head_dim) = fingerprint, self.k.shape
        mine = (num_layers, kv_heads, head_dim, self.v.shape[3], self.k.dtype)
        theirs = (f.num_layers, f.kv_heads, f.head_dim, f.v_head_dim, f.torch_dtype)
        assert mine == theirs, f"a variant of {mine} in a medium for {theirs}"
        found = [[(tuple(part.shape), part.dtype) for part in parts] for parts in self.layers[num_layers:]]
        expected = [] if f.states is None else [list(f.states.parts)] * len(f.states.layer_ids)
        assert found == expected, f"a transition of {found} in a medium for {expected}"
