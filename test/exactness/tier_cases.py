"""Chunks that come up from a disk tier, as scenarios for `exactness.runner`: pages, room that others need, weights.

The model, the pool, the radix tree and the files are real; a case stands between two steps of the scheduler. No two
cases have a chunk of one length: sessions draw the same tokens, and the folder is that of all.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from chunk_cache.index.need import Need
from chunk_cache.keys import Partition, chunk_key
from exactness.cases import Prompt, Session
from local_scheduler import Reply
from tiny_models import make_model

__all__ = ["CASES", "Session"]


def settle(s: Session) -> None:
    """Until everything is written down."""
    tiers = s.local.cache.chunks.tiers
    while tiers.stats()["queued_write_bytes"]:
        tiers.wait(1.0)
        tiers.poll(())


def store(s: Session, chunks: Sequence[list[int]], question: int = 20) -> None:
    """Computes chunks that are on disk then, and nowhere else."""
    for chunk in chunks:
        s.send(s.prompt([chunk], question=question), max_new_tokens=1)
    only_on_disk(s)


def only_on_disk(s: Session) -> None:
    settle(s)
    assert s.local.flush()


def files(s: Session) -> int:
    root = Path(s.local.cache.chunks.manager.config.tiers.disk.path)
    return len(list(root.glob("*/*/*/*.kv")))


def case_pages(s: Session) -> dict[str, list[Reply]]:
    """No chunk ends with a page: each gets a padded node, first from the prompt's path and then from disk."""
    chunks = s.chunks(33, 40, 7)
    probe = s.prompt([chunks[2], chunks[0], chunks[1]])
    found: dict[str, list[Reply]] = {"off": s.send(probe, options={"mode": "off"})}
    for ratio in (0.0, 1.0):
        assert s.local.flush()
        for chunk in chunks:
            s.send(s.prompt([chunk], question=20), max_new_tokens=1)
        replies = s.send(probe, ratio=ratio)
        only_on_disk(s)
        replies += s.send(probe, ratio=ratio)
        replies += s.send(probe, ratio=ratio)  # from the nodes that the load before has made
        found[f"{ratio:g}"] = replies
    return found


def case_what_another_server_stored(s: Session) -> list[Reply]:
    """The first reply of a server whose folder may hold the chunk already."""
    replies = s.send(s.prompt(s.chunks(40), question=20), max_new_tokens=1)
    only_on_disk(s)
    return replies


def case_adapters(s: Session) -> list[Reply]:
    """Replies with the adapter that has computed the chunk on disk, and with another."""
    prompt = s.prompt(s.chunks(41), question=20)
    s.send(prompt, max_new_tokens=1, adapter=0)
    only_on_disk(s)
    return s.send(prompt, adapter=0) + s.send(prompt, adapter=1)


def case_a_chunk_whose_last_page_is_not_stored(s: Session) -> dict[str, Any]:
    """Its prompt ends within the page behind it: what the pool has in part is not written down."""
    (chunk,) = s.chunks(37)
    before = files(s)
    s.send(s.prompt([chunk], question=3), max_new_tokens=1)
    probe = s.prompt([s.tokens(5), chunk])
    pool = s.send(probe, options={"explain": True})
    only_on_disk(s)
    return {"pool": pool[0], "num_files": files(s) - before, "disk": s.send(probe)[0]}


def case_prepared(s: Session) -> dict[str, Any]:
    """A chunk that is prepared, then behind other neighbours, and comes up from disk; its neighbours do too."""
    a, b, c, d = s.chunks(42, 35, 53, 48)
    for chunk in (a, b, c):
        s.send(s.prompt([chunk], question=20), max_new_tokens=1)
    found = []
    for neighbours in ([a, b], [c, a]):
        only_on_disk(s)
        prompt = s.prompt([*neighbours, d], question=20)
        s.send(prompt, options={"mode": "prepare", "method": "full-reuse", "explain": True}, max_new_tokens=1)
        found.append(s.replies[-1])
    s.send(s.prompt([d], question=20), options={"mode": "exact"}, max_new_tokens=1)
    only_on_disk(s)
    s.send(s.prompt([s.tokens(5), d]), ratio=0.0, options={"explain": True})
    s.send(s.prompt([s.tokens(5), d]))
    keys = [chunk_key(Partition(), chunk) for chunk in (a, b, c, d)]
    tiers = s.local.cache.chunks.tiers
    (disk,) = tiers._tiers
    entries = [(info.generation, info.is_prepared) for info in disk.medium.find(keys[3])]
    contexts = [info.context for info in disk.medium.find(keys[3]) if info.is_prepared]
    prepared = [(keys[i], keys[j]) in contexts for i, j in ((0, 1), (2, 0), (0, 2))]
    return {"prepares": found, "used": s.replies[-2], "entries": entries, "prepared": prepared}


@contextmanager
def around_loads(s: Session, change: Callable[[Callable[[Any], Any], Any], Any]) -> Iterator[None]:
    """`change(original, params)` in the place of `init_load_back`."""
    cache = s.local.cache
    original = cache.init_load_back
    cache.init_load_back = lambda params: change(original, params)
    try:
        yield
    finally:
        del cache.init_load_back


def land(s: Session, chunk: list[int]) -> None:
    """A chunk on disk begins to land for somebody else."""
    from sglang_chunk_cache.tiers.search import Wanted

    tiers, key = s.local.cache.chunks.tiers, chunk_key(Partition(), chunk)
    wanted = Wanted(key, array("q", chunk), Partition(), Need(8))
    tiers.want("another", [wanted], num_keys=len(chunk), num_rows=lambda: len(chunk), num_rows_ahead=0)
    tiers.poll(["another"])
    while tiers.is_held("another"):
        tiers.wait(1.0)
        tiers.poll(["another"])
    assert tiers.bring_in("another")[key] == ("disk", None)


def num_arriving(s: Session) -> int:
    chunks = s.local.cache.chunks
    return sum(chunks.partial_loads.of(variant) is not None for variant in chunks.manager.index)


def case_room_is_needed_for_the_load_itself(s: Session) -> dict[str, Any]:
    """All partial loads give way to the load of a request, also that which it was to read."""
    chunk, other = s.chunks(30, 90)
    store(s, [chunk, other])
    probe = s.prompt([s.tokens(5), chunk])
    num_open = []

    def with_a_full_pool(load: Callable[[Any], Any], params: Any) -> Any:
        land(s, other)
        allocator = s.local.cache.token_to_kv_pool_allocator
        num_open.append(num_arriving(s))
        held = allocator.alloc(allocator.available_size() - 1)
        result = load(params)
        num_open.append(num_arriving(s))
        allocator.free(held)
        return result

    with around_loads(s, with_a_full_pool):
        replies = s.send(probe, ratio=0.0)
    replies += s.send(probe, options={"mode": "off"})
    return {"replies": replies, "num_open": num_open}


def case_room_is_needed_between_admission_and_forward(s: Session) -> dict[str, Any]:
    """As when the request that is admitted next to it needs the room."""
    from sglang.srt.mem_cache.base_prefix_cache import EvictParams

    (chunk,) = s.chunks(31)
    store(s, [chunk])
    probe = s.prompt([s.tokens(5), chunk])
    cache = s.local.cache
    num_open = []

    def then_evict_everything(load: Callable[[Any], Any], params: Any) -> Any:
        result = load(params)
        num_open.append(num_arriving(s))
        cache.evict(EvictParams(num_tokens=cache.token_to_kv_pool_allocator.size))
        num_open.append(num_arriving(s))
        return result

    with around_loads(s, then_evict_everything):
        replies = s.send(probe, ratio=0.0)
    replies += s.send(probe, options={"mode": "off"})
    return {"replies": replies, "num_open": num_open}


def case_rows_beside_a_load(s: Session) -> list[int]:
    """What the tiers are told that a request would compute without the chunk that comes up."""
    loaded, in_pool = s.chunks(100, 120)
    store(s, [loaded])
    s.send(s.prompt([in_pool], question=20), max_new_tokens=1)
    tiers = s.local.cache.chunks.tiers
    original, told = tiers.want, []

    def want(rid: str, chunks: Sequence[Any], **numbers: Any) -> None:
        told.append(numbers["num_rows"]())
        original(rid, chunks, **numbers)

    tiers.want = want
    try:
        s.send(s.prompt([loaded, in_pool], question=9), ratio=0.5, max_new_tokens=1)
    finally:
        del tiers.want
    return told


@contextmanager
def without_host_memory() -> Iterator[None]:
    """Whatever is to go down to host memory, or come up through it."""
    from sglang_chunk_cache.kv import assembler, fingerprint

    def used_up(*_: Any) -> Any:
        raise RuntimeError("CUDA error: out of memory")  # as of page-locked memory

    original = assembler.host_buffer
    assembler.host_buffer = fingerprint.host_buffer = used_up
    try:
        yield
    finally:
        assembler.host_buffer = fingerprint.host_buffer = original


def case_host_memory_is_used_up(s: Session) -> dict[str, Any]:
    (chunk,) = s.chunks(34)
    settle(s)  # what cases before this one have left
    before = files(s)
    with without_host_memory():
        store(s, [chunk])
    written = [files(s) - before]
    store(s, [chunk])
    written.append(files(s) - before)
    probe = s.prompt([s.tokens(5), chunk])
    with without_host_memory():
        replies = s.send(probe, ratio=0.0)
    return {"replies": replies + s.send(probe, options={"mode": "off"}), "written": written}


def case_weights_that_were_not_changed(s: Session) -> dict[str, Any]:
    """Updates that load nothing: of a folder that is not there, and outside of a session or in a second one."""
    from sglang.srt.managers.io_struct import BeginWeightUpdateReqInput, UpdateWeightFromDiskReqInput

    (chunk,) = s.chunks(36)
    store(s, [chunk])
    updater = s.local.scheduler.weight_updater
    path = s.local.scheduler.server_args.model_path
    request = UpdateWeightFromDiskReqInput(model_path=f"{path}-mistyped", load_format="auto")
    results = [updater.update_weights_from_disk(request), updater.update_weights_from_tensor(None)]
    updater._session = object()  # one is open
    results.append(updater.begin_weight_update(BeginWeightUpdateReqInput()))
    updater._session = None
    s.local.scheduler.tp_worker.model_runner.model_config.model_path = path
    return {
        "success": [result.success for result in results],
        "disabled": s.local.cache.chunks.tiers.stats()["disabled"],
        "reply": s.send(s.prompt([s.tokens(5), chunk]), ratio=0.0)[0],
    }


def case_a_better_variant_below(s: Session) -> list[Reply]:
    """The disk has a chunk as computed behind the one that the prompt has in front of it; the pool, behind another."""
    before, other, chunk = s.chunks(61, 67, 71)
    s.send(s.prompt([before, chunk], question=20), max_new_tokens=1)
    only_on_disk(s)
    s.send(s.prompt([other, chunk], question=20), options={"mode": "exact"}, max_new_tokens=1)
    settle(s)
    probe = s.prompt([s.tokens(5), before, chunk])
    replies = s.send(probe, ratio=1.0)
    replies += s.send(probe, ratio=1.0)
    replies += s.send(probe, options={"mode": "off"})
    return replies


def behind_others(s: Session, chunks: Sequence[list[int]]) -> Prompt:
    """A prompt of chunks that begins as none of those in which they were stored."""
    prompt = Prompt().text(s.tokens(12))
    for chunk in chunks:
        prompt.chunk(chunk)
    return prompt.text(s.tokens(9))


def case_states(s: Session) -> dict[str, Any]:
    """By ratio, three chunks that are computed, from the pool and from disk; one is longer than two steps. A fourth is
    no longer than its seam."""
    found: dict[str, Any] = {}
    for ratio in (0.0, 0.6, 1.0):
        *chunks, short = s.chunks(44, 150, 39, 8)
        before = files(s)
        for chunk in (*chunks, short):
            s.send(s.prompt([chunk], question=20), max_new_tokens=1)
        probe = behind_others(s, chunks[::-1])
        replies = s.send(probe, ratio=ratio)
        only_on_disk(s)
        num_files = files(s) - before
        for _ in range(2):
            replies += s.send(probe, ratio=ratio)
        replies += s.send(probe, options={"mode": "off"})
        found[f"{ratio:g}"] = {"replies": replies, "num_files": num_files}
    return found


def case_states_without_room(s: Session) -> dict[str, Any]:
    """Of three chunks in the pool there is room for what two of them do to states."""
    chunk, *others = s.chunks(41, 38, 36)
    chunks = s.local.cache.chunks
    chunks.store.transitions.max_bytes = 2 * chunks.states.layout.num_bytes
    probe = behind_others(s, [chunk])
    s.send(s.prompt([chunk], question=20), max_new_tokens=1)
    replies = s.send(probe, ratio=0.0)
    for other in others:
        s.send(s.prompt([other], question=20), max_new_tokens=1)
    settle(s)
    return {"replies": replies + s.send(probe, ratio=0.0), "stats": chunks.tiers.stats()["tiers"]["host"]}


def case_weights(s: Session) -> dict[str, Any]:
    """Comes last: the model is another one from then on."""
    from sglang.srt.managers.io_struct import UpdateWeightFromDiskReqInput

    stored, new = s.chunks(32, 28)
    store(s, [stored])
    before = files(s)
    cache = s.local.cache
    path = Path(s.local.scheduler.server_args.model_path)
    other = make_model("llama", path.with_name(f"{path.name}-other-weights"), seed=1)
    probe = s.prompt([s.tokens(5), stored, new])
    (old,) = s.send(probe, options={"mode": "off"})
    request = UpdateWeightFromDiskReqInput(model_path=str(other), load_format="auto")
    result = s.local.scheduler.weight_updater.update_weights_from_disk(request)
    assert result.success, result.message
    replies = s.send(probe)
    replies += s.send(probe, options={"mode": "off"})
    settle(s)
    return {
        "old": old,
        "replies": replies,
        "disabled": cache.chunks.tiers.stats()["disabled"],
        "written": files(s) - before,
    }


CASES: dict[str, Callable[[Session], Any]] = {
    name.removeprefix("case_"): function for name, function in list(globals().items()) if name.startswith("case_")
}
