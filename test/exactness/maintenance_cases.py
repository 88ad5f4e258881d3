"""What the store does by itself, as scenarios for `exactness.runner`: promotion, idle refresh, eviction by reuse."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import Any

import torch

from chunk_cache.index.refresh import Origin
from chunk_cache.index.variant import NodeHome, shown_id
from chunk_cache.keys import Partition, chunk_key
from exactness.cases import Prompt, Session
from local_scheduler import Reply
from sglang_chunk_cache.admin.scheduler_side import ChunkCacheEvictReq, ChunkCacheVariantsReq
from sglang_chunk_cache.host.refresh import refresh_request

__all__ = ["CASES", "Session"]


def variants_of(s: Session, chunk: list[int]) -> list[Any]:
    key = chunk_key(Partition(), chunk)
    return [variant for variant in s.local.cache.chunks.manager.index if variant.key == key]


def use(s: Session, chunk: list[int], **fields: Any) -> Reply:
    """The chunk behind a new one, so that it is never an exact prefix."""
    (reply,) = s.send(s.prompt([s.tokens(7), chunk]), **fields)
    return reply


def case_promotion(s: Session) -> dict[str, Any]:
    """A popular chunk at the end of a long prompt, used until it is promoted and on; the pool is filled meanwhile."""
    *cold, popular = s.chunks(60, 60, 60, 33)
    s.send(s.prompt([*cold, popular], question=20), max_new_tokens=1)
    (variant,) = variants_of(s, popular)
    probe = s.prompt([s.tokens(7), popular])
    homes, replies = [type(variant.home)], []
    for _ in range(3):
        replies += s.send(probe, ratio=0.0, options={"explain": True})
        homes.append(type(variant.home))
    for _ in range(8 * s.local.scheduler.max_total_num_tokens // 600):  # what was used twice lasts for four turnovers
        plain_prompts(s, 3)
        replies += s.send(probe, ratio=0.0, options={"explain": True})
    return {
        "homes": [home is NodeHome for home in homes],
        "replies": replies,
        "left_of_path": [s.local.cache.chunks.store.resolve(v) for chunk in cold for v in variants_of(s, chunk)],
        "variant": shown_id(variant.variant_id),
    }


def case_refresh(s: Session) -> dict[str, Any]:
    """A chunk that a fused request computed: derived; used twice, then the server is idle."""
    stored, missed = s.chunks(40, 30)
    s.prime([stored])
    (fused,) = s.send(s.prompt([s.tokens(5), stored, missed]), ratio=0.3)
    (derived,) = variants_of(s, missed)
    generations = [derived.generation]
    for _ in range(2):
        use(s, missed, ratio=0.3)
    s.local.generate([])  # idle: nothing to answer
    after = [(v.generation, v.context) for v in variants_of(s, missed)]
    (hit,) = s.send(s.prompt([s.tokens(6), missed]), options={"explain": True})
    return {"fused": fused, "generations": generations, "after": after, "context": derived.context, "hit": hit}


def case_administration(s: Session) -> dict[str, bool]:
    """Whether all ranks answer requests of administration alike, by request."""
    s.prime(s.chunks(40, 30))
    asked = (ChunkCacheVariantsReq(), ChunkCacheVariantsReq(by_uses=True), ChunkCacheEvictReq(keys=[]))
    return {repr(one): s.local.scheduler._request_dispatcher(one).agree for one in asked}


def case_prepared(s: Session) -> dict[str, Any]:
    """A chunk that is computed behind two neighbours, again behind the same, and then behind others.

    It is used so often that another derived variant would be promoted and refreshed, and its neighbours are prepared.
    """
    a, b, c, d = s.chunks(40, 33, 51, 46)
    s.prime([a, b, c])
    chunks = s.local.cache.chunks
    send(s, [a, b], prepared_behind=[c])
    (first,) = send(s, [a, b, d])
    (variant,) = variants_of(s, d)
    kv = chunks.pool.kv_of(variant)
    found = {
        "prepare": first,
        "kv": (kv.k.numpy(), kv.v.numpy()),
        "ids": [s.system, a, b, d],
        "place": (variant.start, variant.generation, variant.is_prepared, variant.context == keys_of(a, b)),
    }
    num_added = chunks.manager.index.counters.num_added
    send(s, [a, b, d])
    found["added by the same"] = chunks.manager.index.counters.num_added - num_added
    found["replies"] = [use(s, d, ratio=0.0, options={"explain": True}) for _ in range(3)]
    s.local.generate([])  # idle
    found["after uses"] = [(v.generation, v.is_prepared) for v in variants_of(s, d)]
    send(s, [c, b, d])
    found["contexts"] = [v.context == keys_of(c, b) for v in variants_of(s, d) if v.is_prepared]
    s.send(s.prompt([d], question=20), options={"mode": "exact"}, max_new_tokens=1)
    found["with an exact one"] = use(s, d, ratio=0.0, options={"explain": True})
    fused = s.prompt([a, b, d], question=[])
    num_cached = s.send(fused, marked=False, max_new_tokens=1)[0].cached_tokens
    found["exact prefix"] = num_cached - len(s.system) - len(a)
    return found


def send(s: Session, chunks: list[list[int]], prepared_behind: list[list[int]] | None = None) -> list[Reply]:
    """Has the last of these chunks prepared behind the others; `prepared_behind` more in front of them."""
    prompt = s.prompt([*(prepared_behind or []), *chunks], question=1)
    return s.send(prompt, options={"mode": "prepare", "method": "full-reuse", "explain": True}, max_new_tokens=1)


def keys_of(*chunks: list[int]) -> tuple[bytes, ...]:
    return tuple(chunk_key(Partition(), chunk) for chunk in chunks)


def case_contexts(s: Session) -> dict[str, Any]:
    """Chunks that are fixed behind another one, twice, and one of them by itself, of which nothing is fixed."""
    a, b = s.chunks(40, 30)
    s.prime([a, b])
    prompt = s.prompt([s.tokens(11), a, b])
    recipe = {"method": "cache-craft", "explain": True}
    first, second = (s.send(prompt, ratio=0.3, options=recipe)[0] for _ in range(2))
    unfixed = s.send(s.prompt([s.tokens(11), a]), ratio=0.0, options=recipe)[0]
    return {
        "replies": [first, second, unfixed],
        "variants": [sorted((v.generation, v.num_before) for v in variants_of(s, chunk)) for chunk in (a, b)],
        "have statistics": [v.statistics is not None for v in variants_of(s, b)],
    }


def case_other_system(s: Session) -> list[Reply]:
    """A chunk that was stored behind one system prompt, behind one whose end differs, another, and its own."""
    s.system = [s.system[0], *s.tokens(100)]
    (a,) = s.chunks(40)
    s.prime([a])
    own = s.system
    replies = []
    for system in ([*own[:70], *s.tokens(30)], s.tokens(101), own):
        prompt = Prompt().text(system).text(s.tokens(3) if system is own else []).chunk(a).text(s.tokens(9))
        replies += s.send(prompt, ratio=0.3, max_new_tokens=1)
    replies += s.send(Prompt().text(own).chunk(s.tokens(5)).chunk(a).text(s.tokens(9)), ratio=0.3, max_new_tokens=1)
    return replies


def case_conversation(s: Session) -> list[Reply]:
    """A passage that was met behind a private turn, without it, behind it again, and behind the same blanks."""
    a, b, d = s.chunks(40, 35, 30)
    private, blank = s.tokens(25), s.tokens(1)
    replies = []
    for front in ([a, private, b], [a, b], [a, private, b, d], [a, blank, d], [a, blank, b, blank, d]):
        prompt = Prompt().text(s.system)
        for part in front:
            prompt = prompt.text(part) if part in (private, blank) else prompt.chunk(part)
        mode = {"mode": "exact"} if front == [a, private, b] else {"mode": "auto"}
        replies += s.send(prompt.text(s.tokens(9)), ratio=0.0, options=mode, max_new_tokens=1)
    return replies


def case_trust(s: Session) -> list[Reply]:
    """A passage behind a stranger's, wanted behind another; again once it was computed alone, then warmed, and when the
    stranger came again."""
    stranger, a, c, d, filler = s.chunks(40, 35, 30, 25, 50)
    s.send(s.prompt([stranger, a]), options={"mode": "exact"}, max_new_tokens=1)
    replies = s.send(s.prompt([c, a]), ratio=0.0, options={"mode": "auto"}, max_new_tokens=1)
    s.prime([a])
    replies += s.send(s.prompt([d, a]), ratio=0.0, max_new_tokens=1)
    index = s.local.cache.chunks.manager.index
    for variant in variants_of(s, a):
        if not variant.num_before:
            index.discard(variant.variant_id)
    prompt = Prompt().text(s.system).chunk(filler).chunk(a).text(s.tokens(9))
    s.send(prompt, options={"mode": "warm"}, max_new_tokens=1)
    replies += s.send(s.prompt([c, d, a]), ratio=0.0, max_new_tokens=1)
    s.send(s.prompt([stranger, d, a]), options={"mode": "exact"}, max_new_tokens=1)
    return replies + s.send(s.prompt([stranger, c, a]), ratio=0.0, max_new_tokens=1)


def case_flush_before_a_refresh(s: Session) -> dict[str, Any]:
    """The server was idle, so a refresh waits; then it is told to flush."""
    scheduler = s.local.scheduler
    origin = Origin(token_ids=array("q", s.tokens(30)), spans=((4, 30),), partition=Partition())
    scheduler.handle_generate_request(refresh_request(1, origin))
    waiting = [req.rid for req in scheduler.waiting_queue]
    return {"waiting": waiting, "flushed": s.local.flush(), "left": len(scheduler.waiting_queue)}


def case_frequency(s: Session) -> list[str]:
    """One chunk is used often, then more plain text comes by than the pool holds; is the chunk still there?"""
    (popular,) = s.chunks(50)
    s.prime([popular])
    for _ in range(6):
        use(s, popular)
    plain_prompts(s, 2 * s.local.scheduler.max_total_num_tokens // 200)
    return s.statuses(use(s, popular))


def case_forgotten(s: Session) -> dict[str, Any]:
    """A chunk that is in a prompt, in front of another, in an unmarked prompt, and in a node of its own: all go."""
    a, b, c = s.chunks(40, 33, 51)
    s.prime([c])
    s.send(s.prompt([a, b]), max_new_tokens=1)
    s.send(s.prompt([s.tokens(9), a, s.tokens(6)]), marked=False, max_new_tokens=1)
    s.send(s.prompt([c, s.tokens(17), a]), ratio=0.3)
    chunks, pool = s.local.cache.chunks, s.local.scheduler.token_to_kv_pool_allocator.get_kvcache()
    keys, values = pool.k_buffer[1], pool.v_buffer[1]
    slots = torch.cat(
        [chunks.store.slots(v, 0, v.length).to(torch.int64) for v in variants_of(s, a) + variants_of(s, b)]
    )
    rows = keys[slots].clone(), values[slots].clone()

    def num_traces() -> int:
        """Rows of the pool that are what one of them was."""
        k, v = (torch.cdist(found.flatten(1), was.flatten(1)) for found, was in zip((keys, values), rows, strict=True))
        return int(((k < 1e-6) | (v < 1e-6)).any(dim=1).sum())

    before, num_variants = num_traces(), len(variants_of(s, a)) + len(variants_of(s, b))
    request = ChunkCacheEvictReq(keys=list(keys_of(a)), is_everywhere=True)
    result = chunks.admin.answer(request)
    return {
        "traces": (before, num_traces()),
        "num": (len(slots), num_variants),
        "left": [len(variants_of(s, chunk)) for chunk in (a, b)],
        "result": result,
        "key": keys_of(a)[0].hex(),
        "again": s.send(s.prompt([b, a]), max_new_tokens=4)[0],
    }


def case_memory_that_is_given_away(s: Session) -> dict[str, Any]:
    """A passage is deleted everywhere while the KV pool's memory is given away: is anything written there?"""
    from sglang.srt.managers.io_struct import ReleaseMemoryOccupationReqInput, ResumeMemoryOccupationReqInput

    (chunk,) = s.chunks(40)
    s.prime([chunk])
    scheduler, tags = s.local.scheduler, ["kv_cache"]
    keys = scheduler.token_to_kv_pool_allocator.get_kvcache().k_buffer[1]
    scheduler._request_dispatcher(ReleaseMemoryOccupationReqInput(tags=tags))
    before = keys.clone()
    request = ChunkCacheEvictReq(keys=list(keys_of(chunk)), is_everywhere=True)
    result = scheduler._request_dispatcher(request).ranks[0]
    is_written = not torch.equal(keys, before)
    scheduler._request_dispatcher(ResumeMemoryOccupationReqInput(tags=tags))
    return {"result": result, "is_written": is_written, "again": s.send(s.prompt([chunk]))[0]}


def case_crowd(s: Session) -> list[str]:
    """One chunk is used often, then requests that the pool could just hold come together; is the chunk still there?"""
    (popular,) = s.chunks(400)
    s.prime([popular])
    for _ in range(3):
        use(s, popular)
    num = (s.local.scheduler.max_total_num_tokens - 20) // 170
    s.send(*(Prompt().text(s.tokens(150)) for _ in range(num)), marked=False, max_new_tokens=16)
    return s.statuses(use(s, popular))


def case_sources_that_go(s: Session) -> dict[str, Any]:
    """Two requests of one step: what the first brings in is evicted for what the second brings in, into its slots."""
    first, second = s.chunks(500, 700)
    prompts = [s.prompt([s.tokens(7), chunk]) for chunk in (first, second)]
    assembler = s.local.cache.chunks.assembler
    copy, copies = assembler.copy, []

    def record(source: Any, target: Any, *args: Any) -> None:
        copies.append((set(source.tolist()), set(target.tolist())))
        copy(source, target, *args)

    assembler.copy = record
    found: dict[str, Any] = {}
    for name, batches in {"together": [prompts], "alone": [[prompt] for prompt in prompts]}.items():
        assert s.local.flush()
        s.prime([first, second])
        copies.clear()
        replies = [s.send(*batch, ratio=0.1, max_new_tokens=2) for batch in batches]
        found[name] = [reply for batch in replies for reply in batch]
        found[f"copies {name}"] = list(copies)
    return found


def plain_prompts(s: Session, num: int) -> None:
    for _ in range(num):
        s.send(Prompt().text(s.tokens(200)), marked=False, max_new_tokens=1)


CASES: dict[str, Callable[[Session], Any]] = {
    name.removeprefix("case_"): function for name, function in list(globals().items()) if name.startswith("case_")
}
