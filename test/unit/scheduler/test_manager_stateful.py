"""A state machine: ChunkManager over a store that evicts whenever it likes; the machine knows what KV is exact."""

from __future__ import annotations

from collections.abc import Mapping

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from chunk_cache.actions import Forgo, Keep
from chunk_cache.index.variant import Home, NodeHome, PathHome, PathTokens
from chunk_cache.index.victims import EVICTIONS
from chunk_cache.keys import Partition
from chunk_cache.manager import ROOM_PER_REUSED, ChunkManager
from chunk_cache.options.config import REMEMBER, Config
from chunk_cache.plan.planning import replan_without_load
from chunk_cache.plan.recompute_plan import RecomputePlan
from chunk_cache.prompt.chunk_prompt import ChunkPrompt
from unit.scheduler.dict_store import KEYS, LENS, TOKENS, DictStore, new_node, prompt_of, some_statistics

CAPACITY = 100
CHUNKS = st.lists(st.integers(0, len(LENS) - 1), min_size=1, max_size=4)
CONFIGS: Mapping[str, st.SearchStrategy[object]] = {
    "max_variants": st.sampled_from((3, 50)),
    "max_variants_per_chunk": st.integers(1, 3),
    "max_path_tokens": st.sampled_from((12, 1000)),
    "max_generation": st.integers(0, 2),
    "min_reuse_len": st.sampled_from((1, 3)),
    "eviction": st.sampled_from(EVICTIONS),
    "promote_uses": st.integers(0, 2),
    "alpha": st.sampled_from((None, 1.0)),
    "max_cfo": st.sampled_from((None, 0.5)),
    "remember": st.sampled_from(REMEMBER),
}


class ManagerMachine(RuleBasedStateMachine):
    @initialize(
        config=st.fixed_dictionaries(dict(CONFIGS)),
        ratio=st.sampled_from((0.0, 0.15, 1.0)),
        page_size=st.sampled_from((1, 4)),
    )
    def start(self, config: dict[str, object], ratio: float, page_size: int) -> None:
        self.store = DictStore()
        self.page_size = page_size
        self.manager = ChunkManager(Config(**config), self.store, method="epic", ratio=ratio, page_size=page_size)
        self.is_exact: dict[PathTokens | NodeHome, bool] = {}  # of all KV that was ever stored

    @rule(
        data=st.data(),
        chunks=CHUNKS,
        gaps=st.lists(st.integers(0, 3), max_size=2),
        mode=st.sampled_from(("auto", "auto", "exact", "prepare", "warm")),
        ratio=st.sampled_from((None, None, 0.0, 1.0)),
    )
    def send(self, data: st.DataObject, chunks: list[int], gaps: list[int], mode: str, ratio: float | None) -> None:
        """One prompt, from its plan to what it leaves; whatever needs room may not get it."""
        prompt, tokens = prompt_of(chunks, gaps=gaps, mode=mode, ratio=ratio)
        prefix_len = self.cut(self.store.prefix_len(tokens))
        plan = self.manager.plan(prompt, prompt_len=len(tokens) + 1, prefix_len=prefix_len, max_prefix_len=len(tokens))
        self.check_plan(plan, mode)
        if plan.num_reused and not data.draw(st.booleans(), "room for the load"):
            plan = replan_without_load(plan, "memory")
        self.manager.use(self.manager.sources(plan))
        up_to = data.draw(st.sampled_from((len(tokens) + 1, len(tokens) + 1, prefix_len, len(tokens) // 2)), "up to")
        if plan.num_reused:
            for action in self.manager.remember_fused(prompt, plan, up_to=up_to):
                if isinstance(action, Keep) and data.draw(st.booleans(), "room to keep it"):
                    assert not action.in_path
                    self.complete(prompt, action, self.own_home(plan, action, chunks))
            self.promote(data, plan)
            return
        path = PathTokens(tokens, Partition())
        self.store.put(path, self.cut(up_to))
        self.is_exact[path] = True
        for keep in self.manager.remember_exact(prompt, plan, in_tree=self.cut(up_to), up_to=up_to):
            if isinstance(keep, Forgo):
                assert (mode, self.manager.config.max_generation) == ("prepare", 0)
            elif keep.in_path:
                self.complete(prompt, keep, PathHome(path, prompt.options.spans[keep.chunk][0]))
            elif data.draw(st.booleans(), "room to keep it"):
                self.complete(prompt, keep, self.own_home(plan, keep, chunks))

    @rule(chunk=st.integers(0, len(LENS) - 1), generation=st.integers(0, 3), context=CHUNKS | st.just([]))
    def bring_in(self, chunk: int, generation: int, context: list[int]) -> None:
        """A variant comes from a tier, whatever its generation."""
        home = new_node(TOKENS[chunk], self.page_size)
        self.store.put(home, LENS[chunk])
        self.is_exact[home] = not generation
        keys = tuple(KEYS[i] for i in context)
        length = LENS[chunk]
        self.manager.index.add(KEYS[chunk], length=length, start=0, generation=generation, context=keys, home=home)

    @rule(data=st.data())
    def evict(self, data: st.DataObject) -> None:
        if self.store.left:
            holder = data.draw(st.sampled_from(list(self.store.left)))
            self.store.evict(holder, data.draw(st.integers(0, self.store.left[holder])))

    @rule(num_tokens=st.sampled_from((1, CAPACITY, 10 * CAPACITY)))
    def tell_of_evictions(self, num_tokens: int) -> None:
        self.manager.evicted(num_tokens, CAPACITY)

    @rule()
    def clear(self) -> None:
        for holder in self.store.left:
            self.store.evict(holder)
        self.manager.index.clear()

    def cut(self, num_tokens: int) -> int:
        return num_tokens // self.page_size * self.page_size

    def check_plan(self, plan: RecomputePlan, mode: str) -> None:
        assert mode not in ("exact", "warm") or not plan.num_reused
        for chunk, variant in self.manager.sources(plan):
            assert chunk.generation == variant.generation <= self.manager.config.max_generation
            assert chunk.src_offset + chunk.num_reused <= self.store.resolve(variant)
            assert plan.prefix_len <= chunk.dst_start == chunk.start + chunk.src_offset
            assert chunk.dst_end <= min(chunk.end, plan.prompt_len - 1)

    def own_home(self, plan: RecomputePlan, keep: Keep, chunks: list[int]) -> NodeHome:
        """What is behind reused KV that is not computed again is not exact."""
        home = new_node(TOKENS[chunks[keep.chunk]], self.page_size)
        self.store.put(home, LENS[chunks[keep.chunk]])
        approximate = {p for c in plan.chunks for p in range(c.dst_start, c.dst_end)} - {*plan.row_positions.tolist()}
        self.is_exact[home] = all(p >= plan.chunks[keep.chunk].end for p in approximate)
        return home

    def complete(self, prompt: ChunkPrompt, keep: Keep, home: Home) -> None:
        statistics = some_statistics(prompt.length(keep.chunk), range(keep.chunk)) if keep.chunk % 2 else None
        variant = self.manager.complete(prompt, keep, home, statistics)
        assert variant is None or (variant.home, variant.generation) == (home, keep.generation)
        assert keep.is_prepared == (prompt.options.mode in ("prepare", "warm") and len(prompt.keys) > 1)
        assert not keep.is_prepared or variant is None or self.manager.has_prepared(prompt, keep.chunk)

    def promote(self, data: st.DataObject, plan: RecomputePlan) -> None:
        for promotion in self.manager.promote(plan):
            variant, path = promotion.variant, promotion.variant.holder
            assert variant.num_uses >= self.manager.config.promote_uses > 0
            assert isinstance(path, PathTokens)
            assert promotion.priority >= 0
            if data.draw(st.booleans(), "room to promote it"):
                home = new_node(variant.token_ids, self.page_size)
                self.store.put(home, variant.length)
                self.is_exact[home] = self.is_exact[path]
                self.manager.complete_promote(promotion, home)
                assert variant.home is home
                assert self.manager.index.get(variant.variant_id) is variant

    @invariant()
    def everything_agrees(self) -> None:
        if not hasattr(self, "manager"):
            return
        self.manager.check_integrity()
        for variant in self.manager.index:
            assert not variant.is_exact or self.is_exact[variant.holder], f"{variant} is called exact"
            assert variant.token_ids == TOKENS[KEYS.index(variant.key)], f"{variant} lies elsewhere"

    @invariant()
    def running_requests_leave_room_for_what_is_reused(self) -> None:
        if not hasattr(self, "manager"):
            return
        reused_len = sum(variant.length for variant in self.manager.index if variant.num_uses)
        share = int(self.manager.config.keep_share * CAPACITY)
        assert self.manager.num_kept_tokens(CAPACITY) == min(share, ROOM_PER_REUSED * reused_len)


TestManager = ManagerMachine.TestCase
TestManager.settings = settings(max_examples=100, stateful_step_count=30)
