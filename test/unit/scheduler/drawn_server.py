"""Server: a manager whose prompts, ends and failures are drawn by lot, and the oracle of what it keeps and promotes.

The oracle compares everything with everything; `Server.send` asserts that the manager decides the same.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Iterator
from itertools import zip_longest
from typing import Any

from chunk_cache.actions import Forgo, Keep, Promote
from chunk_cache.index.system_prompt import share_elsewhere
from chunk_cache.index.variant import PathHome, PathTokens, Variant
from chunk_cache.keys import Partition
from chunk_cache.manager import ChunkManager
from chunk_cache.options.config import REMEMBER, Config
from chunk_cache.plan.recompute_plan import RecomputePlan
from chunk_cache.prompt.chunk_prompt import ChunkPrompt
from chunk_cache.types import Status
from unit.scheduler.dict_store import KEYS, LENS, TOKENS, DictStore, new_node, prompt_of, some_statistics
from unit.scheduler.overlap import adjusted_overlap, order_penalty, prefix_overlap

QUESTION_LEN = 3


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


def new_server(seed: int, **given: Any) -> Server:
    """One that has stored a few prompts."""
    server = Server(seed, **given)
    for _ in range(10):
        server.send()
        server.bring_in()
    return server
