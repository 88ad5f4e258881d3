"""ChunkManager: what its plans are made of, when it looks chunks up again, and what its store tells it."""

from __future__ import annotations

from array import array
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from chunk_cache.actions import Keep
from chunk_cache.gate.controller import Decision
from chunk_cache.gate.target import Step
from chunk_cache.index.chunk_index import TOKENS_PER_LOOK
from chunk_cache.index.chunk_statistics import ChunkStatistics
from chunk_cache.index.lookup import Lookup
from chunk_cache.index.need import Need
from chunk_cache.index.reusability import use_weight
from chunk_cache.index.variant import PathHome, PathTokens
from chunk_cache.index.victims import EVICTIONS
from chunk_cache.keys import Partition
from chunk_cache.manager import ROOM_PER_REUSED, ChunkManager
from chunk_cache.methods import METHODS
from chunk_cache.options.config import Config
from chunk_cache.options.request_options import RequestOptions
from chunk_cache.plan.planning import replan_without_load
from chunk_cache.plan.question_words import QuestionWords
from chunk_cache.plan.recompute_plan import RecomputePlan
from chunk_cache.prompt.chunk_prompt import ChunkPrompt
from unit.scheduler.dict_store import KEYS, LENS, TOKENS, DictStore, new_node, prompt_of
from unit.scheduler.drawn_server import QUESTION_LEN, Server, new_server
from unit.scheduler.plans import plan_by

EXACTLY = Decision(1, None, "behind the last step")


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


def num_lookups(server: Server) -> int:
    return server.manager.index.counters.num_lookups


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
