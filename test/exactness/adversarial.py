"""Situations that once broke the scheduler's half: each returns its replies, or what the test asserts on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from chunk_cache.keys import Partition, chunk_key
from chunk_cache.options import request_options
from chunk_cache.options.request_options import MAX_CHUNKS
from exactness.cases import Prompt, Session
from exactness.runner import Config
from local_scheduler import Reply
from sglang_chunk_cache.request.chunk_request import state_of


@dataclass(frozen=True)
class PolicyConfig(Config):
    """A configuration with another order of the waiting queue."""

    policy: str = "lpm"

    @property
    def flags(self) -> dict[str, Any]:
        return {**super().flags, "schedule_policy": self.policy}


def case_prompt_replaced_by_the_scheduler(s: Session) -> list[Reply]:
    """SGLang refuses a prompt by replacing it with one token; its marks then point outside of it."""
    s.send(s.prompt([s.tokens(2 * s.local.scheduler.max_req_input_len)]))
    s.send(s.prompt(s.chunks(40, 33)))
    return s.replies


def case_session_turns_refused(s: Session) -> dict[str, Any]:
    """What SGLang refuses of a session leaves the server, and the session, as they were; also one that is cut."""
    from sglang.srt.managers.io_struct import OpenSessionReqInput

    scheduler = s.local.scheduler
    scheduler.session_controller.open(OpenSessionReqInput(capacity_of_str_len=10_000, session_id="s"))
    chunk, other = s.chunks(40, 33)

    def turn(prompt: Prompt, rid: str | None, **fields: Any) -> Reply:
        (reply,) = s.local.generate([s.request(prompt, session={"id": "s", "rid": rid}, **fields)])
        s.local.cache.chunks.check_integrity()
        return reply

    more = Prompt().text(s.tokens(3)).chunk(chunk).text(s.tokens(5))
    first = turn(s.prompt([chunk, other]), None)
    long = Prompt().text(s.tokens(3)).chunk(s.tokens(scheduler.max_req_input_len - 60)).text(s.tokens(5))
    found = {
        "unknown": turn(s.prompt([other, chunk]), "unknown"),
        "start": turn(more, first.rid, logprob_start=100_000),
        "long": turn(long, first.rid),
        "first": turn(Prompt().chunk([7]), "unknown"),
    }

    def refuse(req: Any) -> bool:
        """As a grammar that cannot be compiled, which is told once the selector has answered."""
        state_of(req)
        req.set_finish_with_abort("no grammar")
        return False

    scheduler.grammar_manager.process_req_with_grammar = refuse
    found["grammar"] = turn(more, first.rid)
    (found["alone"],) = s.send(s.prompt([other, chunk]))
    del scheduler.grammar_manager.process_req_with_grammar
    found["served"] = turn(more, first.rid)
    del scheduler.session_controller.sessions["s"]
    return found


def case_session_of_many_chunks(s: Session) -> list[list[int]]:
    """Each turn adds two chunks, of 20 and 30 tokens; the lengths of those that count, of at most three."""
    from sglang.srt.managers.io_struct import OpenSessionReqInput

    request_options.MAX_CHUNKS = 3
    controller = s.local.scheduler.session_controller
    controller.open(OpenSessionReqInput(capacity_of_str_len=10_000, session_id="s"))
    rid, found = None, []
    for _ in range(3):
        session = {"id": "s", "rid": rid}
        (reply,) = s.local.generate([s.request(s.prompt(s.chunks(20, 30)), session=session, max_new_tokens=2)])
        rid = reply.rid
        found.append([chunk["end"] - chunk["start"] for chunk in reply.info["chunks"]])
    del controller.sessions["s"]
    request_options.MAX_CHUNKS = MAX_CHUNKS
    return found


def case_retracted_behind_its_own_text(s: Session) -> list[Reply]:
    """The same greedy answer is in the tree already, longer than what a retracted request remembers of itself."""
    for _ in range(3):
        prompt = s.prompt([s.tokens(30)])
        requests = [
            s.request(prompt, options={"mode": "exact"}, max_new_tokens=count) for count in (6, 40, 40, 8, 30, 9, 12)
        ]
        s.replies += s.local.generate(requests)
    return s.replies


def case_chunk_inside_the_last_page(s: Session) -> list[str]:
    """The path holds none of the chunk, neither where it starts on a page border nor behind one."""
    statuses = []
    for system_len in (15, 31, 20):
        chunk = s.tokens(5)
        system = s.tokens(system_len + 1)
        s.send(Prompt().text(system).chunk(chunk).text(s.tokens(3)), max_new_tokens=1)
        (reply,) = s.send(Prompt().text(s.tokens(21)).chunk(chunk).text(s.tokens(40)), max_new_tokens=1)
        statuses += s.statuses(reply)
    return statuses


def case_question_beside_others(s: Session) -> dict[str, Any]:
    """Rows that a question chooses, alone and in steps that others have filled but for a part of it."""
    chunks = s.chunks(40, 33, 51)
    s.prime(chunks)
    question = s.tokens(30)
    found: dict[str, Any] = {}
    for method in ("a3", "fusionrag", "question-drift"):
        options = {"method": method, "explain": True}
        asked = s.request(s.prompt(chunks[::-1], question=question), ratio=0.15, options=options, max_new_tokens=1)
        (alone,) = s.local.generate([asked])
        others = [s.request(s.prompt([], question=s.tokens(n)), max_new_tokens=2, marked=False) for n in (20, 13, 9)]
        *_, crowded = s.local.generate([*others, asked])
        found[method] = [[one.get("recomputed_positions") for one in r.info["chunks"]] for r in (alone, crowded)]
        found[method].append([r.info["method"] for r in (alone, crowded)])
    return found


def case_partly_evicted_path(s: Session) -> list[int]:
    """Two chunks share their first tokens; only those of the first one survive an eviction."""
    from sglang.srt.mem_cache.base_prefix_cache import EvictParams

    head = s.tokens(5)
    first, second = head + s.tokens(95), head + s.tokens(95)
    s.prime([first, second])
    s.local.cache.evict(EvictParams(num_tokens=90))
    reused = []
    for _ in range(3):
        prompt = s.prompt([second, s.tokens(7), first])
        (reply,) = s.send(prompt, ratio=0.15, options={"explain": True}, max_new_tokens=1)
        reused.append(reply.info["chunks"][-1]["reused_tokens"])
    return reused


def case_another_prompt_that_begins_alike(s: Session) -> list[list[int]]:
    """A path was evicted; another prompt begins with its first chunk, and goes on with other tokens for as long."""
    cache = s.local.cache
    reused = []
    for same_len in (40, 40 + 25):  # all of the first chunk, and more than half of the second
        a, b, c = s.chunks(40, 40, 40)
        s.send(s.prompt([]), max_new_tokens=1)  # so that the system prompt stays when the path goes
        s.send(s.prompt([a, b, c]), max_new_tokens=1)
        (variant,) = cache.chunks.manager.index.variants_of(chunk_key(Partition(), b))
        # Unseen by the index, as after a small eviction.
        cache._evict_device_leaf(cache.chunks.store.node_id(variant), dict.fromkeys(cache.tree_components, 0))
        cache.chunks.store.note_change()
        alike = (a + b)[:same_len] + s.tokens(130 - same_len)
        s.send(Prompt().text(s.system).text(alike), marked=False, max_new_tokens=1)
        # The second chunk is looked up first; what was found there is a hint for the third.
        prompt = s.prompt([s.tokens(7), b, c])
        (reply,) = s.send(prompt, ratio=0.0, options={"explain": True}, max_new_tokens=1)
        cache.chunks.check_integrity()
        reused.append([chunk.get("reused_tokens", 0) for chunk in reply.info["chunks"][1:]])
        # What was computed for want of it is remembered, and used by the next.
        (reply,) = s.send(s.prompt([s.tokens(3), b, c]), ratio=0.0, options={"explain": True}, max_new_tokens=1)
        reused.append([chunk.get("reused_tokens", 0) for chunk in reply.info["chunks"][1:]])
    return reused


def case_noisy_tenant(s: Session) -> dict[str, Any]:
    """One tenant sends three times what the pool holds; chunks and exact prefix that another has stored."""
    chunks = s.chunks(40, 33, 51)
    first = s.prompt(chunks)
    s.send(first, max_new_tokens=1, extra_key="quiet")
    store = s.local.cache.chunks.store
    for _ in range(3 * s.local.scheduler.max_total_num_tokens // 200):
        prompts = [s.prompt([s.tokens(70)], question=10) for _ in range(2)]
        for i, reply in enumerate(s.send(*prompts, max_new_tokens=2, extra_key="noisy", options={"mode": "exact"})):
            assert reply.finish["type"] == "length", (i, reply)
        s.local.cache.chunks.check_integrity()
    (exact,) = s.send(first, marked=False, max_new_tokens=1, extra_key="quiet")
    prompt = s.prompt([s.tokens(7), chunks[2], chunks[0]])
    (reply,) = s.send(prompt, max_new_tokens=1, extra_key="quiet")
    held = {name: store.shares.held(Partition(name).key) for name in ("quiet", "noisy")}
    return {
        "exact": exact.cached_tokens,
        "statuses": s.statuses(reply)[1:],
        "held": held,
        "given_way": store.num_evicted_above,
    }


CASES = {name.removeprefix("case_"): function for name, function in list(globals().items()) if name.startswith("case_")}
