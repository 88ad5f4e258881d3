"""What speculative decoding can get wrong with chunks, as scenarios for both sides; see `cases`.

`accepted_with_reuse` runs with the chunk cache only and returns numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from exactness.cases import Prompt, Session

__all__ = ["CASES", "Session"]


def case_long_answers_of_a_mixed_batch(s: Session) -> None:
    """Fused, exact and plain requests verify together, streaming or not; what repeats a chunk is drafted well."""
    a, b, c = s.chunks(40, 33, 51)
    s.prime([a, b, c])
    mixed = [
        s.request(s.prompt([c, b, a]), max_new_tokens=41, stream=True),
        s.request(s.prompt([b, s.tokens(35), a], question=a[:20]), max_new_tokens=30),
        s.request(s.prompt([a, c]), marked=False, max_new_tokens=37, stream=True),
        s.request(Prompt().text(s.tokens(50)), max_new_tokens=5),
        s.request(s.prompt([b, a], question=b[:20]), max_new_tokens=1),
    ]
    s.replies += s.local.generate(mixed)
    s.replies += s.local.generate([s.request(s.prompt([x, y]), max_new_tokens=19) for x, y in ((a, b), (b, c), (c, a))])


def case_same_prompt_several_times(s: Session) -> None:
    """As `n` > 1 sends it: once to fill the exact prefix, then together."""
    a, b, c = s.chunks(40, 33, 51)
    s.prime([a, b, c])
    prompt = s.prompt([c, a, b])
    s.send(prompt, max_new_tokens=0)
    s.send(prompt, prompt, prompt, max_new_tokens=24)


def case_finish_within_an_accepted_run(s: Session) -> None:
    """An answer ends at each of its tokens, by a stop token or by its length; what it leaves behind is whole."""
    a, b = s.chunks(40, 33)
    s.prime([a])
    fresh, answers = s.chunks(*[29] * 8), []
    for i, new in enumerate(fresh):
        prompt = s.prompt([new, a], question=a[:9])
        (whole,) = s.send(prompt, max_new_tokens=12)
        stop = whole.output_ids[i + 1]
        (cut,) = s.local.generate([s.request(prompt, max_new_tokens=12, stop_ids=[stop])])
        assert cut.output_ids == whole.output_ids[: whole.output_ids.index(stop) + 1]
        s.send(prompt, max_new_tokens=i + 1)
        answers.append(whole.output_ids)
    for new, answer in zip(fresh, answers, strict=True):
        (reply,) = s.send(s.prompt([b, new, a], question=answer), max_new_tokens=8)
        s.assert_all_stored(reply) if reply.info and reply.info["chunks"][0]["status"] != "miss" else None
        assert not s.is_ours or s.statuses(reply)[1:] == ["hit", "hit"]


def case_abort_within_a_long_answer(s: Session) -> None:
    a, b, c = s.chunks(40, 33, 51)
    s.prime([a, b, c])
    for steps in range(2, 12, 2):
        victim = s.request(s.prompt([c, a, s.tokens(20)]), max_new_tokens=60)
        others = [s.request(s.prompt([b, c]), max_new_tokens=25), s.request(s.prompt([b]), marked=False)]
        messages = [s.local.prepare(one) for one in (victim, *others)]
        s.replies += s.local.run(_abort_at(steps, messages, s.local.abort(victim.rid)))[1:]
    s.send(s.prompt([b, c, a]), max_new_tokens=20)


def _abort_at(steps: int, messages: list[Any], abort: Any) -> Callable[[int], list[Any] | None]:
    def on_step(step: int) -> list[Any] | None:
        if step == 0:
            return messages
        if step == steps:
            return [abort]
        return None if step > steps else []

    return on_step


def case_retraction(s: Session) -> None:
    """Under `force_retract`: every third step that decodes takes a request its KV, drafted tokens and all."""
    chunks = s.chunks(40, 33, 51, 29)
    s.prime(chunks)
    orders = ([2, 0], [1, 3, 0], [3, 2, 1], [0, 1])
    s.send(*(s.prompt([chunks[i] for i in order]) for order in orders), max_new_tokens=30)
    s.send(s.prompt([chunks[i] for i in (1, 0, 2, 3)]), max_new_tokens=20)


def answers_by_method(s: Session) -> list[list[int]]:
    """Answers with chunks reused in part, by methods that choose before and during the forward."""
    chunks = s.chunks(40, 33, 51, 29)
    s.prime(chunks)
    answers = []
    algorithm = s.local.scheduler.server_args.speculative_algorithm or ""
    for method in ("epic", "full-reuse", *(() if algorithm.startswith("EAGLE") else ("cacheblend", "fusionrag"))):
        for ratio, order in ((0.1, [2, 0, 1]), (0.5, [3, 1, 2, 0])):
            fresh = s.tokens(21)
            prompt = s.prompt([chunks[order[0]], fresh, *(chunks[i] for i in order[1:])], question=6)
            options = {"method": method}
            answers += [
                one.output_ids for one in s.send(prompt, prompt, ratio=ratio, options=options, max_new_tokens=25)
            ]
    return answers


def accepted_with_reuse(s: Session, follows: int) -> list[int]:
    """Verifications that some answers took: chunks computed in full, then reused as they are.

    Args:
        follows: 0 = the draft's KV does not follow its chunks.
    """
    draft = s.local.cache.chunks.assembler.draft
    if not follows:
        s.local.cache.chunks.assembler.draft = None
    try:
        counts = []
        for options in ({"mode": "off"}, {}):
            s.rng.seed(7)
            assert s.local.flush()
            pool = s.local.scheduler.draft_worker.primary_draft_kv_pool
            for buffer in (*pool.k_buffer, *pool.v_buffer):
                buffer.normal_()  # what is not written is wrong
            chunks = s.chunks(60, 60, 60)
            s.prime(chunks)
            prompts = [s.prompt([chunks[i] for i in order], question=3) for order in ([2, 0, 1], [1, 2, 0], [2, 1, 0])]
            replies = s.send(*prompts, ratio=0.0, max_new_tokens=40, options=options)
            counts.append(sum(reply.num_verified for reply in replies))
        return counts
    finally:
        s.local.cache.chunks.assembler.draft = draft


CASES: dict[str, Callable[..., Any]] = {
    name.removeprefix("case_"): function for name, function in list(globals().items()) if name.startswith("case_")
} | {"accepted_with_reuse": accepted_with_reuse, "answers_by_method": answers_by_method}
