"""DictStore: a store of chunks that holds tokens and no KV; `put` and `evict` are all that ever happens in it.

`TOKENS` are a few chunks, `prompt_of` marks some of them in a prompt.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import takewhile

import numpy as np

from chunk_cache.index.chunk_statistics import ChunkStatistics
from chunk_cache.index.system_prompt import marks_of, num_pieces
from chunk_cache.index.variant import NodeHome, PathTokens, Variant
from chunk_cache.keys import Partition, chunk_key
from chunk_cache.options.request_options import RequestOptions
from chunk_cache.prompt.chunk_prompt import ChunkPrompt

LENS = (3, 5, 2, 7, 4)
TOKENS = tuple(array("q", range(100 * i, 100 * i + length)) for i, length in enumerate(LENS))
KEYS = tuple(chunk_key(Partition(), tokens) for tokens in TOKENS)
PADDING = 7


class DictStore:
    """Leading tokens that are stored, by path or node."""

    def __init__(self) -> None:
        self.left: dict[PathTokens | NodeHome, int] = {}
        self.version = 0

    def resolve(self, variant: Variant) -> int:
        return max(0, min(variant.length, self.left.get(variant.holder, 0) - variant.path_start))

    def put(self, holder: PathTokens | NodeHome, num_tokens: int) -> None:
        self.left[holder] = num_tokens
        self.version += 1

    def evict(self, holder: PathTokens | NodeHome, num_left: int = 0) -> None:
        """The store evicts from the end."""
        self.left[holder] = min(num_left, self.left[holder])
        self.version += 1

    def prefix_len(self, token_ids: array[int]) -> int:
        """Tokens of a prompt that some path begins with."""
        paths = [holder.tokens[:left] for holder, left in self.left.items() if isinstance(holder, PathTokens)]
        return max((len(_common(path, token_ids)) for path in paths), default=0)


def _common(one: array[int], other: array[int]) -> list[int]:
    return [token for token, _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))]


def prompt_of(
    chunks: Sequence[int], *, gaps: Sequence[int] = (), mode: str = "auto", ratio: float | None = None
) -> tuple[ChunkPrompt, array[int]]:
    """Chunks by number, each behind a gap of so many tokens that are in no chunk, and the tokens up to their end."""
    tokens: array[int] = array("q")
    spans = []
    for i, chunk in enumerate(chunks):
        tokens.extend([9] * (gaps[i] if i < len(gaps) else 0))
        spans.append((len(tokens), len(tokens) + LENS[chunk]))
        tokens.extend(TOKENS[chunk])
    options = RequestOptions(spans=tuple(spans), mode=mode, ratio=ratio)
    system = marks_of(tokens[: spans[0][0]]) if spans else b""
    return ChunkPrompt(options, tuple(KEYS[chunk] for chunk in chunks), system), tokens


def new_node(tokens: Sequence[int], page_size: int = 1) -> NodeHome:
    """A node of a chunk's own, in whole pages."""
    return NodeHome(array("q", [*tokens, *[PADDING] * (-len(tokens) % page_size)]), "chunk")


def some_statistics(length: int, inter: Sequence[int], system: bytes = b"") -> ChunkStatistics:
    """Small integers, so that many CFOs are equal."""
    values = np.ones(length, dtype=np.float32)
    shares = np.full(num_pieces(system), 0.125, dtype=np.float32)
    return ChunkStatistics(values, values, np.array(inter, dtype=np.float32), 0.5 + 0.125 * (sum(inter) % 4), shares)
