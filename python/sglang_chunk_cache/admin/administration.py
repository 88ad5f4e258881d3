"""Admin: the administration of a server, in its launching process, or in each of several that answer HTTP.

Verbs: the routes (`@route`); `stored_as`; `keys_of` (turns a selection into keys).
`ChunkTokenizerManager` owns the only instance of a process; `warming` uses it to compute chunks.

Promises: a request is sent once, to every scheduler process, and its replies are never taken for those of another one,
even if its client disconnects. Pins end here: this process has the clock and tells the schedulers.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, TypeVar

import msgspec
import psutil
from fastapi.encoders import jsonable_encoder

from chunk_cache.errors import ChunkCacheRequestError, request_error
from chunk_cache.keys import Partition, chunk_key
from chunk_cache.options import admin_bodies as body
from chunk_cache.options.admin_bodies import ChunkNames, Eviction, Listing, Pin
from chunk_cache.options.config import describe
from chunk_cache.options.warming_limits import MAX_BATCH
from chunk_cache.prompt.marked_ids import encode_chunk
from chunk_cache.prompt.marks import is_blank
from sglang_chunk_cache.admin import scheduler_side as messages
from sglang_chunk_cache.admin.journal import merge
from sglang_chunk_cache.api.stock_checks import check_vocabulary
from sglang_chunk_cache.flags.server_args import ChunkCacheArgs, attached, instance_of

ASK_AGAIN_S = 0.01
"""Seconds until schedulers are asked again whether a store has answered."""


class AdminRefused(ChunkCacheRequestError):
    """A legal request that cannot be served now, with the HTTP status that says so."""

    def __init__(self, message: str, status: HTTPStatus, details: dict[str, Any] | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.details = details or {}


@dataclass(frozen=True)
class Routed:
    """A verb of `Admin` that clients may ask for.

    Attributes:
        method: of HTTP.
        parse: turns a body, or the query of a GET, into the verb's argument; None = it has none.
        act: the verb, not bound to an `Admin` yet.
    """

    method: str
    parse: Callable[[Any], Any] | None
    act: Callable[..., Awaitable[dict[str, Any]]]

    def answer(self, admin: Admin, given: Any) -> Awaitable[dict[str, Any]]:
        """Calls the verb with what a client gave: a body or a query."""
        return self.act(admin) if self.parse is None else self.act(admin, self.parse(given))


ROUTED: dict[str, Routed] = {}
"""By name: METHOD /chunk_cache/NAME."""

Act = TypeVar("Act", bound=Callable[..., Awaitable[dict[str, Any]]])


def route(method: str, parse: Callable[[Any], Any] | None = None) -> Callable[[Act], Act]:
    """Makes a verb of `Admin` a route; the first paragraph of its text describes the route to users."""

    def add(act: Act) -> Act:
        ROUTED[act.__name__] = Routed(method, parse, act)
        return act

    return add


class Admin:
    """See the head of this file.

    Args:
        manager: our tokenizer manager.
        communicator: asks all schedulers and returns their replies.
        num_replicas: number of data-parallel replicas, each with chunks of its own.
    """

    def __init__(self, manager: Any, communicator: Any, num_replicas: int) -> None:
        self.manager, self.num_replicas = manager, num_replicas
        self.warm_slots = asyncio.Semaphore(MAX_BATCH)  # of all clients together
        self._communicator = communicator
        self._booted_at = time.time() - time.monotonic()  # once: a clock that is set later moves no end of a pin
        self._tasks: set[asyncio.Task[Any]] = set()

    @property
    def args(self) -> ChunkCacheArgs:
        """The options of the server."""
        args = attached(self.manager.server_args)
        assert args is not None, "the routes exist only where the chunk cache is on"
        return args

    @route("GET")
    async def stats(self) -> dict[str, Any]:
        """Options and numbers of every scheduler process."""
        memory = psutil.virtual_memory()
        replies = await self._ask(messages.ChunkCacheStatsReq())
        args = self.args
        return {
            "instance": instance_of(self.manager.server_args),
            "config": {
                "method": args.method,
                "ratio": args.ratio,
                "separator": args.separator,
                "marks": args.marks,
                "parts": args.parts,
                "discover": args.discover,
                "selector_model": args.selector,
                "target": args.target,
                **jsonable_encoder(describe(args.parsed_config)),
            },
            "host": {
                "total_bytes": memory.total,
                "available_bytes": memory.available,
                "pid": os.getpid(),
                "rss_bytes": psutil.Process().memory_info().rss,
            },
            "ranks": sorted(
                (rank for reply in replies for rank in reply.ranks), key=lambda rank: (rank["dp_rank"], rank["tp_rank"])
            ),
        }

    @route("GET")
    async def requests(self) -> dict[str, Any]:
        """What became of the latest requests, and sums of each minute.

        Of all replicas; see `Journal.contents`.
        """
        replies = await self._ask(messages.ChunkCacheRequestsReq())
        merged = merge(reply.ranks[0] for reply in replies)
        for request in merged["requests"]:
            self._add_words(request["chunks"])
        return merged

    @route("GET", body.parse_listing)
    async def variants(self, listing: Listing) -> dict[str, Any]:
        """The stored variants, by id or by uses, or those of one chunk.

        One page of each replica.

        Raises:
            AdminRefused: the key is not known.
        """
        replies = await self._ask(
            messages.ChunkCacheVariantsReq(
                key=listing.key, limit=listing.limit, offset=listing.offset, by_uses=listing.order == "uses"
            )
        )
        total = sum(reply.ranks[0]["total"] for reply in replies)
        of_one = {}
        if listing.key is not None:
            of_one = {"tiers": _merged((reply.ranks[0]["tiers"] for reply in replies), max)}
            if not total:
                reasons = {reply.ranks[0]["reason"] for reply in replies}
                reason = min(reasons - {"not_stored"}, default="not_stored")
                raise _unknown("key", [listing.key], {"reason": reason, **of_one})
        variants = [{**one, "dp_rank": reply.dp_rank} for reply in replies for one in reply.ranks[0]["variants"]]
        if listing.order == "uses":
            variants.sort(key=lambda one: -one["num_uses"])
        self._add_words(variants)
        return {"total": total, "variants": variants, "limit": listing.limit, "offset": listing.offset, **of_one}

    def _add_words(self, chunks: Iterable[dict[str, Any]]) -> None:
        """Replaces the ids of first tokens by their text, if the server has a tokenizer."""
        for chunk in chunks:
            if "first_ids" in chunk and self.manager.tokenizer is not None:
                chunk["words"] = self.manager.tokenizer.decode(chunk.pop("first_ids"))

    async def stored_as(self, names: Mapping[bytes, str]) -> dict[bytes, int]:
        """Numbers of stored tokens, by key, of chunks whose variant of that name is stored on all replicas."""
        replies = await self._ask_stores(messages.ChunkCacheStoredReq(names=dict(names)))
        of_all = [reply.ranks[0]["stored"] for reply in replies]
        return {bytes.fromhex(key): n for key, n in of_all[0].items() if all(key in other for other in of_all)}

    async def _ask_stores(self, request: Any) -> list[Any]:
        """Asks until the stores that the schedulers ask have answered, or cannot be asked; returns the replies."""
        replies = await self._ask(request)
        while any(reply.ranks[0]["is_asking"] for reply in replies):
            await asyncio.sleep(ASK_AGAIN_S)
            replies = await self._ask(msgspec.structs.replace(request, is_again=True))
        return replies

    @route("POST", body.parse_pin)
    async def pin(self, pin: Pin) -> dict[str, Any]:
        """Keeps chunks from eviction for a while.

        Raises:
            AdminRefused: more tokens would be pinned than may be, or none of the keys is known.
        """
        keys = self.keys_of(pin.selection)
        until = self._booted_at + time.monotonic() + pin.ttl_s
        replies = await self._ask(messages.ChunkCachePinReq(keys=_unique(keys), until=until))
        results = [reply.ranks[0] for reply in replies]
        refused = [result for result in results if result["is_refused"]]
        if len(refused) < len(results):
            self._later(pin.ttl_s, messages.ChunkCacheUnpinReq(until=until))
        if refused:
            numbers = {name: refused[0][name] for name in ("pinned_tokens", "max_pinned_tokens")}
            raise AdminRefused(
                f"{_name(pin.selection)}: with these chunks {numbers['pinned_tokens']} tokens would be pinned, and "
                f"{numbers['max_pinned_tokens']} is the limit, or less while a prompt is computed in steps; name fewer "
                "chunks, unpin others, or try again",
                HTTPStatus.CONFLICT,
                numbers,
            )
        tokens = _merged((result["pinned"] for result in results), max)
        pinned, missing = _split(keys, {key: {"tokens": num} for key, num in tokens.items()})
        _check_known(pin.selection, keys, pinned)
        return {
            "pinned": pinned,
            "not_stored": missing,
            "until": until,
            "pinned_tokens": max(result["pinned_tokens"] for result in results),
            "max_pinned_tokens": results[0]["max_pinned_tokens"],
        }

    @route("POST", body.parse_unpin)
    async def unpin(self, selection: ChunkNames | None) -> dict[str, Any]:
        """Ends pins early, of these chunks or of all.

        Raises:
            AdminRefused: none of the keys is pinned.
        """
        keys = None if selection is None else self.keys_of(selection)
        replies = await self._ask(messages.ChunkCacheUnpinReq(keys=None if keys is None else _unique(keys)))
        done: dict[str, dict[str, Any]] = {key: {} for reply in replies for key in reply.ranks[0]["unpinned"]}
        pinned_tokens = max(reply.ranks[0]["pinned_tokens"] for reply in replies)
        if keys is None or selection is None:
            return {"unpinned": [{"key": key} for key in done], "not_pinned": [], "pinned_tokens": pinned_tokens}
        unpinned, others = _split(keys, done)
        _check_known(selection, keys, unpinned)
        return {"unpinned": unpinned, "not_pinned": others, "pinned_tokens": pinned_tokens}

    @route("POST", body.parse_evict)
    async def evict(self, eviction: Eviction) -> dict[str, Any]:
        """Forgets chunks; nodes of their own give their slots back, or all that no request reads.

        Raises:
            AdminRefused: none of the keys is known; not with `everywhere`, which evicts more than these.
        """
        keys = self.keys_of(eviction.selection)
        request = messages.ChunkCacheEvictReq(keys=_unique(keys), is_everywhere=eviction.everywhere)
        replies = await self._ask(request)
        evicted, missing = _split(keys, _merged((reply.ranks[0]["evicted"] for reply in replies), _added))
        reply = {"evicted": evicted, "not_stored": missing}
        if not eviction.everywhere:
            _check_known(eviction.selection, keys, evicted)
            return reply
        if self.manager.chunk_cache_selector is not None:
            self.manager.chunk_cache_selector.forget()
        more = [one.ranks[0] for one in replies]
        sums = {name: sum(one[name] for one in more) for name in ("emptied_tokens", "in_use_tokens")}
        behind = {name: sum(one["behind"][name] for one in more) for name in ("variants", "freed_tokens")}
        return reply | {"behind": behind} | sums

    @route("POST", body.parse_flush)
    async def flush(self, timeout_s: float) -> dict[str, Any]:
        """Empties index and KV pool where the server is idle.

        Raises:
            AdminRefused: the server is not idle.
        """
        result = await self._shielded(self.manager.flush_cache(timeout_s=timeout_s))
        if not result.success:
            why = result.message or "requests are running or waiting"
            message = f"body: not flushed, {why.rstrip('.')}; send it again when the server is idle, or give timeout_s"
            raise AdminRefused(message, HTTPStatus.CONFLICT)
        return {"flushed": True}

    def keys_of(self, selection: ChunkNames) -> list[bytes]:
        """The keys of the chunks of a selection, in its order.

        Raises:
            ChunkCacheRequestError: a text has no tokens or a separator, an id is not in the vocabulary, or texts were
                sent to a server that has no tokenizer.
        """
        if selection.keys is not None:
            return list(selection.keys)
        ids = selection.input_ids
        if ids is not None:
            for i, one in enumerate(ids):
                check_vocabulary(one, self.manager, f"input_ids[{i}]")
        else:
            assert selection.texts is not None
            ids = tuple(self.encode_chunk(text, f"texts[{i}]")[0] for i, text in enumerate(selection.texts))
        partition = Partition(selection.extra_key, selection.cache_salt)
        return [chunk_key(partition, one) for one in ids]

    def encode_chunk(self, text: str, path: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The token ids of a chunk in prompts, and those of its end, which count as text behind it.

        Raises:
            ChunkCacheRequestError: the text cannot be a chunk.
        """
        self.check_text(text, path)
        if is_blank(text):
            raise request_error(path, "the chunk is empty", "give it text, or remove it")
        ids, end_ids = encode_chunk(self.manager.tokenizer, text, path)
        return tuple(ids), tuple(end_ids)

    def check_text(self, text: str, path: str) -> None:
        """Checks that this server can tokenize a text and that it has no separator.

        Raises:
            ChunkCacheRequestError: it cannot, or it has.
        """
        if self.manager.tokenizer is None:
            problem = "the server runs with --skip-tokenizer-init"
            raise request_error(path, problem, "send input_ids, or keys")
        if self.args.separator in text:
            problem = f"has a separator {self.args.separator!r}"
            raise request_error(path, problem, "send each chunk as a text of its own")

    async def _ask(self, request: Any) -> list[messages.ChunkCacheAdminReply]:
        self.manager.auto_create_handle_loop()
        replies: list[messages.ChunkCacheAdminReply] = await self._shielded(self._communicator(request))
        if not all(reply.agree for reply in replies):
            raise AdminRefused(
                f"body: the tensor-parallel ranks gave different answers to {type(request).__name__}; flush the cache",
                HTTPStatus.INTERNAL_SERVER_ERROR,
            )
        return sorted(replies, key=lambda reply: reply.dp_rank)

    async def _shielded(self, coroutine: Any) -> Any:
        """Runs to its end even if the client disconnects; else SGLang would give its replies to the next caller."""
        return await asyncio.shield(self._keep(coroutine))

    def _keep(self, coroutine: Any) -> asyncio.Task[Any]:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _later(self, delay_s: float, request: Any) -> None:
        async def send() -> None:
            await asyncio.sleep(delay_s)
            await self._communicator(request)

        self._keep(send())


def _unique(keys: Any) -> list[bytes]:
    return list(dict.fromkeys(keys))


def _merged(results: Iterable[Mapping[str, Any]], both: Callable[[Any, Any], Any]) -> dict[str, Any]:
    """Joins the results of replicas, by chunk; `both` joins two values for the same chunk."""
    found: dict[str, Any] = {}
    for result in results:
        for key, value in result.items():
            found[key] = both(found[key], value) if key in found else value
    return found


def _added(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """What two replicas evicted of a chunk, added up; of a tier, which they may share, the larger number."""
    return {
        "variants": one["variants"] + other["variants"],
        "freed_tokens": one["freed_tokens"] + other["freed_tokens"],
        "tiers": _merged((one["tiers"], other["tiers"]), max),
    }


def _split(
    keys: Sequence[bytes], done: Mapping[str, Mapping[str, Any]]
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Entries of the reply for the chunks with which something was done, with its fields, and for the others."""
    hits: list[dict[str, Any]] = []
    others: list[dict[str, Any]] = []
    for index, key in enumerate(one.hex() for one in keys):
        entry = {"index": index, "key": key, **done.get(key, {})}
        (hits if key in done else others).append(entry)
    return hits, others


def _name(selection: ChunkNames) -> str:
    return next(way for way in ("texts", "input_ids", "keys") if getattr(selection, way) is not None)


def _check_known(selection: ChunkNames, keys: Sequence[bytes], hits: Sequence[object]) -> None:
    if selection.keys is not None and not hits:
        raise _unknown("keys", keys)


def _unknown(path: str, keys: Sequence[bytes], details: dict[str, Any] | None = None) -> AdminRefused:
    shown = ", ".join(key.hex() for key in keys[:3]) + (", ..." if len(keys) > 3 else "")
    message = f"{path}: {shown} not known; GET /chunk_cache/variants lists what is"
    return AdminRefused(message, HTTPStatus.NOT_FOUND, details)
