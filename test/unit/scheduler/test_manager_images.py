"""ChunkManager with images: a variant's place in its path and its position are two things."""

from __future__ import annotations

from array import array
from dataclasses import replace

import pytest

from chunk_cache.index.variant import PathHome, PathTokens
from chunk_cache.keys import Partition
from chunk_cache.manager import ChunkManager
from chunk_cache.options.config import Config
from chunk_cache.options.request_options import RequestOptions
from chunk_cache.prompt.chunk_prompt import ChunkPrompt
from unit.scheduler.dict_store import DictStore

CHUNK = array("q", range(200, 240))
IMAGE = array("q", [10**15] * 16)


def manager() -> tuple[ChunkManager, DictStore]:
    store = DictStore()
    return ChunkManager(Config(), store, method="near", ratio=0.15), store


def behind_image() -> tuple[ChunkPrompt, array[int]]:
    """Five tokens, an image that takes four positions, the chunk, a question."""
    tokens = array("q", range(5)) + IMAGE + CHUNK + array("q", range(50, 60))
    opts = RequestOptions(spans=((21, 61),))
    return ChunkPrompt.of(opts, tokens, Partition(), images=((5, 21),), rope_starts=(9,)), tokens


def plan(one: ChunkManager, prompt: ChunkPrompt, tokens: array[int]):
    return one.plan(prompt, prompt_len=len(tokens), prefix_len=0, max_prefix_len=len(tokens) - 1)


def remember(one: ChunkManager, store: DictStore, prompt: ChunkPrompt, tokens: array[int]) -> None:
    path = PathTokens(tokens[:61], Partition())
    store.put(path, 61)
    for keep in one.remember_exact(prompt, None, in_tree=61, up_to=len(tokens)):
        one.complete(prompt, keep, PathHome(path, prompt.options.spans[keep.chunk][0]))


def test_a_chunk_behind_an_image_turns_from_its_position() -> None:
    one, store = manager()
    prompt, tokens = behind_image()
    remember(one, store, prompt, tokens)
    one.check_integrity()
    (variant,) = one.index.variants_of(prompt.keys[0])
    assert (variant.start, variant.path_start, variant.token_ids) == (9, 21, CHUNK)
    text = array("q", range(30)) + CHUNK + array("q", range(50, 60))
    (chunk,) = plan(one, ChunkPrompt.of(RequestOptions(spans=((30, 70),)), text, Partition()), text).chunks
    assert (chunk.num_reused, chunk.shift) == (40, 21)
    (chunk,) = plan(one, prompt, tokens).chunks
    assert (chunk.num_reused, chunk.shift) == (40, 0)


@pytest.mark.parametrize("reuses_images", [False, True])
def test_where_images_are_not_reused_prompts_with_them_are_exact(reuses_images: bool) -> None:
    one, store = manager()
    prompt, tokens = behind_image()
    remember(one, store, prompt, tokens)
    found = plan(one, replace(prompt, unsupported=not reuses_images), tokens)
    assert found.fallback_reason == (None if reuses_images else "unsupported")
    assert found.num_reused == (40 if reuses_images else 0)
