"""ChunkScorer: takes chunks and a question as tokens of the main model, gives one score per chunk token.

Verbs: `find` (a chunk that is kept), `prepare` (reads a chunk ahead of time, in steps), `score` (scores a question over
prepared chunks in one batch).

CacheClip section 3.3: each chunk has a sequence [S, chunk, question], where S is the text in front of the first chunk.
The keys and values of S, and of each chunk behind it, are kept up to a number of bytes; the least recently used go
first. Where the paper is silent: special tokens of the main model are left out of S and question; text between chunks
is not read; without S, the model's BOS or EOS is the sink; weights are averaged over heads too.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from sglang_chunk_cache.selector.alignment import Tokens, best_of_overlap, decode, tokens_of
from sglang_chunk_cache.selector.auxiliary import AuxiliaryModel, KeysValues

STEP_LEN = 256
"""Tokens that are read at once: a question that can be answered waits at most for these."""


class TooLong(ValueError):
    """A text that the auxiliary model has no positions for."""


@dataclass(frozen=True)
class ReadChunk:
    """A chunk as the auxiliary model knows it.

    Attributes:
        prefix_key: of S.
        past: keys and values of S and of the chunk.
        own, main: the chunk's tokens, of the auxiliary and of the main model.
    """

    prefix_key: bytes
    past: tuple[KeysValues, KeysValues]
    own: Tokens
    main: Tokens

    @property
    def num_bytes(self) -> int:
        return self.past[1].num_bytes


class ChunkScorer:
    """See the head of this file.

    Args:
        tokenizer: of the main model.
        max_bytes: keys and values that are kept.
    """

    def __init__(self, auxiliary: AuxiliaryModel, tokenizer: Any, max_bytes: int) -> None:
        self._model = auxiliary
        self._tokenizer = tokenizer
        self._max_bytes = max_bytes
        self._kept: OrderedDict[bytes, KeysValues | ReadChunk] = OrderedDict()
        self.num_bytes = 0

    def find(self, key: bytes) -> ReadChunk | None:
        """A chunk that was prepared, if it is still kept; this counts as a use."""
        found = self._kept.get(key)
        if found is None:
            return None
        assert isinstance(found, ReadChunk)
        self._kept.move_to_end(key)
        self._kept.move_to_end(found.prefix_key)
        return found

    def prepare(
        self, key: bytes, ids: Sequence[int], prefix_key: bytes, prefix_ids: Sequence[int]
    ) -> Iterator[ReadChunk | None]:
        """Reads a chunk behind its prefix; yields None after each step, and finally the chunk.

        Raises:
            ValueError: ids that the main model's tokenizer has no text for.
            TooLong: the auxiliary model has too few positions.
        """
        main = decode(self._tokenizer, ids)
        prefix = self._kept.get(prefix_key)
        if prefix is None:
            sink = self._model.sink_of(self._text(prefix_ids))
            self._check_len(len(sink))
            prefix = yield from self._read(sink, ())
            self._keep(prefix_key, prefix)
        else:
            self._kept.move_to_end(prefix_key)
        assert isinstance(prefix, KeysValues)
        encoded = self._model.tokenizer(main.text, add_special_tokens=False, return_offsets_mapping=True)
        own_ids = encoded["input_ids"]
        self._check_len(prefix.num_tokens + len(own_ids))
        read = yield from self._read(own_ids, (prefix,))
        chunk = ReadChunk(prefix_key, (prefix, read), tokens_of(main.text, encoded["offset_mapping"]), main)
        self._keep(key, chunk)
        self._keep(prefix_key, prefix)  # newer than the chunks that hold it, so they are dropped first
        yield chunk

    def score(self, question_ids: Sequence[int], chunks: Sequence[ReadChunk]) -> list[npt.NDArray[np.float32]]:
        """Per chunk a score of each token of the main model: the best of the auxiliary tokens that it overlaps.

        Raises:
            TooLong: the auxiliary model has too few positions.
        """
        ids = self._model.tokenizer(self._text(question_ids), add_special_tokens=False)["input_ids"]
        ids = ids or self._model.sink_of("")  # special tokens of the main model alone
        for chunk in chunks:
            self._check_len(sum(text.num_tokens for text in chunk.past) + len(ids))
        scored = [chunk for chunk in chunks if len(chunk.own)]
        weights = iter(self._model.attend(ids, [chunk.past for chunk in scored]) if scored else ())
        nothing = np.empty(0, dtype=np.float32)
        return [
            best_of_overlap(next(weights).numpy() if len(chunk.own) else nothing, chunk.own, chunk.main)
            for chunk in chunks
        ]

    def _read(self, ids: Sequence[int], past: tuple[KeysValues, ...]) -> Generator[None, None, KeysValues]:
        """Reads a text, and yields after each step."""
        read = KeysValues()
        for start in range(0, len(ids), STEP_LEN):
            here = (*past, read) if start else past
            read = join(read, self._model.read(ids[start : start + STEP_LEN], here))
            yield
        return read

    def _text(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def _check_len(self, length: int) -> None:
        if length > self._model.max_len:
            raise TooLong(f"{length} tokens, and the selector's model has {self._model.max_len} positions")

    def _keep(self, key: bytes, read: KeysValues | ReadChunk) -> None:
        if (before := self._kept.pop(key, None)) is not None:
            self.num_bytes -= before.num_bytes
        self._kept[key] = read
        self.num_bytes += read.num_bytes
        while self.num_bytes > self._max_bytes:
            self.num_bytes -= self._kept.popitem(last=False)[1].num_bytes


def join(first: KeysValues, second: KeysValues) -> KeysValues:
    """Two parts of a text as one."""
    if not first.num_tokens or not second.num_tokens:
        return first if first.num_tokens else second
    keys, values = (
        tuple(torch.cat(pair, dim=1) for pair in zip(one, two, strict=True))
        for one, two in ((first.keys, second.keys), (first.values, second.values))
    )
    return KeysValues(keys, values, first.num_tokens + second.num_tokens)
