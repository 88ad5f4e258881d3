"""What comes up from the tiers: what a manager misses, and what it accepts."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from chunk_cache.actions import Keep
from chunk_cache.index.chunk_statistics import ChunkStatistics
from chunk_cache.index.variant import PathHome, PathTokens, variant_name
from chunk_cache.keys import Partition
from chunk_cache.manager import ChunkManager
from chunk_cache.options.config import Config
from chunk_cache.prompt.chunk_prompt import ChunkPrompt
from chunk_cache.tiers.tier_ledger import Traits, context_digest
from chunk_cache.tiers.variant_search import NOTHING_HELD, Ask, TierView, VariantSearch
from unit.scheduler.dict_store import KEYS, TOKENS, new_node, prompt_of
from unit.scheduler.drawn_server import Server


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
