"""Warming: computes chunks ahead of time, so that the first prompt that holds one finds it.

Verb: `warm`. Each chunk that is not stored so already is computed by an ordinary request:

    | prefix (system prompt) | filler, marked | the chunk, marked | one token |      mode warm
    | prefix (system prompt) | neighbours, marked | the chunk, marked | one token |  mode prepare (FusionRAG eq. 10)
    | prefix (system prompt) | the chunk, marked | one token |                       mode exact, where it shall be alone

Promises: a chunk is not computed again if it is stored as asked: behind this prefix and this filler, or these
neighbours, in the KV pool or in a tier below it; neighbours are stored exactly before a chunk is computed behind them;
at most `batch` chunks are computed at a time; a computed chunk counts as stored only when the schedulers say so
afterwards; one bad chunk fails alone; if the client disconnects, nothing new is begun and what runs is aborted.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fastapi import HTTPException

from chunk_cache.errors import ChunkCacheRequestError, request_error
from chunk_cache.index.system_prompt import marks_of
from chunk_cache.index.variant import variant_name
from chunk_cache.keys import Partition, chunk_key
from chunk_cache.options.admin_bodies import Warm
from chunk_cache.plan.neighbours import find_neighbours
from chunk_cache.prompt.chunk_cache_fields import KEY
from chunk_cache.prompt.chunk_prompt import nums_before, piece_keys
from chunk_cache.prompt.filler import FILLER
from chunk_cache.prompt.marked_ids import encode_prefix
from chunk_cache.types import Span
from sglang_chunk_cache.admin.administration import Admin
from sglang_chunk_cache.api.stock_checks import check_vocabulary

NO_ROOM = "computed, but there was no room to keep it"


@dataclass(frozen=True)
class _Chunk:
    """One chunk to compute.

    Attributes:
        place: its place in the client's request.
        end_ids: token ids of its end, which are part of no chunk and stand in front of the next.
        behind: chunks between the prefix and this one: the filler, neighbours, or none.
        has_neighbours: whether these are neighbours.
    """

    place: int
    key: bytes
    ids: tuple[int, ...]
    end_ids: tuple[int, ...]
    behind: tuple[_Chunk, ...] = ()
    has_neighbours: bool = False

    @property
    def behind_keys(self) -> tuple[bytes, ...]:
        return tuple(one.key for one in self.behind)

    @property
    def neighbours(self) -> tuple[_Chunk, ...]:
        return self.behind if self.has_neighbours else ()


async def warm(admin: Admin, body: Warm, request: Any = None, chat: Any = None) -> AsyncIterator[dict[str, Any]]:
    """Computes chunks that are not stored; yields progress, and a summary at the end.

    Args:
        request: the client's request; when the client disconnects, the work stops. None = nobody can disconnect.
        chat: our `ChunkServingChat`, which renders messages; None = the body has none.

    Raises:
        ChunkCacheRequestError: the server cannot do this; raised here, before the first line.
    """
    work = Warming(admin, body, request, chat)
    await work.find_neighbours()
    return work.run()


class Warming:
    """One request of warming; arguments and errors are those of `warm`."""

    def __init__(self, admin: Admin, body: Warm, request: Any, chat: Any) -> None:
        self._admin = admin
        self._body = body
        self._request = request
        self._partition = Partition(body.selection.extra_key, body.selection.cache_salt)
        self._num_chunks = len(body.selection.texts or body.selection.input_ids or ())
        self._check_neighbours()
        self._prefix = self._prefix_ids(chat)
        self._system = marks_of(self._prefix)
        self._filler = self._filler_chunks()
        self._has_filler: set[int | None] = set()  # replicas whose tree has it
        self._filler_lock = asyncio.Lock()
        self._encoded: dict[int, _Chunk] = {}
        self._neighbours: Sequence[Sequence[int]] | None = None  # of each chunk; None = all are computed alone
        self._first_of: dict[bytes, _Chunk] = {}
        self._chunks: list[_Chunk] = []
        self._failed: list[dict[str, Any]] = []
        self._num_stored = self._num_already = self._num_tokens = 0

    async def find_neighbours(self) -> None:
        """Finds the neighbours of each chunk, where the client does not name them.

        Raises:
            ChunkCacheRequestError: the retriever is not there.
        """
        body = self._body
        if isinstance(body.neighbours, int):
            texts = body.selection.texts or [" ".join(map(str, ids)) for ids in body.selection.input_ids or ()]
            self._neighbours = await asyncio.to_thread(find_neighbours, texts, body.neighbours)
        else:
            self._neighbours = body.neighbours

    async def run(self) -> AsyncIterator[dict[str, Any]]:
        """Yields one line of progress per batch, with the chunks of it that failed, and the summary."""
        began = time.monotonic()
        total = self._num_chunks if self._neighbours is None else len(self._neighbours)
        if self._body.dry_run:
            yield await self._estimate(total)
            return
        for first in range(0, total, self._body.batch):
            if self._request is not None and await self._request.is_disconnected():
                return
            last = min(first + self._body.batch, total)
            failed = await self._batch(range(first, last))
            self._failed += failed
            yield {"done": last, "total": total, **self._counts(), "failed": failed}
        missing = {chunk.key for chunk in await self._missing(self._chunks)}
        yield {
            "summary": True,
            "done": total,
            "total": total,
            **self._counts(),
            "failed": self._failed,
            "present": len(self._chunks) - sum(chunk.key in missing for chunk in self._chunks),
            "behind": self._behind,
            "computed_tokens": self._num_tokens,
            "seconds": round(time.monotonic() - began, 3),
        }

    @property
    def _behind(self) -> str:
        """What the chunks are stored behind, in a word."""
        if self._neighbours is not None:
            return "neighbours"
        return "filler" if self._filler else "nothing"

    def _counts(self) -> dict[str, int]:
        return {"stored": self._num_stored, "already": self._num_already}

    async def _estimate(self, total: int) -> dict[str, Any]:
        """What the work would take; nothing is computed."""
        chunks, failed = self._read(range(total))
        missing = await self._missing(chunks)
        prepared = [chunk for chunk in missing if chunk.has_neighbours]
        neighbours = await self._missing_neighbours(prepared)
        exact = {chunk.key: chunk for chunk in (*missing, *neighbours) if not chunk.has_neighbours}
        num_tokens = sum(len(chunk.ids) for chunk in (*exact.values(), *prepared))
        pools = [rank["tiers"]["pool"] for rank in (await self._admin.stats())["ranks"]]
        return {
            "summary": True,
            "dry_run": True,
            "total": total,
            "already": len({chunk.key for chunk in chunks}) - len(missing),
            "behind": self._behind,
            "exact": [_cost(chunk) for chunk in exact.values()],
            "prepared": [_cost(chunk) for chunk in prepared],
            "failed": failed,
            "computed_tokens": num_tokens,
            "kv_bytes": sum(num_tokens * pool["capacity_bytes"] // pool["capacity_tokens"] for pool in pools),
            "capacity_tokens": pools[0]["capacity_tokens"],
        }

    async def _batch(self, places: range) -> list[dict[str, Any]]:
        """Computes what is not stored of these chunks; returns what failed."""
        chunks, failed = self._read(places)
        self._chunks += chunks
        todo = await self._missing(chunks)
        self._num_already += len(chunks) - len(todo)
        if not todo:
            return failed
        problems: dict[bytes, str] = {}
        if neighbours := await self._missing_neighbours(todo):
            problems = await self._compute_all(neighbours)
            for neighbour in await self._missing_neighbours(todo):
                problems.setdefault(neighbour.key, NO_ROOM)
        # Without one of its neighbours a chunk would not be stored as asked, so it is not computed.
        ready = [chunk for chunk in todo if problems.keys().isdisjoint(chunk.behind_keys)]
        own = await self._compute_all(ready)
        still = {chunk.place for chunk in await self._missing(ready)}
        for chunk in todo:
            problem = own.get(chunk.key)
            if chunk not in ready:
                at = next(i for i, key in enumerate(chunk.behind_keys) if key in problems)
                problem = f"neighbour {at} ({self._path(chunk.behind[at].place)}): {problems[chunk.behind_keys[at]]}"
            elif problem is None and chunk.place in still:
                problem = NO_ROOM
            if problem is None:
                self._num_stored += 1
            else:
                failed.append({"index": chunk.place, "error": f"{self._path(chunk.place)}: {problem}"})
        return sorted(failed, key=lambda entry: int(entry["index"]))

    # What is there.

    def _read(self, places: range) -> tuple[list[_Chunk], list[dict[str, Any]]]:
        """The chunks at these places, and those that cannot be chunks."""
        chunks, failed = [], []
        for place in places:
            try:
                chunks.append(self._chunk(place))
            except ChunkCacheRequestError as error:
                failed.append({"index": place, "error": str(error)})
        return chunks, failed

    async def _missing(self, chunks: Sequence[_Chunk]) -> list[_Chunk]:
        """Those of `chunks` that are not stored as asked, each once."""
        each: dict[bytes, _Chunk] = {}
        for chunk in chunks:
            each.setdefault(chunk.key, chunk)
        stored = await self._admin.stored_as({key: self._name(chunk) for key, chunk in each.items()}) if each else {}
        return [chunk for key, chunk in each.items() if key not in stored]

    def _name(self, chunk: _Chunk) -> str:
        """Name of the variant that is to be stored."""
        ids, spans = self._prompt_of(chunk)
        keys = (*chunk.behind_keys, chunk.key)
        pieces = piece_keys(self._partition, ids, spans, keys) or keys
        context = pieces[: nums_before(spans)[-1]]
        return variant_name(spans[-1][0], int(chunk.has_neighbours), bool(chunk.behind), self._system, context)

    async def _missing_neighbours(self, chunks: Sequence[_Chunk]) -> list[_Chunk]:
        """Neighbours of these chunks that are not stored alone, each once."""
        return await self._missing([one for chunk in chunks for one in chunk.neighbours])

    # Computing.

    async def _compute_all(self, chunks: Sequence[_Chunk]) -> dict[bytes, str]:
        """Computes chunks, `batch` at a time; returns what went wrong, by key."""
        problems: dict[bytes, str] = {}
        for first in range(0, len(chunks), self._body.batch):
            batch = chunks[first : first + self._body.batch]
            tasks = [asyncio.ensure_future(self._compute(chunk)) for chunk in batch]
            try:
                found = await asyncio.gather(*tasks)
            finally:
                for task in tasks:
                    task.cancel()
            problems |= {c.key: problem for c, problem in zip(batch, found, strict=True) if problem is not None}
            self._num_tokens += sum(len(chunk.ids) for chunk in batch if chunk.key not in problems)
        return problems

    async def _compute(self, chunk: _Chunk) -> str | None:
        """Computes one chunk, on every replica of the server; returns what went wrong, or None."""
        num_replicas = self._admin.num_replicas
        for replica in range(num_replicas) if num_replicas > 1 else (None,):
            problem = await self._compute_on(replica, chunk)
            if problem is not None:
                return problem
        return None

    async def _compute_on(self, replica: int | None, chunk: _Chunk) -> str | None:
        input_ids, spans = self._prompt_of(chunk)
        how: dict[str, Any] = {"mode": "warm" if chunk.behind else "exact"}
        if chunk.has_neighbours:
            how = {"mode": "prepare", "method": "full-reuse"}
        if self._filler and chunk.behind == self._filler:
            await self._compute_filler(replica, input_ids[: spans[-1][0]])
        return await self._send(replica, input_ids, {"spans": spans, **how})

    def _prompt_of(self, chunk: _Chunk) -> tuple[list[int], list[Span]]:
        """Token ids, and where the chunks are."""
        input_ids, spans = list(self._prefix), []
        for one in (*chunk.behind, chunk):
            spans.append((len(input_ids), len(input_ids) + len(one.ids)))
            input_ids += one.ids if one is chunk else one.ids + one.end_ids
        return input_ids, spans

    async def _compute_filler(self, replica: int | None, input_ids: list[int]) -> None:
        """Puts prefix and filler into the tree, for all chunks: prompts that prepare a chunk leave no path there."""
        async with self._filler_lock:
            if replica not in self._has_filler:
                await self._send(replica, input_ids, {"mode": "off"})
                self._has_filler.add(replica)

    async def _send(self, replica: int | None, input_ids: list[int], options: dict[str, Any]) -> str | None:
        """Computes a prompt; returns what went wrong, or None."""
        async with self._admin.warm_slots:
            rid = uuid.uuid4().hex
            is_answered = False
            try:
                await self._admin.manager.compute_prompt(
                    rid=rid,
                    # A prompt's last token never enters the tree before it is answered, so one is added.
                    input_ids=[*input_ids, input_ids[-1]],
                    sampling_params={
                        "max_new_tokens": 1,
                        "temperature": 0.0,
                        "ignore_eos": True,
                        "custom_params": {KEY: options},
                    },
                    extra_key=self._partition.extra_key,
                    cache_salt=self._partition.cache_salt,
                    routed_dp_rank=replica,
                )
                is_answered = True
            except HTTPException as error:
                return str(error.detail)
            except ValueError as error:
                return str(error)
            finally:
                if not is_answered:
                    self._admin.manager.abort_request(rid)
        return None

    # What the client sent.

    def _check_neighbours(self) -> None:
        if self._body.neighbours is not None and self._admin.args.parsed_config.max_generation < 1:
            problem = "this server uses exact variants only (max_generation is 0)"
            remedy = "drop it, or start the server with a max_generation of 1 or more"
            raise request_error("neighbours", problem, remedy)

    def _chunk(self, place: int) -> _Chunk:
        """The chunk at a place, with its neighbours.

        Raises:
            ChunkCacheRequestError: it or one of them cannot be a chunk.
        """
        alone = self._encode(place)
        if self._neighbours is None:
            return replace(alone, behind=self._filler)
        neighbours: dict[bytes, _Chunk] = {}
        for i, other in enumerate(self._neighbours[place]):
            path = f"neighbours[{place}][{i}]"
            try:
                neighbour = self._encode(other)
            except ChunkCacheRequestError as error:
                problem, _, remedy = str(error).rpartition("; ")
                raise request_error(path, problem, remedy) from None
            if neighbour.key != alone.key:  # a repetition is no neighbour, of itself or of another
                neighbours[neighbour.key] = neighbour
        chunk = replace(alone, behind=tuple(neighbours.values()) or self._filler, has_neighbours=bool(neighbours))
        first = self._first_of.setdefault(chunk.key, chunk)
        if first.behind_keys != chunk.behind_keys:
            problem = f"{self._path(place)} has the tokens of {self._path(first.place)}, which has other neighbours"
            raise request_error(f"neighbours[{place}]", problem, "give them the same")
        return chunk

    def _encode(self, place: int) -> _Chunk:
        if place not in self._encoded:
            ids, end_ids = self._chunk_ids(place)
            self._encoded[place] = _Chunk(place, chunk_key(self._partition, ids), ids, end_ids)
        return self._encoded[place]

    def _filler_chunks(self) -> tuple[_Chunk, ...]:
        """The filler; nothing where chunks shall be alone, or where this server cannot tokenize it."""
        if self._body.alone or self._admin.manager.tokenizer is None:
            return ()
        ids, end_ids = self._admin.encode_chunk(FILLER, "filler")
        return (_Chunk(-1, chunk_key(self._partition, ids), ids, end_ids),)

    def _chunk_ids(self, i: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        selection = self._body.selection
        if selection.texts is not None:
            return self._admin.encode_chunk(selection.texts[i], self._path(i))
        assert selection.input_ids is not None
        check_vocabulary(selection.input_ids[i], self._admin.manager, self._path(i))
        return selection.input_ids[i], ()

    def _path(self, i: int) -> str:
        return f"{'input_ids' if self._body.selection.texts is None else 'texts'}[{i}]"

    def _prefix_ids(self, chat: Any) -> tuple[int, ...]:
        """The ids in front of every chunk; with BOS only where text is tokenized, as in a prompt of text."""
        body, admin = self._body, self._admin
        if body.messages is not None:
            admin.check_text("", "messages")
            for i, message in enumerate(body.messages):
                admin.check_text(message["content"], f"messages[{i}].content")
            return tuple(chat.ids_in_front(body.messages))
        if body.prefix_ids is not None:
            check_vocabulary(body.prefix_ids, admin.manager, "prefix_ids")
            return body.prefix_ids
        if body.prefix_text is None and body.selection.texts is None:
            return ()
        text = body.prefix_text or ""
        admin.check_text(text, "prefix_text" if text else "texts")
        return tuple(encode_prefix(admin.manager.tokenizer, text))


def _cost(chunk: _Chunk) -> dict[str, int]:
    """What a dry run says of a chunk: its place, its tokens, and tokens of neighbours that are read for it."""
    num_read = sum(len(neighbour.ids) for neighbour in chunk.neighbours)
    return {"index": chunk.place, "tokens": len(chunk.ids), "neighbour_tokens": num_read}
