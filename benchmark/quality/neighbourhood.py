"""Neighbourhood: behind which other chunks of the questions each chunk is prepared (FusionRAG section 3.1).

`neighbours_of` finds them with the retriever of `chunk-cache warm --neighbours`; the corpus is all
chunks of the prompts that share a head.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TypeAlias

from benchmark.quality.prompts import Prompt

from chunk_cache.plan.neighbours import find_neighbours

NUM_NEIGHBOURS = 10
"""The paper's; 15 was worse there."""

Neighbours: TypeAlias = Mapping[str, Mapping[str, tuple[str, ...]]]
"""By partition and chunk, the most similar first."""


def neighbours_of(prompts: Iterable[Prompt], num: int = NUM_NEIGHBOURS) -> Neighbours:
    """The neighbours of every chunk of these prompts."""
    corpora: dict[str, dict[str, None]] = {}
    for prompt in prompts:
        corpora.setdefault(prompt.partition, {}).update(dict.fromkeys(prompt.chunks))
    found = {}
    for partition, corpus in corpora.items():
        chunks = list(corpus)
        places = find_neighbours(chunks, num)
        found[partition] = {chunk: tuple(chunks[i] for i in near) for chunk, near in zip(chunks, places, strict=True)}
    return found
