"""SharedStore: a store that all replicas of a fleet share, and the replicas on it; bytes and waiting are modelled.

    SharedStore.find, write    what is stored of a passage; what a replica writes through
    Pipe.take                  bytes go behind those that were sent before, at so many a second
    StoreReplay                a replica: before a prompt is planned, what the pool has not comes from the store

What is real: the decisions of `chunk_cache.tiers` (which variant of a passage, to load or to compute it, what it
replaces in the store), the ledger of what a replica knows of the store, and all that `engine` runs. A passage that was
asked for before the simulation begins is stored as its first request computed it, exactly. A load takes the latency,
and its bytes through two pipes, the replica's and the store's; requests come at equal distances, and how long a forward
takes delays nobody.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from benchmark.simulate.engine import Layout, Replay
from benchmark.simulate.services import Services
from benchmark.simulate.trace import Request

from chunk_cache.index.variant import NodeHome, Variant
from chunk_cache.keys import DEFAULT_PARTITION
from chunk_cache.manager import Missing
from chunk_cache.tiers.cost import LoadingController, LoadOption, PrefillRecord, ThroughputRecord, load_share
from chunk_cache.tiers.placing import replace as choose_replaced
from chunk_cache.tiers.tier_ledger import EntryId, TierLedger, Traits, context_digest
from chunk_cache.tiers.variant_search import Read, TierView, VariantSearch

MAX_VARIANTS = 2
"""Of a passage in the store, as `tiers.max_variants_per_chunk`."""
REMOTE = "remote"
_NOWHERE = NodeHome(array("q"), "store")


@dataclass(frozen=True)
class Hardware:
    """What a fleet is made of; the defaults are Llama-3.1-8B in bf16 on one H100 each, at 200 Gbit/s.

    Attributes:
        token_bytes: KV of a token.
        replica_bytes_per_s, store_bytes_per_s: of the network of a replica, and of all the store's.
        latency_s: of a load.
        s_per_row: that a prefill takes.
    """

    token_bytes: int = 131_072
    replica_bytes_per_s: float = 25e9
    store_bytes_per_s: float = 400e9
    latency_s: float = 1e-3
    s_per_row: float = 2e-5


class Pipe:
    """Bytes that go one behind the other."""

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self._free_at = 0.0

    def take(self, num_bytes: int, now: float) -> float:
        """When they are through."""
        self._free_at = max(self._free_at, now) + num_bytes / self._bytes_per_s
        return self._free_at

    def wait_s(self, now: float) -> float:
        """Until the next byte can go."""
        return max(0.0, self._free_at - now)


class SharedStore:
    """See the head of this file."""

    def __init__(self, services: Services, hardware: Hardware) -> None:
        self._services = services
        self.hardware = hardware
        self.pipe = Pipe(hardware.store_bytes_per_s)
        self._variants: dict[int, list[Variant]] = {}
        self.num_bytes_written = 0

    def find(self, number: int, replica: StoreReplay) -> list[Variant]:
        """The variants of a passage.

        Args:
            replica: that asks; it says what a request would have stored.
        """
        if number not in self._variants:
            before = self._services.first_request(number)
            self._variants[number] = [] if before is None else [replica.computed(*before)]
        return self._variants[number]

    def write(self, number: int, variant: Variant, replica: StoreReplay) -> bool:
        """Whether it was not there, and is now: in the place of one that is not better where there are enough."""
        peers = self.find(number, replica)
        if any(peer.name == variant.name for peer in peers):
            return False
        replaced = choose_replaced(_traits(variant), {i: _traits(peer) for i, peer in enumerate(peers)}, MAX_VARIANTS)
        if replaced is None:
            return False
        peers[:] = [peer for i, peer in enumerate(peers) if i not in replaced]
        peers.append(replace(variant, holder=_NOWHERE))
        self.num_bytes_written += variant.length * self.hardware.token_bytes
        return True


class EventCount:
    """An `Observer` that counts."""

    def __init__(self) -> None:
        self.num = 0

    def stored(self, key: bytes, name: str, partition: bytes, size: int) -> None:
        self.num += 1

    def removed(self, key: bytes, name: str) -> None:
        self.num += 1

    def cleared(self) -> None:
        self.num += 1


@dataclass(slots=True, kw_only=True)
class StoreReplay(Replay):
    """A replica on a store.

    Attributes:
        now: when the request that is answered came.
        ledger: what it knows of the store.
        events: of pool and ledger, as it would tell them.
        num_tokens_loaded, num_tokens_slow: of passages that came from the store; that are computed sooner.
        waits: seconds that requests with loads waited for them.
    """

    store: SharedStore
    now: float = 0.0
    ledger: TierLedger = field(default_factory=lambda: TierLedger(None))
    events: EventCount = field(default_factory=EventCount)
    controller: LoadingController = field(default_factory=lambda: LoadingController(overlaps=False))
    pipe: Pipe = field(init=False)
    num_tokens_loaded: int = 0
    num_tokens_slow: int = 0
    waits: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        Replay.__post_init__(self)
        self.pipe = Pipe(self.store.hardware.replica_bytes_per_s)
        self.manager.index.observer = self.ledger.observer = self.events

    def reset_flow(self) -> None:
        """What was counted so far filled the pool."""
        self.num_tokens_loaded = self.num_tokens_slow = self.events.num = 0
        self.waits.clear()

    def computed(self, request: Request, place: int) -> Variant:
        """A passage of a request as that computes it, exactly."""
        layout = Layout.of(self.trace, request, self.settings, self.keys)
        prompt = layout.prompt
        return Variant(
            -1,
            prompt.keys[place],
            prompt.length(place),
            prompt.options.spans[place][0],
            0,
            prompt.keys,
            place,
            _NOWHERE,
            statistics=self._statistics(prompt, place),
            system=prompt.system,
        )

    def _bring_in(self, layout: Layout, prefix_len: int) -> None:
        locked = []
        for missing, variant in self._choose(layout, self._search(layout, prefix_len)):
            accept = self.manager.accept(variant, missing.need)
            if accept is None or not self.pool.reserve(variant.length):
                continue
            node = self.pool.add_own(variant.length, owner=layout.owner)
            self.pool.settle(node, self.manager.complete_accept(accept, layout.home(variant.length)))
            self.pool.lock([node])
            locked.append(node)
        self.pool.unlock(locked)

    def _search(self, layout: Layout, prefix_len: int) -> list[tuple[Missing, Variant]]:
        """The best variant of each passage that the pool has not, or not as good, where the store has one."""
        found: dict[bytes, tuple[Missing, Variant]] = {}
        prompt = layout.prompt
        for missing in self.manager.missing(prompt):
            i, key = missing.chunk, prompt.keys[missing.chunk]
            if key in found or prompt.options.spans[i][1] <= prefix_len:
                continue
            variant = self._run(self._open_search(missing, key, prompt.length(i), layout.length), layout.numbers[i])
            if variant is not None:
                found[key] = missing, variant
        return list(found.values())

    def _open_search(self, missing: Missing, key: bytes, length: int, num_keys: int) -> VariantSearch[Variant]:
        entries = {entry_id.name: traits for entry_id, traits in self.ledger.peers_of(key).items()}
        hardware = self.store.hardware
        load_s = self._channel().estimate(length * hardware.token_bytes, self._queued_bytes())
        share = load_share(load_s, self._prefill().marginal(length, num_keys), 0.0)
        views = [TierView(REMOTE, entries, share)] if entries or not missing.held.is_of_use else []
        return VariantSearch(missing.need, views, missing.held)

    def _run(self, search: VariantSearch[Variant], number: int) -> Variant | None:
        while (step := search.next()) is not None:
            if isinstance(step, Read):
                return step.variant
            variants = self.store.find(number, self)
            for variant in variants:
                self._know(variant)
            search.told(step.tier, variants)
        return None

    def _channel(self) -> ThroughputRecord:
        hardware = self.store.hardware
        return ThroughputRecord(hardware.latency_s, 1.0 / min(hardware.replica_bytes_per_s, hardware.store_bytes_per_s))

    def _prefill(self) -> PrefillRecord:
        return PrefillRecord(0.0, self.store.hardware.s_per_row, 0.0)

    def _queued_bytes(self) -> int:
        wait_s = max(self.pipe.wait_s(self.now), self.store.pipe.wait_s(self.now))
        return round(wait_s / self._channel().s_per_byte)

    def _choose(self, layout: Layout, found: Sequence[tuple[Missing, Variant]]) -> list[tuple[Missing, Variant]]:
        """Those that are loaded: sooner there than computed, or better than what the pool has by more than the load."""
        hardware = self.store.hardware
        open_ones = [variant for missing, variant in found if not missing.held.is_of_use]
        plan = self.controller.load_or_compute(
            [LoadOption(REMOTE, v.length * hardware.token_bytes, v.length, layout.length) for v in open_ones],
            (),
            {REMOTE: self._channel()},
            self._prefill(),
            queued_bytes={REMOTE: self._queued_bytes()},
            hidden_s=0.0,
            ratio=self.settings.ratio,
            timeout_s=math.inf,
        )
        decided = zip(open_ones, plan.decisions, strict=True)
        slow = {id(variant) for variant, decision in decided if decision.action == "compute"}
        loaded = [(missing, variant) for missing, variant in found if id(variant) not in slow]
        num_tokens = sum(variant.length for _, variant in loaded)
        self.num_tokens_loaded += num_tokens
        self.num_tokens_slow += sum(variant.length for _, variant in found) - num_tokens
        if loaded:
            num_bytes = num_tokens * hardware.token_bytes
            through = max(self.pipe.take(num_bytes, self.now), self.store.pipe.take(num_bytes, self.now))
            self.waits.append(through + hardware.latency_s - self.now)
        return loaded

    def _note_kept(self, number: int, variant: Variant) -> None:
        if self.store.write(number, variant, self):
            self._know(variant)

    def _know(self, variant: Variant) -> None:
        entry_id = EntryId(variant.key, variant.name)
        if not self.ledger.knows(entry_id):
            num_bytes = variant.length * self.store.hardware.token_bytes
            self.ledger.prepare_store(entry_id, num_bytes, variant.reuse_frequency, DEFAULT_PARTITION, _traits(variant))
            self.ledger.complete_store(entry_id, True)


def _traits(variant: Variant) -> Traits:
    return Traits(variant.generation, variant.is_prepared, context_digest(variant.context))
