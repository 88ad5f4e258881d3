"""ChunkManager: what it keeps and promotes, against an oracle that compares everything with everything, and when it
looks chunks up again."""

from __future__ import annotations

import random
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any

import numpy as np
import pytest

from chunk_cache.actions import Forgo, Keep, Promote
from chunk_cache.gate.controller import Decision
from chunk_cache.gate.target import Step
from chunk_cache.index.chunk_index import TOKENS_PER_LOOK
from chunk_cache.index.chunk_statistics import ChunkStatistics
from chunk_cache.index.lookup import Lookup
from chunk_cache.index.need import Need
from chunk_cache.index.reusability import use_weight
from chunk_cache.index.system_prompt import share_elsewhere
from chunk_cache.index.variant import PathHome, PathTokens, Variant, usable_len, variant_name
from chunk_cache.index.victims import EVICTIONS
from chunk_cache.keys import Partition
from chunk_cache.manager import ROOM_PER_REUSED, ChunkManager
from chunk_cache.methods import METHODS
from chunk_cache.options.config import REMEMBER, Config
from chunk_cache.options.request_options import RequestOptions
from chunk_cache.plan.planning import replan_without_load
from chunk_cache.plan.question_words import QuestionWords
from chunk_cache.plan.recompute_plan import RecomputePlan
from chunk_cache.prompt.chunk_prompt import ChunkPrompt, piece_keys
from chunk_cache.retention import Soundness
from chunk_cache.tiers.tier_ledger import Traits, context_digest
from chunk_cache.tiers.variant_search import NOTHING_HELD, Ask, TierView, VariantSearch
from chunk_cache.types import Status
from unit.scheduler.dict_store import KEYS, LENS, TOKENS, DictStore, new_node, prompt_of, some_statistics
from unit.scheduler.overlap import adjusted_overlap, order_penalty, prefix_overlap
from unit.scheduler.plans import plan_by

QUESTION_LEN = 3
EXACTLY = Decision(1, None, "behind the last step")


class Server:
    """A manager over a `DictStore`, whose prompts, ends and failures are drawn by lot."""

    def __init__(self, seed: int, **given: Any) -> None:
        rng = self.rng = random.Random(seed)
        self.page_size = rng.choice((1, 1, 4))
        self.store = DictStore()
        drawn: dict[str, Any] = {
            "max_variants_per_chunk": rng.choice((1, 2, 8)),
            "max_variants": rng.choice((4, 100)),
            "max_generation": rng.choice((0, 1, 2, 8)),
            "max_cfo": rng.choice((None, None, 0.4, 0.9)),
            "alpha": rng.choice((None, None, 0.0, 1.0, 0.5)),
            "promote_uses": rng.choice((0, 1, 2)),
            "remember": rng.choice(REMEMBER),
            "system_prompts": rng.choice(("any", "any", "same")),
        }
        self.ratio = rng.choice((0.0, 0.15, 1.0))
        self.capacity = rng.choice((None, None, 60))
        self.manager = ChunkManager(
            Config(**drawn | given),
            self.store,
            method="epic",
            ratio=self.ratio,
            page_size=self.page_size,
            capacity=self.capacity,
        )

    @property
    def config(self) -> Config:
        return self.manager.config

    def draw_prompt(self) -> tuple[ChunkPrompt, array[int]]:
        rng = self.rng
        chunks = [rng.randrange(len(LENS)) for _ in range(rng.randint(1, 5))]
        gaps = [rng.choice((0, 0, 1, 6)) for _ in chunks]
        ratio = rng.choice((None, None, None, 0.0, 0.15, 1.0))
        return prompt_of(chunks, gaps=gaps, mode="exact" if rng.random() < 0.1 else "auto", ratio=ratio)

    def plan(self, prompt: ChunkPrompt, tokens: array[int], prefix_len: int = 0) -> RecomputePlan:
        prompt_len = len(tokens) + QUESTION_LEN
        return self.manager.plan(prompt, prompt_len=prompt_len, prefix_len=prefix_len, max_prefix_len=prompt_len - 1)

    def cut(self, num_tokens: int) -> int:
        """Whole pages of so many tokens."""
        return num_tokens // self.page_size * self.page_size

    def complete(self, prompt: ChunkPrompt, keep: Keep, path: PathTokens) -> Variant | None:
        start, end = prompt.options.spans[keep.chunk]
        if keep.in_path:
            home: Any = PathHome(path, start)
        else:
            home = new_node(TOKENS[KEYS.index(prompt.keys[keep.chunk])], self.page_size)
            self.store.put(home, end - start)
        inter = [self.rng.randint(0, 3) for _ in range(keep.chunk)]
        statistics = self.rng.choice((None, some_statistics(end - start, inter, prompt.system)))
        return self.manager.complete(prompt, keep, home, statistics)

    def promote(self, action: Promote) -> None:
        home = new_node(action.variant.token_ids, self.page_size)
        self.store.put(home, action.variant.length)
        self.manager.complete_promote(action, home)

    def bring_in(self) -> None:
        """A variant comes from elsewhere; a tier may have some of more generations than are used here."""
        chunk = self.rng.randrange(len(LENS))
        home = new_node(TOKENS[chunk], self.page_size)
        self.store.put(home, LENS[chunk])
        self.manager.index.add(
            KEYS[chunk],
            length=LENS[chunk],
            start=self.rng.randrange(9),
            generation=self.rng.randrange(4),
            context=tuple(self.rng.choices(KEYS, k=self.rng.randrange(3))),
            home=home,
        )

    def evict_some(self) -> None:
        for holder in self.rng.sample(list(self.store.left), len(self.store.left) // 4):
            self.store.evict(holder, self.rng.choice((0, self.rng.randint(0, 20))))

    def forget_gone(self) -> None:
        """The index has nothing that the store has not, so what it forgets while it is asked makes no difference."""
        self.manager.index.sweep(self.store.resolve, 10**6)

    def send(self) -> list[Keep | Forgo | Promote]:
        """One prompt from its plan to what it leaves, each decision beside the oracle's."""
        manager, rng = self.manager, self.rng
        prompt, tokens = self.draw_prompt()
        prefix_len = self.cut(rng.choice((0, 0, rng.randint(0, len(tokens)))))
        plan = self.plan(prompt, tokens, prefix_len)
        manager.use(manager.sources(plan))
        self.forget_gone()
        computed_len = len(tokens) + QUESTION_LEN
        up_to = rng.choice((computed_len, computed_len, rng.randint(prefix_len, computed_len)))
        path = PathTokens(tokens, Partition())
        done: list[Keep | Forgo | Promote] = []
        if plan.num_reused:
            steps = zip_longest(
                fused_by_oracle(self, prompt, plan, up_to), manager.remember_fused(prompt, plan, up_to=up_to)
            )
        else:
            in_tree = self.cut(rng.choice((up_to, up_to, rng.randint(0, up_to))))
            self.store.put(path, in_tree)
            decided = manager.remember_exact(prompt, plan, in_tree=in_tree, up_to=up_to)
            steps = zip_longest(exact_by_oracle(self, prompt, plan, in_tree, up_to), decided)
        for expected, action in steps:
            assert action == expected, (plan, prompt)
            if isinstance(action, Keep):
                assert_honest(plan, action, prompt)
                if rng.random() < 0.8:  # else there is no room
                    self.complete(prompt, action, path)
            done.append(action)
        for variant, promotion in zip_longest(promoted_by_oracle(self, plan), manager.promote(plan)):
            assert promotion is not None
            assert promotion.variant is variant
            if rng.random() < 0.3:  # making room for it
                self.evict_some()
                self.forget_gone()
            elif rng.random() < 0.8:
                self.promote(promotion)
            done.append(promotion)
        manager.check_integrity()
        return done


# The oracle.


def best_stored(server: Server, prompt: ChunkPrompt, chunk: int) -> tuple[int, float]:
    """Tokens that the best usable variant holds, and its CFO at alpha 1 by the paper's equations; 0 where none does."""
    length, context = prompt.length(chunk), prompt.context(chunk)
    found = []
    for variant in usable(server, prompt, chunk):
        statistics = variant.statistics
        if statistics is None:
            cci, inter = 1.0 if variant.context else 0.5, [0.0] * len(variant.context)
        else:
            cci, inter = statistics.cci, statistics.inter
        beta = prefix_overlap(variant.context, inter, context)
        cfo = cci * (1.0 - adjusted_overlap(beta, order_penalty(variant.context, context)))
        if variant.system not in (b"", prompt.system):
            shares = None if statistics is None else statistics.system
            cfo += 1.0 if shares is None else share_elsewhere(shares, variant.system, prompt.system)
        cfo = round(cfo, 9)
        covered_len = server.store.resolve(variant)
        to_compute = round(length - covered_len + cfo * covered_len, 9)
        found.append((to_compute, cfo, variant.generation, -variant.last_use, covered_len))
    if not found:
        return 0, 0.0
    _, cfo, _, _, covered_len = min(found)
    return covered_len, cfo


def usable(server: Server, prompt: ChunkPrompt, chunk: int) -> list[Variant]:
    stored = [v for v in server.manager.index if v.key == prompt.keys[chunk] and server.store.resolve(v)]
    if server.config.system_prompts == "same":
        stored = [v for v in stored if v.system == prompt.system]
    return [v for v in stored if v.generation <= server.config.max_generation]


def is_taken(server: Server, prompt: ChunkPrompt, chunk: int, generation: int) -> bool:
    """Whether the index has nothing at least as good in its place, or room beside it."""
    place = prompt.options.spans[chunk][0], (prompt.system, prompt.context(chunk))
    peers = [v for v in server.manager.index if v.key == prompt.keys[chunk]]
    if generation and any(v.is_exact and (v.system, v.context) == place[1] for v in peers):
        return False
    generations = [v.generation for v in peers if (v.start, (v.system, v.context)) == place]
    if not generations and len(peers) < server.config.max_variants_per_chunk:
        return True
    return generation <= max(generations or [v.generation for v in peers])


def is_new(server: Server, prompt: ChunkPrompt, plan: RecomputePlan, chunk: int, generation: int) -> bool:
    covered_len, cfo = best_stored(server, prompt, chunk)
    is_stored = covered_len == prompt.length(chunk)
    was_too_far = plan.chunks[chunk].reason == "high_cfo" and cfo > 0.0
    return (not is_stored or was_too_far) and is_taken(server, prompt, chunk, generation)


def exact_by_oracle(
    server: Server, prompt: ChunkPrompt, plan: RecomputePlan, in_tree: int, up_to: int
) -> Iterator[Keep]:
    for i, (start, end) in enumerate(prompt.options.spans):
        in_path = sum(position < in_tree for position in range(start, end))
        elsewhere = max((server.store.resolve(v) for v in usable(server, prompt, i)), default=0)
        if in_path < (end - start) / 2:  # too little to be worth a hit: a home of its own
            if end <= up_to and is_new(server, prompt, plan, i, 0):
                yield Keep(i, 0, in_path=False)
        elif in_path == end - start or in_path > elsewhere:
            yield Keep(i, 0, in_path=True)


def fused_by_oracle(server: Server, prompt: ChunkPrompt, plan: RecomputePlan, up_to: int) -> Iterator[Keep | Forgo]:
    for i, chunk in enumerate(plan.chunks):
        in_front = [c.generation for c in plan.chunks[: i + 1] if c.generation is not None and plan.ratio < 1.0]
        generation = 1 + max(in_front) if in_front else 0
        is_computed = chunk.status is Status.MISS or chunk.reason == "high_cfo"
        is_fixed = chunk.status is Status.HIT and chunk.unit_cfo is not None and chunk.unit_cfo > 0.0
        is_fixed = is_fixed and server.config.remember == "contexts" and plan.num_recomputed > 0
        if chunk.end > up_to or not (is_computed or is_fixed):
            continue
        if generation > server.config.max_generation:
            yield Forgo(i, "generation_limit")
        elif is_fixed and is_taken(server, prompt, i, generation):
            num_derived = sum(v.length for v in server.manager.index if v.generation and not v.is_prepared)
            has_room = server.capacity is None or num_derived + prompt.length(i) <= 0.25 * server.capacity
            yield Keep(i, generation, in_path=False, fixed=chunk.variant_id) if has_room else Forgo(i, "memory")
        elif not is_fixed and is_new(server, prompt, plan, i, generation):
            yield Keep(i, generation, in_path=False)


def promoted_by_oracle(server: Server, plan: RecomputePlan) -> Iterator[Variant]:
    min_uses = server.config.promote_uses
    for chunk in plan.chunks:
        variants = [v for v in server.manager.index if v.variant_id == chunk.variant_id]
        for variant in variants:
            if not min_uses or variant.num_uses < min_uses or not isinstance(variant.holder, PathTokens):
                continue
            others = [v for v in server.manager.index if v.holder is variant.holder and v.num_uses >= min_uses]
            popular_len = sum(v.length for v in others)
            is_whole = server.store.resolve(variant) == variant.length
            if is_whole and popular_len < (variant.start + variant.length) / 2:
                yield variant


def assert_honest(plan: RecomputePlan, keep: Keep, prompt: ChunkPrompt) -> None:
    """What is called exact has nothing approximate in front of it or in it."""
    computed = set(plan.row_positions.tolist())
    _, end = prompt.options.spans[keep.chunk]
    reused = {p for c in plan.chunks for p in range(c.dst_start, c.dst_end) if p < end}
    assert keep.generation > 0 or reused <= computed, (keep, plan)


@pytest.mark.parametrize("seed", range(80))
def test_what_is_kept_and_promoted_is_what_the_oracle_says(seed: int) -> None:
    server = Server(seed)
    for _ in range(25):
        server.send()
        server.rng.choice((server.evict_some, server.bring_in, lambda: None))()


def test_the_oracle_sees_everything_that_can_happen() -> None:
    seen: set[object] = set()
    for seed in range(20):
        server = Server(seed)
        for _ in range(25):
            for action in server.send():
                if isinstance(action, Keep):
                    seen.add(("path" if action.in_path else "node", min(action.generation, 2)))
                else:
                    seen.add(type(action))
    assert seen == {("path", 0), ("node", 0), ("node", 1), ("node", 2), Forgo, Promote}


def test_a_promotion_is_decided_on_what_the_one_before_it_left() -> None:
    """Making room for 4 evicts 3, the end of a path that is not cold only because of it; 0 must leave it then."""
    server = Server(0, max_variants=100, max_variants_per_chunk=8, promote_uses=1, max_cfo=None)
    manager, store = server.manager, server.store
    paths = []
    for chunks, gap in (((1, 0, 3), 12), ((4,), 12)):
        prompt, tokens = prompt_of(chunks, gaps=[gap])
        paths.append(PathTokens(tokens, Partition()))
        store.put(paths[-1], len(tokens))
        for keep in manager.remember_exact(prompt, None, in_tree=len(tokens), up_to=len(tokens)):
            server.complete(prompt, keep, paths[-1])
    for chunks in ((3,), (1, 4, 0)):
        prompt, tokens = prompt_of(chunks)
        plan = server.plan(prompt, tokens)
        manager.use(manager.sources(plan))
    actions = manager.promote(plan)
    assert next(actions).variant.key == KEYS[4]
    store.evict(paths[0], len(paths[0]) - LENS[3])
    server.forget_gone()
    assert [action.variant.key for action in actions] == [KEYS[0]]


def test_a_path_that_holds_no_more_of_a_chunk_than_is_stored_is_not_another_home() -> None:
    server = Server(0, max_variants_per_chunk=8)
    manager = server.manager
    kept = []
    for gap, num_stored in ((0, 3), (1, 3), (2, 4)):
        prompt, tokens = prompt_of([1], gaps=[gap])
        path = PathTokens(tokens, Partition())
        server.store.put(path, gap + num_stored)
        keeps = list(manager.remember_exact(prompt, None, in_tree=gap + num_stored, up_to=gap + num_stored))
        for keep in keeps:
            server.complete(prompt, keep, path)
        kept.append(keeps)
    assert kept == [[Keep(0, 0, in_path=True)], [], [Keep(0, 0, in_path=True)]]


def test_kv_that_is_of_no_use_or_wrong_is_not_kept() -> None:
    """Chunk 2 has no states; what was found in front of chunk 4, or all without a plan, is of other weights."""
    server = Server(0, max_variants=100, max_variants_per_chunk=8)
    prompt, tokens = prompt_of([1, 2, 4])
    plan = server.plan(prompt, tokens, prefix_len=prompt.options.spans[1][1])

    def decided(plan: RecomputePlan | None, **facts: Any) -> list[str | None]:
        soundness = Soundness(**facts)
        length = len(tokens)
        actions = server.manager.remember_exact(prompt, plan, in_tree=length, up_to=length, soundness=soundness)
        return [one.reason if isinstance(one, Forgo) else None for one in actions]

    assert decided(plan) == [None, None, None]
    assert decided(plan, lacks_states={1}.__contains__) == [None, "states", None]
    assert decided(plan, has_old_prefixes=True) == ["weights_changed", "weights_changed", None]
    assert decided(None, has_old_prefixes=True) == ["weights_changed"] * 3


@pytest.mark.parametrize(("covered_len", "usable"), [(-1, 0), (0, 0), (3, 0), (4, 4), (7, 7)])
def test_less_than_half_of_a_chunk_is_of_no_use(covered_len: int, usable: int) -> None:
    assert usable_len(covered_len, 7) == usable


def test_a_request_leaves_reused_chunks_their_room_where_it_can() -> None:
    """Reused are 4 tokens, so 16 of 100 are left to chunks."""
    manager = Server(0, max_variants=100, max_variants_per_chunk=8, keep_share=0.5).manager
    assert not manager.takes_kept_room(100, 100, 100), "nothing was reused"
    prompt, tokens = prompt_of([2])
    path = PathTokens(tokens, Partition())
    variant = manager.complete(prompt, Keep(0, 0, in_path=True), PathHome(path, 0))
    assert variant is not None
    manager.index.touch(variant, 1.0)
    num_kept = manager.num_kept_tokens(100)
    assert 0 < num_kept == ROOM_PER_REUSED * variant.length < 50
    free = 40 + num_kept
    assert [manager.takes_kept_room(n, free, 100) for n in (40, 41, 100 - num_kept, 101 - num_kept)] == [
        *(False, True, True, False)
    ]


@pytest.mark.parametrize(
    ("given", "is_open"),
    [({}, True), ({"mode": "exact"}, False), ({"method": "epic"}, False), ({"ratio": 0.5}, False)],
)
def test_who_names_neither_method_nor_ratio_leaves_them_open(given: dict[str, Any], is_open: bool) -> None:
    prompt, _ = prompt_of([0, 1])
    asked = replace(prompt, options=replace(prompt.options, **given))
    assert asked.leaves_method_open == is_open
    assert not replace(asked, unsupported=True).leaves_method_open
    assert not replace(asked, options=replace(asked.options, spans=())).leaves_method_open


# What a plan is made of.


@pytest.mark.parametrize("seed", range(20))
def test_a_plan_is_made_of_what_is_stored_and_of_the_configuration(seed: int) -> None:
    server = new_server(seed, min_reuse_len=1 + seed % 3)
    manager, config = server.manager, server.config
    for _ in range(10):
        prompt, tokens = server.draw_prompt()
        prompt_len = len(tokens) + QUESTION_LEN
        arguments: dict[str, Any] = {
            "prompt_len": prompt_len,
            "prefix_len": server.cut(server.rng.choice((0, server.rng.randint(0, prompt_len)))),
            "max_prefix_len": server.rng.randint(prompt_len // 2, prompt_len),
            "limit_reason": server.rng.choice(("prompt_end", "logprobs")),
        }
        decision = server.rng.choice((None, Decision(0, Step("near", 0.5), ""), EXACTLY))
        step = None if decision is None else decision.step
        reasons = {server.rng.choice(KEYS): "tier_slow"}
        lookups = []
        for i, key in enumerate(prompt.keys):
            is_apart = config.system_prompts == "same"
            need = Need(config.max_generation, prompt.context(i), prompt.system, is_apart)
            best = manager.index.lookup(key, server.store.resolve, need)
            lookups.append(Lookup(None, 0, reasons[key]) if best.variant is None and key in reasons else best)
        expected = plan_by(
            prompt.options,
            default_method="epic" if step is None else step.method,
            default_ratio=server.ratio if step is None else step.ratio,
            page_size=server.page_size,
            lookups=lookups,
            min_reuse_len=config.min_reuse_len,
            chunk_keys=prompt.keys,
            alpha=config.alpha,
            max_cfo=config.max_cfo,
            **arguments,
        )
        if decision is EXACTLY:
            expected = replan_without_load(expected, "target")
        plan = manager.plan(prompt, decision=decision, reasons=reasons, **arguments)
        assert plan == expected
        uses = [(v, v.num_uses, v.reuse_frequency, c.unit_cfo) for c, v in manager.sources(plan) if v.length > 1]
        if len({v for v, *_ in uses}) == len(manager.sources(plan)):
            manager.use(manager.sources(plan))
            for variant, num_uses, frequency, cfo in uses:
                weight = 1.0 if cfo is None else use_weight(cfo, variant.length)
                assert (variant.num_uses, variant.reuse_frequency) == (num_uses + 1, frequency + weight)


def test_a_method_that_ranks_gets_the_statistics_of_the_variant() -> None:
    store = DictStore()
    manager = ChunkManager(Config(), store, method="cache-craft", ratio=0.4)
    prompt, _ = prompt_of([1])
    ranking = np.array([0.0, 3.0, 1.0, 4.0, 2.0], dtype=np.float32)
    home = new_node(TOKENS[1])
    store.put(home, LENS[1])
    manager.complete(prompt, Keep(0, 0, in_path=False), home, ChunkStatistics(ranking, ranking, ranking[:0], 0.5))
    plan = manager.plan(prompt, prompt_len=9, prefix_len=0, max_prefix_len=8)
    assert plan.row_positions.tolist() == [1, 3]


def test_what_was_generated_is_no_part_of_the_question() -> None:
    store = DictStore()
    manager = ChunkManager(Config(), store, method="fusionrag", ratio=0.4)
    prompt, _ = prompt_of([1])
    home = new_node(TOKENS[1])
    store.put(home, LENS[1])
    manager.complete(prompt, Keep(0, 0, in_path=False), home)
    first = manager.plan(prompt, prompt_len=9, prefix_len=0, max_prefix_len=8)
    again = manager.plan(prompt, prompt_len=12, prefix_len=0, max_prefix_len=11, num_generated=3)
    assert first.selection is not None
    assert again.selection == first.selection


def test_words_of_the_question_are_what_near_words_ranks_by() -> None:
    store, words = DictStore(), QuestionWords()
    manager = ChunkManager(Config(min_reuse_len=1), store, method="near-words", ratio=0.5, words=words)
    tokens = array("q", [*range(100, 200), *range(200, 300), 7, 270, 8])
    prompt = ChunkPrompt.of(RequestOptions(spans=((0, 100), (100, 200))), tokens, Partition())
    home = new_node(tokens[100:200])
    store.put(home, 100)
    manager.complete(prompt, Keep(1, 0, in_path=False), home)
    plan = manager.plan(prompt, prompt_len=203, prefix_len=0, max_prefix_len=202)
    rows = set(plan.row_positions.tolist())
    assert set(range(100)) <= rows  # was not stored
    assert plan.num_recomputed == 50
    assert set(range(162, 178)) <= rows  # a third, around token 270, which stands at 170
    later = manager.plan(prompt, prompt_len=209, prefix_len=0, max_prefix_len=208, num_generated=6)
    assert later.row_positions.tolist() == plan.row_positions.tolist()


def test_where_a_prompt_ends_in_a_chunk_its_last_token_is_the_question_also_when_retracted() -> None:
    store = DictStore()
    manager = ChunkManager(Config(min_reuse_len=1), store, method="near-words", ratio=0.5, words=QuestionWords())
    tokens = array("q", [*range(100, 200), *range(200, 299), 170])
    prompts = [ChunkPrompt.of(RequestOptions(spans=((0, 100), (100, 200))), tokens, Partition()) for _ in range(2)]
    home = new_node(tokens[:100])
    store.put(home, 100)
    manager.complete(prompts[0], Keep(0, 0, in_path=False), home)
    first = manager.plan(prompts[0], prompt_len=200, prefix_len=0, max_prefix_len=199)
    assert set(range(62, 78)) <= set(first.row_positions.tolist())
    again = manager.plan(prompts[1], prompt_len=203, prefix_len=0, max_prefix_len=202, num_generated=3)
    assert again.row_positions.tolist() == first.row_positions.tolist()


@pytest.mark.parametrize("mode", ["auto", "off", "exact"])
def test_a_prompt_without_chunks_has_a_plan(mode: str) -> None:
    for method in METHODS:
        manager = ChunkManager(Config(), DictStore(), method=method, ratio=0.5)
        prompt = ChunkPrompt.of(RequestOptions(mode=mode), array("q", [1, 2, 3]), Partition())
        assert not manager.plan(prompt, prompt_len=3, prefix_len=0, max_prefix_len=2).num_reused


# What the store is told and tells.


def test_what_was_reused_goes_after_what_is_new_until_the_store_has_turned_over() -> None:
    for eviction in EVICTIONS:
        server = Server(0, eviction=eviction, ageing=10.0, max_cfo=None)
        manager, by_frequency = server.manager, eviction == "frequency-reuse"
        prompt, tokens = prompt_of([1])
        variant = server.complete(prompt, Keep(0, 0, in_path=False), PathTokens(tokens, Partition()))
        assert variant is not None
        assert manager.new_priority(3) == (0 if by_frequency else 3), "no request outbids what is reused"
        manager.use(manager.sources(server.plan(prompt, tokens)))  # in the same context: each of 5 tokens is saved
        assert manager.priority(variant) == (LENS[1] if by_frequency else None)
        manager.evicted(100, capacity=100)
        assert manager.new_priority(3) == (10 if by_frequency else 3)
        manager.use(manager.sources(server.plan(prompt, tokens)))
        assert manager.priority(variant) == (10 + 2 * LENS[1] if by_frequency else None)


def test_evictions_are_followed_by_a_look_at_what_is_gone() -> None:
    server = Server(0, max_variants=100)
    for chunk in range(len(LENS)):
        prompt, tokens = prompt_of([chunk])
        server.complete(prompt, Keep(0, 0, in_path=False), PathTokens(tokens, Partition()))
    for holder in server.store.left:
        server.store.evict(holder)
    server.manager.evicted(1, capacity=100)
    assert len(server.manager.index) == len(LENS) - 1
    server.manager.evicted(len(LENS) * TOKENS_PER_LOOK, capacity=100)
    assert len(server.manager.index) == 0


# Lookups are made once per state of index and store.


def num_lookups(server: Server) -> int:
    return server.manager.index.counters.num_lookups


def new_server(seed: int, **given: Any) -> Server:
    """One that has stored a few prompts."""
    server = Server(seed, **given)
    for _ in range(10):
        server.send()
        server.bring_in()
    return server


def as_new(prompt: ChunkPrompt) -> ChunkPrompt:
    return ChunkPrompt(prompt.options, prompt.keys, prompt.system)


@pytest.mark.parametrize("seed", range(10))
def test_a_prompt_is_looked_up_once_while_nothing_changes(seed: int) -> None:
    server = new_server(seed)
    prompt, tokens = server.draw_prompt()
    before = num_lookups(server)
    server.plan(prompt, tokens, prefix_len=server.cut(len(tokens) + QUESTION_LEN))
    assert num_lookups(server) == before + (server.cut(len(tokens) + QUESTION_LEN) < len(tokens))  # the rest of a page
    plan = server.plan(prompt, tokens)
    asked = num_lookups(server)
    assert asked == before + len(prompt.keys)
    assert server.plan(prompt, tokens) is plan
    other = server.plan(prompt, tokens, prefix_len=server.page_size)  # another plan of the same lookups
    assert other.prefix_len == server.page_size
    for chunk in range(len(prompt.keys)):
        server.manager.look_up(prompt, chunk)
    next(server.manager.remember_exact(prompt, plan, in_tree=0, up_to=len(tokens)), None)
    assert num_lookups(server) == asked

    server.store.evict(next(iter(server.store.left)))
    server.plan(prompt, tokens)
    assert num_lookups(server) == asked + len(prompt.keys)

    newcomer, _ = prompt_of([0])
    server.complete(newcomer, Keep(0, generation=0, in_path=False), PathTokens(tokens, Partition()))
    server.plan(prompt, tokens)
    assert num_lookups(server) == asked + 2 * len(prompt.keys)


@pytest.mark.parametrize("is_used", [False, True])
@pytest.mark.parametrize("seed", range(10))
def test_a_plan_is_never_out_of_date(seed: int, is_used: bool) -> None:
    """Whatever happens, it is what a prompt that comes just now would be told.

    But a use only decides which of equally good variants is found, and waiting prompts are not planned again for that.
    """
    server = new_server(seed)
    manager = server.manager
    waiting = [server.draw_prompt() for _ in range(5)]
    for _ in range(40):
        server.rng.choice((server.evict_some, server.forget_gone, server.send, manager.index.clear, lambda: None))()
        for prompt, tokens in waiting:
            plan, fresh = (
                server.plan(prompt, tokens),
                server.plan(ChunkPrompt(prompt.options, prompt.keys, prompt.system), tokens),
            )
            assert (without_variants(plan) == without_variants(fresh)) if is_used else (plan == fresh)
            if is_used:
                manager.use(manager.sources(plan))


def without_variants(plan: RecomputePlan) -> RecomputePlan:
    chunks = (replace(chunk, variant_id=None, shift=0) for chunk in plan.chunks)
    return replace(plan, chunks=tuple(chunks))


# What comes up from the tiers.


@dataclass(frozen=True, eq=False)
class InTier:
    """A variant that a tier has."""

    key: bytes
    length: int
    start: int
    generation: int
    context: tuple[bytes, ...]
    is_prepared: bool = False
    system: bytes = b""
    statistics: ChunkStatistics | None = None

    @property
    def name(self) -> str:
        return variant_name(self.start, self.generation, self.is_prepared, self.system, self.context)

    @property
    def traits(self) -> Traits:
        return Traits(self.generation, self.is_prepared, context_digest(self.context))


def drawn_in_tier(server: Server, prompt: ChunkPrompt, chunk: int) -> InTier:
    """Often just what the prompt needs."""
    rng = server.rng
    context = rng.choice((prompt.context(chunk), tuple(rng.choices(KEYS, k=rng.randrange(3)))))
    is_prepared = rng.random() < 0.2
    generation = 1 if is_prepared else rng.choice((0, 0, 1, 2))
    start = rng.choice((prompt.options.spans[chunk][0], rng.randrange(9)))
    return InTier(
        prompt.keys[chunk],
        prompt.length(chunk),
        start,
        generation,
        context,
        is_prepared,
        rng.choice((b"", prompt.system)),
    )


def test_what_is_searched_and_loaded_is_accepted_and_used() -> None:
    num_accepted = num_refused = 0
    for seed in range(300):
        server = Server(seed)
        manager = server.manager
        for _ in range(4):
            server.send()
        for _ in range(6):
            server.evict_some()
            prompt, tokens = server.draw_prompt()
            for missing in manager.missing(prompt):
                found = drawn_in_tier(server, prompt, missing.chunk)
                search: VariantSearch[InTier] = VariantSearch(
                    missing.need,
                    [TierView("disk", {found.name: found.traits})],
                    held=missing.held,
                )
                if search.next() == Ask("disk"):
                    search.told("disk", [found])
                is_read = search.next() is not None
                accept = manager.accept(found, missing.need)
                if not is_read:
                    continue  # it may be accepted nevertheless, where it came for another prompt
                if accept is None:
                    # What no ledger tells: the index has it, or better, of just this context.
                    peers = manager.index.variants_of(found.key)
                    assert any(one.context == found.context for one in peers), f"seed {seed}: loaded in vain"
                    num_refused += 1
                    continue
                home = new_node(TOKENS[KEYS.index(found.key)], server.page_size)
                server.store.put(home, found.length)
                variant = manager.complete_accept(accept, home)
                assert manager.look_up(prompt, missing.chunk).variant is variant, f"seed {seed}: loaded in vain"
                num_accepted += 1
            server.plan(prompt, tokens)
            manager.check_integrity()
    assert num_accepted > 200, "the prompts are not what they should be"
    assert num_refused < num_accepted / 10


def test_what_the_pool_has_as_needed_is_not_missing() -> None:
    server = Server(0, max_variants_per_chunk=8, max_variants=100, max_generation=8, system_prompts="any", max_cfo=None)
    prompt, tokens = prompt_of([0, 1])
    assert [(one.chunk, one.held) for one in server.manager.missing(prompt)] == [(0, NOTHING_HELD), (1, NOTHING_HELD)]
    path = PathTokens(tokens, Partition())
    server.store.put(path, len(tokens))
    for keep in server.manager.remember_exact(prompt, None, in_tree=len(tokens), up_to=len(tokens)):
        assert isinstance(keep, Keep)
        server.manager.complete(prompt, keep, PathHome(path, prompt.options.spans[keep.chunk][0]))
    assert list(server.manager.missing(prompt)) == []
    other, _ = prompt_of([1])
    (missing,) = server.manager.missing(other)
    assert 0.0 < missing.held.share <= 1.0, "it was computed behind another chunk"
    assert list(server.manager.missing(prompt_of([1], mode="exact")[0])) == []


@pytest.mark.parametrize(("has_states", "missing"), [(False, [0, 1]), (True, [1])])
def test_what_is_no_longer_than_its_seam_is_not_missing(has_states: bool, missing: list[int]) -> None:
    prompt, _ = prompt_of([0, 1])
    assert prompt.length(0) < prompt.length(1), "the case is not what it should be"
    config = Config(seam_len=prompt.length(0))
    manager = ChunkManager(config, Server(0).store, method="seams", ratio=0.0, has_states=has_states)
    assert [one.chunk for one in manager.missing(prompt)] == missing


@pytest.mark.parametrize("system_prompts", ["any", "same"])
def test_a_chunk_behind_the_text_that_it_is_stored_behind_is_not_kept_in_part(system_prompts: str) -> None:
    settings = {"max_variants_per_chunk": 8, "max_variants": 100, "max_generation": 8}
    manager = Server(0, **settings, system_prompts=system_prompts).manager

    def kept(first: int, in_tree: int | None = None) -> list[int]:
        """Chunks to keep of a prompt of this chunk, a text and chunk 3, of which the tree has so much (None = all)."""
        prompt, tokens = prompt_of([first, 3], gaps=[0, 1])
        prompt = replace(prompt, pieces=piece_keys(Partition(), tokens, prompt.options.spans, prompt.keys))
        path, length = PathTokens(tokens, Partition()), len(tokens) if in_tree is None else in_tree
        manager.store.put(path, length)  # type: ignore[attr-defined]
        keeps = list(manager.remember_exact(prompt, None, in_tree=length, up_to=len(tokens)))
        for keep in keeps:
            assert isinstance(keep, Keep)
            manager.complete(prompt, keep, PathHome(path, prompt.options.spans[keep.chunk][0]))
        return [keep.chunk for keep in keeps]

    assert kept(0) == [0, 1]
    assert kept(1, in_tree=11) == [0], "of chunk 3 it has five tokens of seven"


@pytest.mark.parametrize(
    ("system_prompts", "method", "options", "kept"),
    [
        ("any", "epic", (), [1, 2]),
        ("any", "epic", (("shift", 0),), []),
        ("any", "question-drift", (), [1, 2]),
        ("same", "question-drift", (), []),
        ("same", "question-drift", (("drift", 0.0),), [1, 2]),
    ],
)
def test_what_an_option_makes_of_chunks_is_not_kept_for_others(
    system_prompts: str, method: str, options: Any, kept: list[int]
) -> None:
    """Chunk 3 is fixed, chunk 1 missing; chunk 4 steers both by drift, and keys that are not shifted are misplaced."""
    settings = {"max_variants_per_chunk": 8, "max_variants": 100, "max_generation": 8, "max_cfo": None, "alpha": None}
    manager = Server(0, **settings, remember="contexts", system_prompts=system_prompts).manager
    for chunk in (0, 3, 4):
        home = new_node(TOKENS[chunk])
        manager.store.put(home, LENS[chunk])  # type: ignore[attr-defined]
        manager.index.add(KEYS[chunk], length=LENS[chunk], start=0, generation=0, context=(), home=home)
    prompt, tokens = prompt_of([0, 3, 1, 4])
    asked = replace(prompt.options, method=method, ratio=0.3, options=options)
    prompt_len = len(tokens) + QUESTION_LEN
    prompt = replace(prompt, options=asked)
    plan = manager.plan(prompt, prompt_len=prompt_len, prefix_len=0, max_prefix_len=prompt_len - 1)
    actions = manager.remember_fused(prompt, plan, up_to=prompt_len)
    assert [one.chunk for one in actions if one.chunk < 3] == kept


@pytest.mark.parametrize(
    ("reason", "decision", "is_unsupported"),
    [
        ("unsupported", None, True),
        ("target", EXACTLY, False),
        ("unsupported", EXACTLY, True),
    ],
)
def test_a_reason_not_to_load_leaves_a_plan_without_hits(
    reason: str, decision: Decision | None, is_unsupported: bool
) -> None:
    server = Server(0, max_variants_per_chunk=8, max_variants=100, max_generation=8, system_prompts="any", max_cfo=None)
    prompt, tokens = prompt_of([3, 1])
    server.bring_in()
    for seed in range(40):
        server.rng.seed(seed)
        server.bring_in()
    lens = {"prompt_len": len(tokens) + QUESTION_LEN, "prefix_len": 0, "max_prefix_len": len(tokens)}
    plan = server.manager.plan(prompt, **lens)
    assert plan.num_reused
    asked = replace(prompt, unsupported=is_unsupported)
    without = server.manager.plan(asked, **lens, decision=decision)
    assert (without.num_reused, without.fallback_reason) == (0, reason)
    assert without == server.manager.without_load(plan, reason)
    assert server.manager.plan(prompt, **lens) == plan


@pytest.mark.parametrize(
    ("of_server", "of_request", "is_unsupported", "num_kept"),
    [
        (0, None, False, None),
        (150, None, False, 150),
        (150, 120, False, 120),
        (150, 0, False, None),
        (150, 120, True, None),
    ],
)
def test_what_decoding_keeps_is_said_by_the_request_or_else_by_the_server(
    of_server: int, of_request: int | None, is_unsupported: bool, num_kept: int | None
) -> None:
    prompt = ChunkPrompt.of(
        RequestOptions(spans=((10, 180),), keep_tokens=of_request),
        array("q", range(180)),
        Partition(),
        unsupported=is_unsupported,
    )
    kept = new_server(0, keep_tokens=of_server).manager.plan_kept(prompt, 200)
    assert (None if kept is None else 200 - kept.num_dropped) == num_kept
