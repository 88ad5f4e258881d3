"""What a manager keeps and promotes: what an oracle says that compares everything with everything."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from chunk_cache.actions import Forgo, Keep, Promote
from chunk_cache.index.variant import PathHome, PathTokens, usable_len
from chunk_cache.keys import Partition
from chunk_cache.plan.recompute_plan import RecomputePlan
from chunk_cache.prompt.chunk_prompt import piece_keys
from chunk_cache.retention import Soundness
from unit.scheduler.dict_store import KEYS, LENS, TOKENS, new_node, prompt_of
from unit.scheduler.drawn_server import QUESTION_LEN, Server


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


@pytest.mark.parametrize(("trust", "kinds"), [("any", {"met"}), ("warmed", {"alone"})])
def test_strangers_do_not_displace_what_is_trusted(trust: str, kinds: set[str]) -> None:
    server = Server(0, max_variants_per_chunk=2, max_variants=100, max_generation=8, trust=trust)

    def send(*chunks: int) -> None:
        prompt, tokens = prompt_of(chunks)
        path = PathTokens(tokens, Partition())
        server.store.put(path, len(tokens))
        for keep in server.manager.remember_exact(prompt, None, in_tree=len(tokens), up_to=len(tokens)):
            server.complete(prompt, keep, path)

    send(3)
    for stranger in (0, 1, 2, 4):
        send(stranger, 3)
    assert {variant.kind for variant in server.manager.index.variants_of(KEYS[3])} == kinds


def test_a_chunk_that_strangers_only_have_sent_is_known_as_untrusted() -> None:
    server = Server(0, max_variants_per_chunk=8, max_variants=100, trust="warmed")
    prompt, tokens = prompt_of([0, 3])
    path = PathTokens(tokens, Partition())
    server.store.put(path, len(tokens))
    for keep in server.manager.remember_exact(prompt, None, in_tree=len(tokens), up_to=len(tokens)):
        server.complete(prompt, keep, path)
    assert server.manager.look_up(prompt_of([1, 3])[0], 1).reason == "untrusted"


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
