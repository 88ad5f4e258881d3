"""The regression list as scenarios, each run on stock SGLang and on ours, with every request at recompute ratio 1.0.

A case is a function of a `Session`; what it sends is compared request by request. Case numbers are those of the list
in `docs/exactness.md`. Prompts are token ids; nothing here knows which side it runs on.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from local_scheduler import LocalScheduler, Reply, Request
from tiny_models import make_model, make_tokenizer

BOS = 1
SEPARATOR = "<|chunk|>"
VOCAB = range(10, 500)


@dataclass
class Prompt:
    """Token ids with the spans of its chunks."""

    ids: list[int] = field(default_factory=list)
    spans: list[list[int]] = field(default_factory=list)

    def text(self, ids: Sequence[int]) -> Prompt:
        self.ids += ids
        return self

    def chunk(self, ids: Sequence[int]) -> Prompt:
        self.spans.append([len(self.ids), len(self.ids) + len(ids)])
        self.ids += ids
        return self


class Session:
    """One scheduler, fresh for every case, and what it answered."""

    def __init__(self, local: LocalScheduler, *, is_ours: bool, seed: int = 0) -> None:
        self.local = local
        self.is_ours = is_ours
        self.rng = random.Random(seed)
        self.replies: list[Reply] = []
        self.system = [BOS, *self.tokens(19)]

    def tokens(self, count: int) -> list[int]:
        return [self.rng.choice(VOCAB) for _ in range(count)]

    def chunks(self, *lens: int) -> list[list[int]]:
        return [self.tokens(length) for length in lens]

    def prompt(self, chunks: Sequence[Sequence[int]], question: int | Sequence[int] = 9) -> Prompt:
        prompt = Prompt().text(self.system)
        for chunk in chunks:
            prompt.chunk(chunk)
        return prompt.text(self.tokens(question) if isinstance(question, int) else question)

    def request(self, prompt: Prompt, *, marked: bool = True, ratio: float = 1.0, **fields: Any) -> Request:
        options: dict[str, Any] = {"spans": prompt.spans, "ratio": ratio, **fields.pop("options", {})}
        return Request(prompt.ids, options if marked and self.is_ours else None, **fields)

    def send(self, *prompts: Prompt, **fields: Any) -> list[Reply]:
        """All prompts in one batch; the replies are compared."""
        replies = self.local.generate([self.request(prompt, **fields) for prompt in prompts])
        self.replies += replies
        return replies

    def prime(self, chunks: Sequence[Sequence[int]]) -> None:
        """Every chunk once behind the system prompt, one by one."""
        for chunk in chunks:
            self.send(self.prompt([chunk], question=3), max_new_tokens=1)

    def assert_all_stored(self, reply: Reply) -> None:
        """No chunk was missing, or only the last page of one that the exact prefix holds otherwise."""
        for chunk in reply.info["chunks"] if reply.info else []:
            assert chunk["status"] != "miss" or chunk["start"] < reply.info["prefix_tokens"], reply.info

    def statuses(self, reply: Reply) -> list[str]:
        return [chunk["status"] for chunk in reply.info["chunks"]] if reply.info else []


def case_01_same_prompt_twice(s: Session) -> None:
    chunks = s.chunks(40, 33, 51)
    s.prime(chunks)
    prompt = s.prompt(chunks)
    s.send(prompt)
    s.send(prompt)
    s.send(prompt, prompt)


def case_02_all_hits_in_another_order(s: Session) -> None:
    chunks = s.chunks(40, 33, 51, 64)
    s.prime(chunks)
    for order in ([3, 2, 1, 0], [1, 3, 0, 2], [2, 0, 3, 1]):
        (reply,) = s.send(s.prompt([chunks[i] for i in order]))
        assert not s.is_ours or reply.info["recomputed_tokens"] == reply.info["reused_tokens"] > 0
    s.send(s.prompt(list(reversed(chunks)), question=[]))  # a prompt that ends in a chunk


def case_03_chunk_twice_in_one_prompt(s: Session) -> None:
    a, b, c = s.chunks(40, 33, 45)
    s.prime([a, b])
    s.send(s.prompt([b, a, b, a]))
    s.send(s.prompt([a, c, b, c]))  # the repeated one is missing: computed twice, stored once
    (reply,) = s.send(s.prompt([b, c, c, a]))
    s.assert_all_stored(reply)


def case_04_miss_between_two_hits(s: Session) -> None:
    a, b, c, d = s.chunks(40, 33, 51, 38)
    s.prime([a, b])
    (reply,) = s.send(s.prompt([b, c, a]))
    assert not s.is_ours or s.statuses(reply)[1] == "miss"
    s.send(s.prompt([b, c, d, a]))
    # text that no chunk covers stands between two hits
    s.send(s.prompt([b]).text(s.tokens(13)).chunk(a).text(s.tokens(5)))


def case_05_chunk_at_position_0(s: Session) -> None:
    a, b = [BOS, *s.tokens(37)], s.tokens(44)
    s.send(Prompt().chunk(a).chunk(b).text(s.tokens(7)))
    s.send(Prompt().chunk(b).chunk(a).text(s.tokens(7)))
    s.send(s.prompt([b, a]))
    s.send(Prompt().chunk(b).chunk(a))


def case_06_chunk_shorter_than_a_page(s: Session) -> None:
    chunks = s.chunks(1, 5, 15, 17, 3)
    s.prime(chunks)
    s.send(s.prompt(chunks))
    s.send(s.prompt(list(reversed(chunks))))
    for chunk in chunks:
        s.send(s.prompt([chunk, chunks[3]], question=1))


def case_07_stored_after_partial_reuse(s: Session) -> None:
    a, b, c, d = s.chunks(40, 33, 51, 29)
    s.prime([a, b])
    s.send(s.prompt([b, c, a, d]))
    (reply,) = s.send(s.prompt([d, c, b]))
    s.assert_all_stored(reply)
    (reply,) = s.send(s.prompt([c, d, a]))
    s.assert_all_stored(reply)


def case_08_prefix_and_chunks_together(s: Session) -> None:
    a, b, c = s.chunks(40, 48, 51)
    s.prime([c])
    s.send(s.prompt([a, b]))
    (reply,) = s.send(s.prompt([a, b, c]))  # an exact prefix of two chunks, then a hit
    assert not s.is_ours or (reply.info["prefix_tokens"] >= 96 and s.statuses(reply)[2] == "hit")
    s.send(s.prompt([a, c, b]))
    s.send(s.prompt([a, b, c]), marked=False)
    s.send(s.prompt([a[:20], c]))  # the exact prefix ends inside a chunk of another prompt


def case_14_batch_of_hits_misses_and_plain(s: Session) -> None:
    a, b, c, d = s.chunks(40, 33, 51, 29)
    s.prime([a, b, c])
    mixed = [
        s.request(s.prompt([c, b, a])),
        s.request(s.prompt([d, s.tokens(35)])),
        s.request(s.prompt([b, d, c])),
        s.request(s.prompt([a, c]), marked=False),
        s.request(Prompt().text(s.tokens(50))),
        s.request(s.prompt([b, a]), max_new_tokens=9),
    ]
    s.replies += s.local.generate(mixed)
    s.replies += s.local.generate([s.request(s.prompt([x, y])) for x, y in ((a, d), (d, b), (c, a), (b, c))])


def case_16_two_tenants(s: Session) -> None:
    a, b, c = s.chunks(40, 33, 51)
    prompt, other = s.prompt([a, b, c]), s.prompt([c, a, b])
    for tenant in ({"extra_key": "one"}, {"cache_salt": "two"}, {"extra_key": "one", "cache_salt": "two"}, {}):
        (first,) = s.send(prompt, **tenant)
        assert not s.is_ours or s.statuses(first) == ["miss"] * 3, (tenant, s.statuses(first))
        (second,) = s.send(other, **tenant)
        assert not s.is_ours or s.statuses(second) == ["hit"] * 3, (tenant, s.statuses(second))


def case_23_abort_at_any_step(s: Session) -> None:
    chunks = s.chunks(40, 33, 51, 64)
    s.prime(chunks)
    for steps in range(1, 8):
        victim = s.request(s.prompt([chunks[i] for i in (2, 0, 3)]), max_new_tokens=20)
        other = s.request(s.prompt([chunks[i] for i in (1, 3)]))
        abort_and_check(s, victim, other, steps)
    s.send(s.prompt([chunks[i] for i in (3, 1, 2, 0)]))


def abort_and_check(s: Session, victim: Request, other: Request, steps: int) -> None:
    """`victim` is aborted `steps` steps of the loop after it was sent; only `other` is compared."""
    messages = [s.local.prepare(victim), s.local.prepare(other)]

    def on_step(step: int) -> list[Any] | None:
        if step == 0:
            return messages
        if step == steps:
            return [s.local.abort(victim.rid)]
        return None if step > steps else []

    replies = s.local.run(on_step)
    s.replies.append(replies[1])


def case_logprobs_of_the_prompt(s: Session) -> None:
    chunks = s.chunks(40, 33, 51)
    s.prime(chunks)
    order = [chunks[2], chunks[0], chunks[1]]
    for start in (0, 30, 90, 140):
        s.send(s.prompt(order), logprob_start=start)


def case_flush(s: Session) -> None:
    chunks = s.chunks(40, 33)
    s.prime(chunks)
    assert s.local.flush()
    (reply,) = s.send(s.prompt([chunks[1], chunks[0]]))
    assert not s.is_ours or s.statuses(reply) == ["miss", "miss"]
    s.send(s.prompt([chunks[0], chunks[1]]))


def case_weights_without_a_flush(s: Session) -> None:
    """Other weights; exact prefixes of the old ones stay, chunks do not, nor one of a request that runs meanwhile."""
    a, b, c = s.chunks(40, 33, 51)
    s.prime([a, b])
    path = Path(s.local.scheduler.server_args.model_path)
    other = make_model("llama", path.with_name(f"{path.name}-other-weights"), seed=1)
    running = [s.local.prepare(s.request(s.prompt([s.tokens(9), c]), max_new_tokens=12))]

    def on_step(step: int) -> list[Any] | None:
        if step == 4:
            _load_weights(s, other, flush=False)
        return running if step == 0 else [] if step < 4 else None

    s.replies += s.local.run(on_step)
    s.send(s.prompt([b], question=3))
    (reply,) = s.send(s.prompt([s.tokens(7), c, b, a]))
    assert not s.is_ours or s.statuses(reply) == ["miss"] * 4, reply.info
    assert not s.is_ours or {chunk["reason"] for chunk in reply.info["chunks"][2:]} == {"weights_changed"}, reply.info
    (reply,) = s.send(s.prompt([b, c, a]))
    assert not s.is_ours or s.statuses(reply)[1:] == ["hit", "hit"], reply.info
    _load_weights(s, path, flush=True)
    (reply,) = s.send(s.prompt([s.tokens(7), a, b, c]))
    assert not s.is_ours or s.statuses(reply) == ["miss"] * 4, reply.info
    _load_tensors(s, other)
    (reply,) = s.send(s.prompt([s.tokens(7), c, a]))
    assert not s.is_ours or s.statuses(reply) == ["miss"] * 3, reply.info


def _load_tensors(s: Session, path: Path) -> None:
    """All weights, handed over as tensors in a session, as a trainer does between two steps."""
    from sglang.srt.managers import io_struct
    from sglang.srt.utils import MultiprocessingSerializer

    tensors = MultiprocessingSerializer.serialize(list(load_file(path / "model.safetensors").items()))
    updater = s.local.scheduler.weight_updater
    request = io_struct.UpdateWeightsFromTensorReqInput(
        serialized_named_tensors=[tensors] * s.local.scheduler.server_args.tp_size, flush_cache=False
    )
    for result in (
        updater.begin_weight_update(io_struct.BeginWeightUpdateReqInput()),
        updater.update_weights_from_tensor(request),
        updater.end_weight_update(io_struct.EndWeightUpdateReqInput()),
    ):
        assert result.success, result.message


def _load_weights(s: Session, path: Path, *, flush: bool) -> None:
    from sglang.srt.managers.io_struct import UpdateWeightFromDiskReqInput

    request = UpdateWeightFromDiskReqInput(model_path=str(path), load_format="auto", flush_cache=flush)
    result = s.local.scheduler.weight_updater.update_weights_from_disk(request)
    assert result.success, result.message


def case_more_rows_than_a_step(s: Session) -> None:
    """With chunked prefill on, these rows exceed every budget: no step has more, and the others get their turn."""
    chunks = s.chunks(150, 160, 140)
    s.prime(chunks)
    plain = Prompt().text(s.tokens(130))
    big = [s.prompt([chunks[i] for i in order], question=90) for order in ([2, 1, 0], [1, 0, 2])]
    with bounded_steps(s):
        s.send(plain, big[0], s.prompt([chunks[0]]), big[1])


def case_much_new_text_and_a_chunk(s: Session) -> None:
    """New text in front of the first chunk, between two, and in front of one that begins within a page."""
    a, b = s.chunks(50, 37)
    s.prime([a, b])
    long = [s.tokens(count) for count in (300, 203, 65)]
    with bounded_steps(s):
        (reply,) = s.send(s.prompt([]).text(long[0]).chunk(a).text(s.tokens(9)))
        assert not s.is_ours or s.statuses(reply) == ["hit"], reply.info
        assert not s.is_ours or reply.cached_tokens == reply.info["prefix_tokens"], reply
        s.send(s.prompt([a]).text(long[1]).chunk(b).text(long[2]), Prompt().text(s.tokens(40)), s.prompt([b, a]))
        s.send(s.prompt([b]).text(long[1]).chunk(s.tokens(70)).chunk(a), s.prompt([long[2], b]).text(s.tokens(150)))
        s.send(s.prompt([]).text(long[0]).text(s.tokens(30)).chunk(b))  # of which the beginning is in the tree by now


def case_chunks_that_go_between_two_steps(s: Session) -> None:
    """The index forgets the chunks that a request in steps has not brought in yet: they are computed."""
    a, b = s.chunks(90, 120)
    s.prime([a, b])
    prompt = s.prompt([s.tokens(5), b]).text(s.tokens(200)).chunk(a).text(s.tokens(20))
    messages = [s.local.prepare(s.request(prompt))]

    def on_step(step: int) -> list[Any] | None:
        if step == 4 and s.is_ours:
            s.local.cache.chunks.manager.index.clear()
        return messages if step == 0 else [] if step < 5 else None

    (reply,) = s.local.run(on_step)
    s.replies.append(reply)
    if s.is_ours and s.local.scheduler.server_args.chunked_prefill_size > 0:
        assert 0 < reply.info["recomputed_tokens"] == reply.info["reused_tokens"] < len(a) + len(b), reply.info
    s.send(s.prompt([b, a]), s.prompt([a, b]))


@contextmanager
def bounded_steps(s: Session) -> Iterator[None]:
    """Fails where a step of the scheduler computes more rows than `--chunked-prefill-size` allows."""
    runner, num_rows = s.local.scheduler.tp_worker.model_runner, Counter[int]()

    def count(_model: Any, args: Any) -> None:
        num_rows[s.local.scheduler.forward_ct] += len(args[0])

    handle = runner.model.model.register_forward_pre_hook(count)
    yield
    handle.remove()
    step_len = runner.server_args.chunked_prefill_size
    assert step_len <= 0 or max(num_rows.values()) <= step_len, num_rows


def case_exact_and_off_modes(s: Session) -> None:
    a, b, c = s.chunks(40, 33, 51)
    s.prime([a, b])
    (reply,) = s.send(s.prompt([s.tokens(9), b, c, a]), options={"mode": "exact"})
    assert not s.is_ours or s.statuses(reply) == ["miss", "skipped", "miss", "skipped"]
    (reply,) = s.send(s.prompt([c, b]))
    assert not s.is_ours or s.statuses(reply) == ["hit", "hit"]
    (reply,) = s.send(s.prompt([c, a, b]), options={"mode": "off"})
    assert not s.is_ours or (s.statuses(reply) == ["skipped"] * 3 and reply.info["fallback_reason"] == "off")
    s.send(s.prompt([c, b, a]))


# Text marks: what the tokenizer process makes of them, on the scheduling side. HTTP itself is tested in test/server.


def case_prepared_variants(s: Session) -> None:
    """A chunk that is stored only as computed behind its neighbours: while it is, used, and behind other neighbours."""
    a, b, c, d = s.chunks(40, 33, 51, 46)
    s.prime([a, b, c])
    s.send(s.prompt([a, b, d]), options={"mode": "prepare"})
    for order in ([d, c], [c, d, b], [b, a, d]):
        (reply,) = s.send(s.prompt(order))
        assert not s.is_ours or [chunk.get("kind") for chunk in reply.info["chunks"]].count("prepared") == 1, reply.info
    s.send(s.prompt([c, b, d]), s.prompt([a, b, d]), options={"mode": "prepare"})
    s.send(s.prompt([d, a]))
    s.send(s.prompt([a, b, d]), marked=False)  # nothing of it is in the exact cache


PASSAGES = [
    "one is Paris in France.\n",
    "the tower was built in 1889;\n",
    "and so is Rome, says he.\n",
    "water boils at 100 C.\n",
]


def _marked(text: str) -> Prompt:
    """Ids and spans of a text with separators, by the code that serves requests, with the test model's tokenizer."""
    from chunk_cache.prompt.marked_ids import encode_marked
    from chunk_cache.prompt.marks import split_marked

    marked = split_marked(text, SEPARATOR, "text")
    assert marked is not None
    encoded = encode_marked(make_tokenizer(512), marked)
    return Prompt(list(encoded.ids), [list(span) for span in encoded.spans])


def _join(order: Sequence[int], *, system: str = "Read.\n", question: str = "Where is Rome?") -> str:
    return SEPARATOR.join([system, *(PASSAGES[i] for i in order), question])


def _send_orders(s: Session, make: Callable[[Sequence[int]], Prompt]) -> None:
    for i in range(len(PASSAGES)):
        s.send(make([i]), max_new_tokens=1)
    for order in ([3, 1, 0], [2, 0, 3, 1], [1, 2]):
        (reply,) = s.send(make(order))
        s.assert_all_stored(reply)


def case_13_chat_template(s: Session) -> None:
    """The rendered chat, marked inside a message."""
    tokenizer = make_tokenizer(512)

    def make(order: Sequence[int]) -> Prompt:
        messages = [{"role": "system", "content": "Answer."}, {"role": "user", "content": _join(order, system="")}]
        rendered = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        prompt = _marked(rendered.removeprefix(tokenizer.bos_token))
        assert prompt.ids.count(BOS) == 1
        return prompt

    _send_orders(s, make)


def case_19_marks_change_no_token(s: Session) -> None:
    """These prompts have the ids of their text without marks, and a chunk has the same ids wherever it stands."""
    for order in ([0, 1, 2, 3], [2, 1]):
        assert make_tokenizer(512).encode(_join(order).replace(SEPARATOR, "")) == _marked(_join(order)).ids
    ids = {tuple(p.ids[a:b]) for order in ([0, 1], [1, 0]) for p in [_marked(_join(order))] for a, b in p.spans}
    assert len(ids) == 2
    _send_orders(s, lambda order: _marked(_join(order)))


def case_20_separators_do_not_leak(s: Session) -> None:
    """The model sees the text without its separators."""

    def make(order: Sequence[int]) -> Prompt:
        prompt = _marked(_join(order))
        assert make_tokenizer(512).decode(prompt.ids[1:]) == _join(order).replace(SEPARATOR, "")
        return prompt

    _send_orders(s, make)


CASES: dict[str, Callable[[Session], None]] = {
    name.removeprefix("case_"): function for name, function in list(globals().items()) if name.startswith("case_")
}
