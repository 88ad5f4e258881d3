"""Warming: computes chunks ahead of time, so that the first prompt that holds one finds it.

Verb: `Warming.run`. Each chunk that is not stored is computed by an ordinary request of mode `exact`:

    | prefix (system prompt) | the chunk, marked | one token |      and one token is generated

Promises: what is stored already, in the KV pool or in a tier below it, is not computed again; at most `batch` requests
run at a time; a chunk counts as stored only when the schedulers say so afterwards; one bad chunk fails alone; where the
client has gone, nothing new is begun and what runs is aborted.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

from fastapi import HTTPException

from chunk_cache.errors import ChunkCacheRequestError
from chunk_cache.keys import Partition, chunk_key
from sglang_chunk_cache.admin.body import Warm
from sglang_chunk_cache.api.marks import MarkedText
from sglang_chunk_cache.api.prepare import KEY
from sglang_chunk_cache.api.tokens import encode_marked

if TYPE_CHECKING:
    from sglang_chunk_cache.admin.client import Admin


class Warming:
    """One request of warming.

    Args:
        request: of the client; None where there is none that could go.

    Raises:
        ChunkCacheRequestError: this server cannot do it.
    """

    def __init__(self, admin: Admin, body: Warm, request: Any = None) -> None:
        self._admin = admin
        self._body = body
        self._request = request
        self._partition = Partition(body.selection.extra_key, body.selection.cache_salt)
        self._prefix = self._prefix_ids()
        self._keys: list[bytes] = []
        self._failed: list[dict[str, Any]] = []
        self._num_stored = self._num_already = self._num_tokens = 0

    async def run(self) -> AsyncIterator[dict[str, Any]]:
        """Yields one line of progress per batch, with the chunks of it that failed, and the summary."""
        began = time.monotonic()
        total = len(self._body.selection.texts or self._body.selection.input_ids or ())
        done = 0
        for first in range(0, total, self._body.batch):
            if self._request is not None and await self._request.is_disconnected():
                return
            last = min(first + self._body.batch, total)
            failed = await self._batch(range(first, last))
            self._failed += failed
            done = last
            yield {"done": done, "total": total, **self._counts(), "failed": failed}
        present = await self._admin.stored(self._keys) if self._keys else {}
        yield {
            "summary": True,
            "done": done,
            "total": total,
            **self._counts(),
            "failed": self._failed,
            "present": sum(key in present for key in self._keys),
            "computed_tokens": self._num_tokens,
            "seconds": round(time.monotonic() - began, 3),
        }

    def _counts(self) -> dict[str, int]:
        return {"stored": self._num_stored, "already": self._num_already}

    async def _batch(self, indices: range) -> list[dict[str, Any]]:
        """Computes what is not stored of these chunks; returns what failed."""
        failed: list[dict[str, Any]] = []
        first_of: dict[bytes, tuple[int, tuple[int, ...]]] = {}
        num_repeated = 0
        for i in indices:
            try:
                ids = self._chunk_ids(i)
            except ChunkCacheRequestError as error:
                failed.append({"index": i, "error": str(error)})
                continue
            key = chunk_key(self._partition, ids)
            self._keys.append(key)
            num_repeated += key in first_of
            first_of.setdefault(key, (i, ids))
        stored = await self._admin.stored(list(first_of)) if first_of else {}
        missing = {key: item for key, item in first_of.items() if key not in stored}
        self._num_already += len(first_of) - len(missing) + num_repeated
        if missing:
            problems = await self._compute_all([ids for _, ids in missing.values()])
            now_stored = await self._admin.stored(list(missing))
            for (key, (i, ids)), problem in zip(missing.items(), problems, strict=True):
                if problem is None and key in now_stored:
                    self._num_stored += 1
                    self._num_tokens += len(ids)
                else:
                    problem = problem or "computed, but there was no room to keep it"
                    failed.append({"index": i, "error": f"{self._path(i)}: {problem}"})
        return sorted(failed, key=lambda entry: int(entry["index"]))

    async def _compute_all(self, chunks: list[tuple[int, ...]]) -> list[str | None]:
        tasks = [asyncio.ensure_future(self._compute(ids)) for ids in chunks]
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()

    async def _compute(self, ids: tuple[int, ...]) -> str | None:
        """Computes one chunk, on every replica of the server; returns what went wrong, or None."""
        num_replicas = self._admin.manager.server_args.dp_size
        for replica in range(num_replicas) if num_replicas > 1 else (None,):
            problem = await self._compute_on(replica, ids)
            if problem is not None:
                return problem
        return None

    async def _compute_on(self, replica: int | None, ids: tuple[int, ...]) -> str | None:
        start = len(self._prefix)
        spans = [[start, start + len(ids)]]
        async with self._admin.warm_slots:
            rid = uuid.uuid4().hex
            is_answered = False
            try:
                await self._admin.manager.compute_prompt(
                    rid=rid,
                    # A prompt's last token never enters the tree before it is answered: one more than the chunk.
                    input_ids=[*self._prefix, *ids, ids[-1]],
                    sampling_params={
                        "max_new_tokens": 1,
                        "temperature": 0.0,
                        "ignore_eos": True,
                        "custom_params": {KEY: {"spans": spans, "mode": "exact"}},
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

    def _chunk_ids(self, i: int) -> tuple[int, ...]:
        selection = self._body.selection
        if selection.texts is not None:
            return self._admin.encode_chunk(selection.texts[i], self._path(i))
        assert selection.input_ids is not None
        self._admin.check_vocabulary(selection.input_ids[i], self._path(i))
        return selection.input_ids[i]

    def _path(self, i: int) -> str:
        return f"{'input_ids' if self._body.selection.texts is None else 'texts'}[{i}]"

    def _prefix_ids(self) -> tuple[int, ...]:
        """What stands in front of every chunk; BOS only where text is tokenized, as in a prompt of text."""
        body, admin = self._body, self._admin
        if body.prefix_ids is not None:
            admin.check_vocabulary(body.prefix_ids, "prefix_ids")
            return body.prefix_ids
        if body.prefix_text is None and body.selection.texts is None:
            return ()
        text = body.prefix_text or ""
        admin.check_text(text, "prefix_text" if text else "texts")
        # The chunk stands for any: only what is in front of it is wanted.
        marked = encode_marked(
            admin.manager.tokenizer, MarkedText((text, "a", ""), (False, True, False)), "prefix_text"
        )
        return tuple(marked.ids[: marked.spans[0][0]])
