"""Partial loads over real streams, index and KV buffers: layers that come, that do not, and room that others need.

Locks of the radix tree are a set here; with SGLang's own tree: `test/exactness/test_tiers.py`.
"""

from __future__ import annotations

import threading
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from sglang.srt.layers.rotary_embedding.factory import get_rope

from chunk_cache.index.chunk_index import ChunkIndex
from chunk_cache.index.variant import NodeHome, Variant
from chunk_cache.methods import Stage
from chunk_cache.tiers.tier_ledger import TierLedger
from sgl_kernel_ext.rotary import spec_from_sglang_rope
from sglang_chunk_cache.forward.added_rows import AddedRows
from sglang_chunk_cache.kv.assembler import KVAssembler
from sglang_chunk_cache.kv.layer_stream import LayerStream, run_all
from sglang_chunk_cache.kv.partial_load import LayerCopy, LayerFailed, LayerLoads, PartialLoad, PartialLoads
from sglang_chunk_cache.kv.ranks import ReduceMax, of_one_rank
from sglang_chunk_cache.tiers.disk import DiskMedium
from sglang_chunk_cache.tiers.throttled import Throttled
from sglang_chunk_cache.tiers.tier import Tier
from unit.tiers.medium_suite import FINGERPRINT
from unit.tiers.tier_harness import LENGTH, SIZE, Ranks, search, stored, variant, wanted

NUM_SLOTS = 64
LAYERS = FINGERPRINT.num_layers


class Model(torch.nn.Module):
    """What of a model tells its rotation."""

    def __init__(self) -> None:
        super().__init__()
        dim = FINGERPRINT.head_dim
        self.rotary = get_rope(dim, dim, NUM_SLOTS, 10_000, True, None, torch.float32)


class Server:
    """A KV pool of `NUM_SLOTS` slots, an index, and the partial loads in it."""

    def __init__(self, *, timeout_s: float = 20.0, reduce_max: ReduceMax = of_one_rank) -> None:
        heads, dtype = FINGERPRINT.kv_heads, FINGERPRINT.torch_dtype
        self.k, self.v = (
            [torch.zeros(NUM_SLOTS, heads, dim, dtype=dtype) for _ in range(LAYERS)]
            for dim in (FINGERPRINT.head_dim, FINGERPRINT.v_head_dim)
        )
        runner = SimpleNamespace(model=Model(), model_config=SimpleNamespace(context_len=NUM_SLOTS))
        pool = SimpleNamespace(k_buffer=self.k, v_buffer=self.v, device="cpu", dtype=dtype)
        self.index = ChunkIndex(16, 8, 1000)
        self.locked: set[int] = set()
        store = SimpleNamespace(lock=self._lock, unlock=self.locked.remove)
        assembler = KVAssembler(runner, pool, [spec_from_sglang_rope(runner.model.rotary)] * LAYERS, "torch")
        self.partial_loads = PartialLoads(self.index, store, assembler, timeout_s=timeout_s, reduce_max=reduce_max)
        self._num_slots = 0

    def _lock(self, one: Variant) -> int:
        assert one.variant_id not in self.locked
        self.locked.add(one.variant_id)
        return one.variant_id

    def take(self) -> torch.Tensor:
        """Slots for one chunk that nobody has."""
        self._num_slots += LENGTH
        return torch.arange(self._num_slots - LENGTH, self._num_slots)

    def land(self, stream: LayerStream) -> PartialLoad:
        """As `ChunkRadixCache.bring_in`."""
        info, slots = stream.stored.info, self.take()
        one = self.index.add(
            info.key,
            length=LENGTH,
            start=info.start,
            generation=0,
            context=(),
            home=NodeHome(array("q", info.token_ids), f"{info.name}{info.key.hex()}"),
        )
        assert one is not None
        self.partial_loads.open(one, slots, stream)
        partial = self.partial_loads.of(one)
        assert partial is not None
        return partial

    def loads(self, *partials: PartialLoad) -> LayerLoads:
        """Of a forward that reads these chunks where they were computed."""
        return self.partial_loads.loads([LayerCopy(one, one.slots, self.take(), 0) for one in partials])

    def values(self, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return tuple(torch.stack([part[slots] for part in parts]) for parts in (self.k, self.v))  # type: ignore[return-value]

    def overwrite(self, slots: torch.Tensor) -> None:
        """They belong to somebody else by now."""
        for part in (*self.k, *self.v):
            part[slots] = 7.0

    def is_gone(self, partial: PartialLoad) -> bool:
        """Neither found nor kept."""
        one = partial.variant
        return self.index.get(one.variant_id) is None and self.partial_loads.of(one) is None and not self.locked


def bits(parts: Sequence[torch.Tensor]) -> bytes:
    return b"".join(part.contiguous().view(torch.uint8).numpy().tobytes() for part in parts)


def kv(number: int) -> bytes:
    one = stored(variant(number))
    return bits((one.k, one.v))


@pytest.fixture
def stream(tmp_path: Path) -> Callable[..., LayerStream]:
    """Of a chunk on disk, of which the first layers are read; a layer takes `layer_s`."""

    def open_stream(number: int, num_layers: int = 1, layer_s: float = 0.0, folder: str = "disk") -> LayerStream:
        medium: Any = DiskMedium(tmp_path / folder, FINGERPRINT)
        medium.write(stored(variant(number)))
        if layer_s:
            medium = Throttled(medium, SIZE / LAYERS / layer_s)
        tier = Tier("disk", medium, TierLedger(None))
        found = search([tier], wanted(number), num_layers)
        assert found.stream is not None
        return found.stream

    return open_stream


@pytest.fixture
def reading() -> Iterator[Callable[..., None]]:
    """Reads streams to their ends meanwhile, as a worker does."""
    threads = []

    def begin(*streams: LayerStream) -> None:
        threads.append(threading.Thread(target=run_all, args=(streams,)))
        threads[-1].start()

    yield begin
    for thread in threads:
        thread.join()


# Layers that come.


def test_a_forward_gets_each_layer_when_it_is_there(stream, reading):
    server = Server()
    partials = [server.land(stream(number, layer_s=0.02)) for number in (1, 2)]
    loads = server.loads(*partials)
    reading(*(partial.stream for partial in partials))
    for layer in range(LAYERS):
        loads.arrive(layer)
        loads.arrive(layer)  # a second pass over the rows
    for number, (partial, first) in enumerate(zip(partials, (2 * LENGTH, 3 * LENGTH), strict=True), 1):
        for slots in (partial.slots, torch.arange(first, first + LENGTH)):
            assert bits(server.values(slots)) == kv(number)
    server.partial_loads.poll()
    assert not server.locked
    assert all(server.partial_loads.of(partial.variant) is None for partial in partials)
    assert len(server.index) == 2


def test_what_nobody_reads_lands_as_well(stream):
    server = Server()
    partial = server.land(stream(1))
    server.partial_loads.poll()
    assert server.locked, "two layers are to come"
    partial.stream.run_until(LAYERS)
    server.partial_loads.poll()
    assert not server.locked
    assert bits(server.values(partial.slots)) == kv(1)


# Layers that do not come.


def test_a_load_that_no_forward_reads_ends_too(stream):
    """Its request may wait for the room that the load takes."""
    server = Server(timeout_s=0.05)
    partial = server.land(stream(1))
    server.partial_loads.poll()
    assert server.locked
    time.sleep(0.1)
    server.partial_loads.poll()
    assert server.is_gone(partial)
    assert (partial.reason, partial.stream.is_given_up) == ("tier_timeout", True)


@pytest.mark.parametrize(
    ("stage", "asks_first", "copies", "is_spoilt"),
    [
        (Stage.BEFORE, False, (), False),
        (Stage.LAYER, True, (), False),  # chosen in a forward of its own
        (Stage.LAYER, False, (), True),  # the stopped forward has changed the KV that it chooses by
        (Stage.BEFORE, False, ("a copy",), True),
    ],
)
def test_what_cannot_run_again_with_the_same_rows(stage, asks_first, copies, is_spoilt):
    selection = SimpleNamespace(stage=stage, asks_first=asks_first)
    load: Any = SimpleNamespace(layer_copies=copies, plan=SimpleNamespace(selection=selection))
    state: Any = object()
    assert AddedRows(np.arange(3), 0, load, state).is_spoilt == is_spoilt


def test_one_deadline_for_all_layers_of_a_forward(stream, reading):
    """Each layer is there within the time after the one before it, but not all of them."""
    server = Server(timeout_s=0.5)
    partial = server.land(stream(1, layer_s=0.4))
    loads = server.loads(partial)
    reading(partial.stream)
    began = time.monotonic()
    loads.arrive(0)
    loads.arrive(1)
    assert time.monotonic() - began < 0.5
    with pytest.raises(LayerFailed) as caught:
        loads.arrive(2)
    assert caught.value.reason == "tier_timeout"
    assert 0.45 < time.monotonic() - began < 0.75
    server.partial_loads.poll()
    assert server.is_gone(partial), "another request does not wait for it again"


def test_the_deadline_of_a_forward_is_not_that_of_the_next(stream, reading):
    server = Server(timeout_s=0.5)
    for number in (1, 2):
        partial = server.land(stream(number, layer_s=0.2))
        loads = server.loads(partial)
        reading(partial.stream)
        for layer in range(LAYERS):
            loads.arrive(layer)
        assert bits(server.values(partial.slots)) == kv(number)


def test_a_damaged_layer_stops_the_forward_and_forgets_the_chunk(stream, tmp_path):
    server = Server()
    partial = server.land(stream(1))
    (path,) = tmp_path.glob("disk/*/*/*/*.kv")
    data = bytearray(path.read_bytes())
    data[-7] ^= 1
    with path.open("r+b") as file:  # in place: the stream has it open
        file.write(data)
    loads = server.loads(partial)
    partial.stream.run_until(LAYERS)
    loads.arrive(0)
    loads.arrive(1)
    with pytest.raises(LayerFailed) as caught:
        loads.arrive(2)
    assert caught.value.reason == "tier_corrupt"
    server.partial_loads.poll()
    assert server.is_gone(partial)


def test_what_does_not_come_on_one_rank_comes_on_none(stream):
    ranks = Ranks()
    servers = [Server(reduce_max=ranks.reduce_of(rank)) for rank in range(2)]
    partials = [server.land(stream(1, folder=f"rank{rank}")) for rank, server in enumerate(servers)]
    partials[0].stream.run_until(LAYERS)
    partials[1].stream.fail("missing")

    def serve(rank: int) -> str:
        loads = servers[rank].loads(partials[rank])
        loads.arrive(0)
        with pytest.raises(LayerFailed) as caught:
            loads.arrive(1)
        servers[rank].partial_loads.poll()
        return caught.value.reason

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(serve, range(2))) == ["tier_ranks", "tier_missing"]
    assert all(server.is_gone(partial) for server, partial in zip(servers, partials, strict=True))


# Room that others need.


def test_all_partial_loads_give_way_at_once(stream):
    server = Server()
    assert not server.partial_loads.give_way(), "there is none"
    partials = [server.land(stream(number)) for number in (1, 2)]
    assert len(server.locked) == 2
    assert server.partial_loads.give_way()
    for partial in partials:
        assert server.is_gone(partial)
        assert partial.reason == "memory"
        assert partial.stream.reason is not None, "a worker may stop reading it"
    assert not server.partial_loads.give_way()
    server.partial_loads.poll()


@pytest.mark.parametrize("num_ready", [1, LAYERS])
def test_a_forward_never_writes_to_slots_of_a_load_that_gave_way(stream, num_ready):
    """It was admitted before; between that and its forward the slots were given to somebody else."""
    server = Server()
    partial = server.land(stream(1, num_layers=num_ready))
    loads = server.loads(partial)
    server.partial_loads.give_way()
    server.overwrite(partial.slots)
    others = bits(server.values(partial.slots))
    with pytest.raises(LayerFailed) as caught:
        loads.arrive(0)
    assert caught.value.reason == "memory"
    assert bits(server.values(partial.slots)) == others
