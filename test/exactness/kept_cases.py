"""Prompts of which decoding keeps a part, or all, packed into slots of their own.

`CASES`: those of `exactness.cases` with every marked prompt packed whole, which must equal stock SGLang, and two whose
prompts really lose tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from chunk_cache.options.kept_tokens import KeptTokens, droppable
from exactness import cases
from local_scheduler import LocalScheduler, Request

KEEP = 100
"""Slots per prompt in the case `small`."""


class Session(cases.Session):
    """Every marked request asks for what packs it whole."""

    num_packed = 0

    def __init__(self, local: LocalScheduler, *, is_ours: bool) -> None:
        super().__init__(local, is_ours=is_ours)
        if is_ours:
            from chunk_cache import manager

            self._module, self._plan = manager, manager.plan_kept
            manager.plan_kept = _plan_all
            self._count_packed(local.cache.chunks.assembler)

    def request(self, prompt: cases.Prompt, **fields: Any) -> Request:
        fields["options"] = {"keep_tokens": len(prompt.ids), **fields.get("options", {})}
        return super().request(prompt, **fields)

    def _count_packed(self, assembler: Any) -> None:
        vars(assembler).pop("pack", None)  # of the case before
        pack = assembler.pack

        def counted(*args: Any) -> None:
            self.num_packed += 1
            pack(*args)

        assembler.pack = counted

    def drop(self) -> None:
        """From here on prompts lose tokens."""
        self._module.plan_kept = self._plan


def _plan_all(spans: Any, keep_tokens: int | None, prompt_len: int) -> KeptTokens | None:
    begin, end = droppable(spans, prompt_len)
    return KeptTokens(begin, end, end - begin) if keep_tokens and begin < end else None


def case_small(s: Session) -> list[tuple[list[int], list[list[int]], Any]]:
    """Prompts with their spans and replies: computed whole, then fused at ratio 1.0 and together."""
    s.drop()
    a, b, c = s.chunks(60, 45, 70)
    first = s.prompt([a, b, c], question=20)
    second = s.prompt([c, a], question=40)
    third = s.prompt([b, a, c]).chunk(a)  # text between chunks, and none behind the last
    found = []
    for prompts in ([first], [second, first], [third, second, first]):
        requests = [s.request(one, options={"keep_tokens": KEEP}, max_new_tokens=8) for one in prompts]
        replies = s.local.generate(requests)
        found += [(one.ids, one.spans, reply) for one, reply in zip(prompts, replies, strict=True)]
    return found


def case_frees(s: Session) -> list[tuple[int, int, int]]:
    """Of a packed request at every step: its slots, its tokens behind the prompt, slots that it keeps from eviction."""
    s.drop()
    chunks = s.chunks(60, 45, 70)
    s.prime(chunks)
    request = s.request(s.prompt(chunks[::-1]), options={"keep_tokens": KEEP}, max_new_tokens=8)
    found = []

    def on_step(step: int) -> list[Any] | None:
        for req in s.local.scheduler.running_batch.reqs:
            if req.chunk_cache_request.packing.is_packed and not req.finished():
                found.append((req.kv.kv_allocated_len, len(req.output_ids), s.local.cache.protected_size()))
        return [s.local.prepare(request)] if step == 0 else None if found else []

    s.local.run(on_step)
    return found


def case_stays_whole(s: Session) -> dict[str, Any]:
    """Prompts that are not packed: there is no room, or the answer ends first; and what was counted."""
    s.drop()
    prompt = s.prompt(s.chunks(60, 45, 70), question=20)
    chunks, counted = s.local.cache.chunks, []
    pool = chunks.packer._pool

    def sent(**fields: Any) -> dict[str, Any]:
        (reply,) = s.local.generate([s.request(prompt, options={"keep_tokens": KEEP}, **fields)])
        return reply.info

    def add(_: Any, name: str, *labels: str, num: float = 1) -> None:
        if name == "not_packed":
            counted.extend(labels)

    type(chunks.metrics).add = add
    found = {"short": sent(max_new_tokens=1), "short_stream": sent(max_new_tokens=1, stream=True)}
    pool.allocate = lambda num_tokens: None
    found |= {"full": sent(max_new_tokens=8), "full_stream": sent(max_new_tokens=8, stream=True)}
    del pool.allocate
    return found | {"len": len(prompt.ids), "counted": counted, "packed": sent(max_new_tokens=8)}


def _that_packs(case: Callable[[Session], None]) -> Callable[[Session], None]:
    def run(s: Session) -> None:
        case(s)
        assert s.num_packed or not s.is_ours, "nothing was packed"

    return run


# What is packed leaves no exact prefix, and stock SGLang uses that of the old weights.
PACKING = {name: _that_packs(case) for name, case in cases.CASES.items() if name != "weights_without_a_flush"}
CASES = PACKING | {
    "small": case_small,
    "frees": case_frees,
    "stays_whole": case_stays_whole,
}
