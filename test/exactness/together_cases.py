"""What chunks must get along with, each run on stock SGLang and on ours, with every request at recompute ratio 1.0.

As in `cases`, of whose kind these are; a case belongs to the configuration that turns its feature on.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

from exactness.cases import Prompt, Session

__all__ = ["CASES", "Session"]

LAYERWISE = ({"method": "cacheblend"}, {"method": "a3"}, {"method": "epic", "options": {"focus_window": 2}})
"""Rows are chosen or leave in the forward."""


@contextlib.contextmanager
def _watched(s: Session, look: Callable[[Any, bool, Any], None]) -> Iterator[None]:
    """Inside the scope `look` gets the batch of each forward, whether it is mixed (ours: and fused), and the output."""
    runner = s.local.scheduler.tp_worker.model_runner
    forward = runner.forward

    def watching(batch: Any, *args: Any, **kwargs: Any) -> Any:
        is_mixed = batch.forward_mode.is_mixed()  # SGLang changes the mode on the way
        is_mixed = is_mixed and (not s.is_ours or hasattr(batch, "chunk_cache_forward"))
        output = forward(batch, *args, **kwargs)
        look(batch, is_mixed, output)
        return output

    runner.forward = watching
    try:
        yield
    finally:
        del runner.forward


def _compare_logits(s: Session, found: dict[str, list[list[float]]], rids: list[str]) -> None:
    """Puts what a forward said of the tokens of a reply where log-probabilities are compared."""
    for reply in s.replies:
        if reply.rid not in rids:
            continue
        rows, num_tokens = found[reply.rid], len(reply.output_ids)
        choices = [max(range(len(row)), key=row.__getitem__) for row in rows]
        begin = max(i for i in range(len(rows)) if choices[i : i + num_tokens] == reply.output_ids)
        reply.logprobs = [max(row) for row in rows[begin : begin + num_tokens]]


def case_discovered(s: Session) -> None:
    """Prompts that nobody marked, of passages that come again; one of them is marked once, one cut into two."""
    passages = s.chunks(130, 170, 200, 150)
    orders = [[0, 1, 2], [2, 0, 1], [1, 3, 0], [3, 2, 1], [0, 3, 1], [2, 1, 0]]
    for i, order in enumerate(orders):
        prompt = Prompt().text([*s.system, *s.tokens(12)])
        for one in order:
            prompt.text([5, 6]).text(passages[one])
        s.send(prompt.text(s.tokens(20)), marked=False)
        if i == 2:
            s.send(s.prompt([passages[3]], question=3))
    (reply,) = s.send(Prompt().text(s.system).text(passages[1][:60]).text(s.tokens(30)), marked=False)
    if s.is_ours:
        assert reply.info is None, "a few sentences are no passage"
        hits = [s.statuses(reply).count("hit") for reply in s.replies if reply.info and reply.info.get("discovered")]
        assert sum(hits) >= 6, hits
        assert max(hits) == 3, hits
    plain = [Prompt().text([*s.system, *passages[2], *s.tokens(9)]), Prompt().text([*s.system, *passages[0]])]
    s.send(*plain, *(s.prompt([passages[i]]) for i in (1, 3)), marked=False)


def case_mixed_batches(s: Session) -> None:
    """Prompts with chunks are computed in batches in which others decode."""
    chunks = s.chunks(40, 33, 51, 150)
    s.prime(chunks)
    early = [s.prompt([chunks[1]]), Prompt().text(s.tokens(30)), s.prompt([chunks[2], chunks[0]])]
    late = [[s.prompt([chunks[i] for i in order])] for order in ([2, 0], [3, 1, 0], [1, 3], [0, 2, 1])]
    late[2].append(Prompt().text(s.tokens(90)))
    late[3].append(s.prompt([s.tokens(35), chunks[0]]))
    fields = {"logprobs": False, "max_new_tokens": 40}
    batches = {0: [s.request(prompt, **fields) for prompt in early]}
    batches |= {4 + 7 * i: [s.request(prompt, **fields) for prompt in prompts] for i, prompts in enumerate(late)}
    found: dict[str, list[list[float]]] = defaultdict(list)
    num_mixed = 0

    def look(batch: Any, is_mixed: bool, output: Any) -> None:
        nonlocal num_mixed
        num_mixed += is_mixed
        logits = output.logits_output.next_token_logits
        for rid, row in zip(batch.rids, logits.float().log_softmax(-1).tolist(), strict=True):
            found[rid].append(row)

    def on_step(step: int) -> list[Any] | None:
        return None if step > max(batches) else [s.local.prepare(one) for one in batches.get(step, ())]

    with _watched(s, look):
        replies = s.local.run(on_step)
    s.replies += replies
    assert num_mixed >= len(late), num_mixed
    _compare_logits(s, found, [reply.rid for reply in replies])
    for options in LAYERWISE if s.is_ours else ():
        decoding = s.request(early[0], **fields)
        asking = s.request(late[0][0], ratio=0.4, options=options, **fields)
        batches, num_before = {0: [decoding], 6: [asking]}, num_mixed
        with _watched(s, look):
            s.local.run(on_step)
        assert num_mixed > num_before


def case_hidden_states(s: Session) -> None:
    """Of the prompt behind its last reused chunk, and of every token that was generated."""
    chunks = s.chunks(40, 33, 51, 150)
    s.prime(chunks)
    question = s.tokens(9)
    for order in ([2, 0], [3, 1, 0], [1, 3, 2]):
        prompt, of_prompt = s.prompt([chunks[i] for i in order], question=question), []
        plain = Prompt().text(s.tokens(25))
        for mode in (True, "last"):
            replies = s.local.generate(
                [
                    s.request(plain, hidden_states=mode),
                    s.request(prompt, hidden_states=mode),
                    s.request(s.prompt([chunks[1], chunks[0]], question=4)),
                ]
            )
            assert all(bool(reply.hidden_states) is (reply is not replies[2]) for reply in replies)
            if mode is True:
                of_prompt = replies[1].hidden_states[0]
                assert len(of_prompt) >= len(question)
                replies[1].hidden_states[0] = of_prompt[-len(question) :]
            s.replies += replies
        for options in LAYERWISE if s.is_ours else ():
            (reply,) = s.local.generate([s.request(prompt, ratio=0.4, options=options, hidden_states=True)])
            assert len(reply.hidden_states[0]) == len(of_prompt)


def case_adapters(s: Session) -> None:
    """Requests of two adapters and of none in one batch; each has chunks of its own."""
    chunks = s.chunks(40, 33, 51, 90)
    adapters = (0, 1, None)
    for adapter in adapters:
        for chunk in chunks:
            s.send(s.prompt([chunk], question=3), adapter=adapter, max_new_tokens=1)
    for order in ([2, 0], [3, 1, 0], [1, 3, 2, 0]):
        prompt = s.prompt([chunks[i] for i in order])
        replies = s.local.generate([s.request(prompt, adapter=adapter) for adapter in adapters])
        s.replies += replies
        for reply in replies:
            s.assert_all_stored(reply)
        assert len({tuple(reply.output_ids) for reply in replies}) == len(adapters)
        _while_another_decodes(s, s.prompt([chunks[i] for i in reversed(order)]))
    s.send(s.prompt([s.tokens(30), chunks[0]]), adapter=0)
    if not s.is_ours:
        return
    for first in LAYERWISE:
        batch = [
            (s.prompt([chunks[i] for i in order]), {"adapter": adapter, "ratio": 0.4, "options": options})
            for order, adapter, options in zip(
                ([2, 0], [3, 1, 0], [1, 2, 3]), adapters, (first, {"method": "fusionrag"}, first), strict=True
            )
        ]
        together = s.local.generate([s.request(prompt, **fields) for prompt, fields in batch])
        for (prompt, fields), reply in zip(batch, together, strict=True):
            (alone,) = s.local.generate([s.request(prompt, **fields)])
            assert 0 < reply.info["recomputed_tokens"] < reply.info["reused_tokens"]
            assert max(abs(a - b) for a, b in zip(reply.logprobs, alone.logprobs, strict=True)) < 1e-3


def _while_another_decodes(s: Session, prompt: Prompt) -> None:
    """A prompt of one adapter, perhaps of more rows than a step has, arrives while the other's decodes."""
    fields = {"logprobs": False, "max_new_tokens": 20}
    decoding = s.request(Prompt().text(s.tokens(8)), adapter=0, **fields)
    arriving = s.request(prompt, adapter=1, **fields)
    batches = {0: [decoding], 5: [arriving]}
    s.replies += s.local.run(lambda step: None if step > 5 else [s.local.prepare(one) for one in batches.get(step, ())])


def case_adapter_loaded_again(s: Session) -> None:
    """Other weights are loaded under an adapter's name: what the old ones left is found by nobody."""
    from sglang.srt.lora.lora_registry import LoRARef
    from sglang.srt.managers.io_struct import LoadLoRAAdapterReqInput, UnloadLoRAAdapterReqInput

    chunks = s.chunks(40, 33)
    s.send(s.prompt(chunks), adapter=0)
    (stored,) = s.send(s.prompt(chunks[::-1]), adapter=0)
    s.assert_all_stored(stored)
    old, other, scheduler = s.local.adapters[0], s.local.adapters[1], s.local.scheduler
    # As SGLang's TokenizerManager asks, which gives every load an id of its own.
    new = LoRARef(lora_name=old.lora_name, lora_path=other.lora_path)
    ids = {"lora_name": old.lora_name, "lora_id": old.lora_id}
    assert scheduler.unload_lora_adapter(UnloadLoRAAdapterReqInput(**ids)).success
    ids = {"lora_name": new.lora_name, "lora_id": new.lora_id, "lora_path": new.lora_path}
    assert scheduler.load_lora_adapter(LoadLoRAAdapterReqInput(**ids)).success
    s.local.adapters = [new, other]
    (changed,) = s.send(s.prompt(chunks[::-1], question=5), adapter=0)
    assert changed.cached_tokens == 0
    assert "hit" not in s.statuses(changed)
    (again,) = s.send(s.prompt(chunks), adapter=0)
    s.assert_all_stored(again)


def case_sessions(s: Session) -> None:
    """Turns that mark chunks, and keep those of the turns in front of them."""
    from sglang.srt.managers.io_struct import OpenSessionReqInput

    a, b, c, d = s.chunks(40, 33, 51, 38)
    for chunk in (a, b, c, d):
        s.send(s.prompt([chunk], question=20), max_new_tokens=1)
    controller = s.local.scheduler.session_controller
    controller.open(OpenSessionReqInput(capacity_of_str_len=10_000, session_id="s"))

    def turn(prompt: Prompt, num_chunks: int, *, num_missed: int = 0, marked: bool = True, **params: Any) -> str:
        session = {"id": "s", "rid": None, "offset": None, "replace": None, "drop_previous_output": None, **params}
        (reply,) = s.local.generate([s.request(prompt, marked=marked, session=session, max_new_tokens=6)])
        s.replies.append(reply)
        statuses = s.statuses(reply)
        assert not s.is_ours or (len(statuses), statuses.count("miss")) == (num_chunks, num_missed), statuses
        return reply.rid

    def more(*chunks: list[int]) -> Prompt:
        prompt = Prompt().text(s.tokens(3))
        for chunk in chunks:
            prompt.chunk(chunk)
        return prompt.text(s.tokens(5))

    first = turn(s.prompt([b, a]), 2)
    second = turn(more(d), 3, rid=first)
    turn(more(), 3, rid=second, marked=False)
    turn(more(c, a), 5, rid=second, drop_previous_output=True)
    turn(more(s.tokens(30), c), 3, num_missed=1, rid=second, offset=20 + len(b) + 10)
    turn(more(c), 2, rid=second, offset=20 + len(b) + 5, replace=True)
    del controller.sessions["s"]


CASES: dict[str, Callable[[Session], None]] = {
    name.removeprefix("case_"): function for name, function in list(globals().items()) if name.startswith("case_")
}
