"""Session: asks one server, and makes sure that what comes back is what was asked for.

- `ask_reference` asks for full prefills by stock SGLang, in a cache of their own.
- `prime` stores the chunks of some prompts; `ask` then asks these prompts under all conditions.
- `blocks` cuts prompts into groups whose chunks the KV pool holds at once.

    flush | off, off, off ... | flush | [system, chunk] ... | condition 1: all prompts | condition 2 ... | flush | ...
            ask_reference               prime                 ask                        ask

A reference prompt enters the exact cache, where the same prompt would later find all of itself; so references come
first and the cache is emptied behind them. Fused prompts leave nothing behind. Every reply must say that each chunk
was taken from the store (`hit`), or lay in the exact prefix (`prefix`); anything else is a `SetupError`, because the
numbers would not mean what they are said to.

What `prime` stores decides what Cache-Craft's alpha means, for CFO compares the context of a chunk with the one it had
when it was stored:

    ALONE      [system, chunk] once per chunk; without a context CFO = alpha / 2 for all of them
    SHUFFLED   [system, all chunks of the prompt in another order] once per prompt, computed exactly
    PREPARED   [system, neighbours, chunk] once per chunk, neighbours as ALONE (FusionRAG's preparation); the server
               needs "prefer_prepared", and each hit must say that it is such a one
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from benchmark.common.server import Server
from benchmark.quality.conditions import REFERENCE, Condition
from benchmark.quality.neighbourhood import Neighbours
from benchmark.quality.prompts import Prompt
from benchmark.quality.replies import Forced, Reply

from sglang_chunk_cache.verify.measure import first_token_kl

NUM_CALLS = 2  # HTTP calls at a time: while the server answers one, it tokenizes the next
MAX_BATCH = 64  # prompts in one call
# Shares of the KV pool: what is primed at once, and what runs at once. Together with what a scheduler keeps free for
# decoding they stay below one, so nothing that was primed is evicted.
PRIMED_SHARE, RUNNING_SHARE = 0.5, 0.25
MIN_LOGPROB = -1e4  # stands for a probability of zero
ALONE, SHUFFLED, PREPARED = "alone", "shuffled", "prepared"
STORED = (ALONE, SHUFFLED)
"""What a user may choose; PREPARED is for `preparation.py`."""
MAX_WARMED = 256  # chunks in one call, whose neighbours must fit into it too
PREPARED_BATCH = 2  # at a time: each brings all its neighbours into the pool

Ask: TypeAlias = tuple[Prompt, Condition]
Extra: TypeAlias = Mapping[str, Any]


class SetupError(RuntimeError):
    """A reply was not computed the way the experiment says."""


@dataclass(frozen=True)
class Asking:
    """How all prompts of a task are asked, greedily.

    Attributes:
        max_new_tokens: an answer ends there at the latest.
        stop: strings that end an answer; the end-of-sequence token always does.
        num_top: tokens of the reference's first distribution that are compared.
        likelihood: also ask how likely the right answer and the reference's own are, token by token.
    """

    max_new_tokens: int
    stop: tuple[str, ...] = ()
    num_top: int = 20
    likelihood: bool = False


class Session:
    """Asks one server. Not for several threads."""

    def __init__(
        self, server: Server, asking: Asking, stored: str = ALONE, neighbours: Neighbours | None = None
    ) -> None:
        """`stored` is one of `STORED`, or PREPARED, for which `neighbours` are given."""
        assert (stored == PREPARED) == (neighbours is not None), f"chunks are stored {stored}"
        self._server = server
        self._neighbours = neighbours
        self._asking = asking
        self._stored = stored
        self._pool_len = int(server.get("/v1/loads").json()["loads"][0]["max_total_num_tokens"])
        # The last page of a path is stored only when it is full, so a chunk must not end there.
        page_size = int(server.get("/server_info").json()["page_size"])
        self._priming_tail = " x" * page_size if page_size > 1 else ""

    def ask_reference(self, prompts: Sequence[Prompt]) -> Iterator[list[Reply]]:
        """Full prefills of stock SGLang, some replies at a time; the caches are empty before and after."""
        self._server.flush()
        for asks, outs in self._post([(prompt, REFERENCE) for prompt in prompts], self._ask_for_top):
            replies = [_reference_reply(prompt, out) for (prompt, _), out in zip(asks, outs, strict=True)]
            yield self._with_likelihood(asks, replies, replies)
        self._server.flush()

    def blocks(self, prompts: Sequence[Prompt], lengths: Mapping[str, int]) -> Iterator[list[Prompt]]:
        """Groups of consecutive prompts that fit into the pool.

        Args:
            lengths: tokens of each prompt, by its key.

        Raises:
            SetupError: one prompt alone does not fit.
        """
        room = int(PRIMED_SHARE * self._pool_len)
        block: list[Prompt] = []
        block_len = 0
        for prompt in prompts:
            length = lengths[prompt.key]
            if length > min(room, int(RUNNING_SHARE * self._pool_len)):
                raise SetupError(
                    f"A prompt of {length} tokens is too long for a KV pool of {self._pool_len}; give the server more "
                    f"with --server-flags='--max-total-tokens {length * 5}'."
                )
            if block and block_len + length > room:
                yield block
                block, block_len = [], 0
            block.append(prompt)
            block_len += length
        if block:
            yield block

    def prime(self, prompts: Sequence[Prompt]) -> None:
        """Empties the caches and stores every chunk of these prompts."""
        self._server.flush()
        if self._neighbours is not None:
            self._prepare(prompts, self._neighbours)
            return
        tail = self._priming_tail
        if self._stored == SHUFFLED:
            texts = [(prompt.shuffled(tail), prompt.partition) for prompt in prompts]
            size = self._batch_size([(prompt, REFERENCE) for prompt in prompts])
        else:
            wanted = dict.fromkeys((text, prompt.partition) for prompt in prompts for text in prompt.priming(tail))
            texts, size = list(wanted), MAX_BATCH
        batches = [texts[i : i + size] for i in range(0, len(texts), size)]
        with ThreadPoolExecutor(NUM_CALLS) as calls:
            for _ in calls.map(self._prime_batch, batches):
                pass

    def ask(self, asks: Sequence[Ask], references: Mapping[str, Reply]) -> Iterator[list[Reply]]:
        """Asks primed prompts, each under its condition, some replies at a time.

        Args:
            references: reply of `ask_reference` by the prompt's key.

        Raises:
            SetupError: a chunk was not reused, or another method or ratio was used.
        """

        def ask_for_ids(prompt: Prompt) -> Extra:
            return {"token_ids_logprob": [token for token, _ in references[prompt.key].top]}

        for batch, outs in self._post(asks, ask_for_ids):
            own = [references[prompt.key] for prompt, _ in batch]
            if self._neighbours is not None:
                for (prompt, _), out in zip(batch, outs, strict=True):
                    _check_prepared(prompt, out["meta_info"]["chunk_cache"], self._neighbours)
            replies = [
                _reply(prompt, out, condition, reference)
                for (prompt, condition), out, reference in zip(batch, outs, own, strict=True)
            ]
            yield self._with_likelihood(batch, replies, own)

    def _with_likelihood(
        self, asks: Sequence[Ask], replies: Sequence[Reply], references: Sequence[Reply]
    ) -> list[Reply]:
        """The replies, with the likelihood of the right answer and the reference's own where it is asked for."""
        if not self._asking.likelihood:
            return list(replies)
        answers = [
            (i, name, answer)
            for i, ((prompt, _), reference) in enumerate(zip(asks, references, strict=True))
            for name, answer in (("gold", prompt.answer), ("own", reference.text))
            if answer
        ]
        forced: list[dict[str, Forced]] = [{} for _ in asks]
        size = self._batch_size(asks)
        for first in range(0, len(answers), size):
            batch = answers[first : first + size]
            outs = self._call_forced([(asks[i], references[i], name, answer) for i, name, answer in batch])
            for (i, name, _), out in zip(batch, outs, strict=True):
                forced[i][name] = _forced(out, references[i].prompt_len)
        return [replace(reply, **answers) for reply, answers in zip(replies, forced, strict=True)]

    def _call_forced(self, asked: Sequence[tuple[Ask, Reply, str, str]]) -> list[dict[str, Any]]:
        params = []
        for (_, condition), reference, name, _ in asked:
            known: Forced | None = getattr(reference, name)  # none of the reference itself, which looks at no question
            tokens = {} if known is None else {"answer_tokens": known.num_tokens}
            params.append(self._sampling_params(condition.request | tokens, max_new_tokens=1))
        return self._send(
            [ask for ask, *_ in asked],
            [prompt.text + answer for (prompt, _), _, _, answer in asked],
            params,
            # The entry of the token at the start is empty: what it is preceded by is not looked at.
            logprob_start_len=[reference.prompt_len - 1 for _, reference, _, _ in asked],
        )

    def _prepare(self, prompts: Sequence[Prompt], neighbours: Neighbours) -> None:
        heads = {prompt.partition: prompt.head for prompt in prompts}
        for partition, head in heads.items():
            chunks = list(dict.fromkeys(chunk for p in prompts if p.partition == partition for chunk in p.chunks))
            for first in range(0, len(chunks), MAX_WARMED):
                some = chunks[first : first + MAX_WARMED]
                texts = list(dict.fromkeys((*some, *(near for one in some for near in neighbours[partition][one]))))
                places = {text: place for place, text in enumerate(texts)}
                body = {
                    "texts": texts,
                    "neighbours": [[places[near] for near in neighbours[partition][one]] for one in some],
                    "prefix_text": head,
                    "extra_key": partition,
                    "batch": PREPARED_BATCH,
                }
                summary = json.loads(list(self._server.client.lines("/chunk_cache/warm", body))[-1])
                if summary["failed"]:
                    raise SetupError(f"A chunk was not prepared: {summary['failed'][0]['error']}.")

    def _prime_batch(self, batch: Sequence[tuple[str, str]]) -> None:
        params: dict[str, Any] = {"max_new_tokens": 0, "temperature": 0.0}
        if self._stored == SHUFFLED:
            # Nothing stored is brought in, so every variant is that of a full prefill in its context.
            params["custom_params"] = {"chunk_cache": {"mode": "exact"}}
        body = {
            "text": [text for text, _ in batch],
            "extra_key": [partition for _, partition in batch],
            "sampling_params": params,
        }
        self._server.post("/generate", body)

    def _ask_for_top(self, prompt: Prompt) -> Extra:
        return {"top_logprobs_num": self._asking.num_top}

    def _post(
        self, asks: Sequence[Ask], extra: Callable[[Prompt], Extra]
    ) -> Iterator[tuple[Sequence[Ask], list[dict[str, Any]]]]:
        """(what was asked, outputs) of one call after the other; `extra` are further fields of a prompt's request."""
        size = self._batch_size(asks)
        calls = ThreadPoolExecutor(NUM_CALLS)
        pending: deque[tuple[Sequence[Ask], Future[list[dict[str, Any]]]]] = deque()
        try:
            for start in range(0, len(asks), size):
                batch = asks[start : start + size]
                pending.append((batch, calls.submit(self._call, batch, extra)))
                if len(pending) > NUM_CALLS:
                    done, future = pending.popleft()
                    yield done, future.result()
            while pending:
                done, future = pending.popleft()
                yield done, future.result()
        finally:
            calls.shutdown(cancel_futures=True)

    def _call(self, asks: Sequence[Ask], extra: Callable[[Prompt], Extra]) -> list[dict[str, Any]]:
        extras = [extra(prompt) for prompt, _ in asks]
        params = [self._sampling_params(condition.request, self._asking.max_new_tokens) for _, condition in asks]
        fields = {name: [each[name] for each in extras] for name in extras[0]}
        return self._send(asks, [prompt.text for prompt, _ in asks], params, **fields)

    def _send(
        self, asks: Sequence[Ask], texts: list[str], params: list[dict[str, Any]], **fields: list[Any]
    ) -> list[dict[str, Any]]:
        body = {
            "text": texts,
            "extra_key": [prompt.partition for prompt, _ in asks],
            "sampling_params": params,
            "return_logprob": True,
            **fields,
        }
        return self._server.post("/generate", body).json()

    def _sampling_params(self, request: Extra, max_new_tokens: int) -> dict[str, Any]:
        return {
            "temperature": 0.0,
            "max_new_tokens": max_new_tokens,
            "stop": list(self._asking.stop),
            "custom_params": {"chunk_cache": request},
        }

    def _batch_size(self, asks: Sequence[Ask]) -> int:
        # A token is seldom shorter than a character: good enough, as a wrong guess only costs speed.
        longest = max((len(prompt.text) for prompt, _ in asks), default=1)
        return max(1, min(MAX_BATCH, int(RUNNING_SHARE * self._pool_len / NUM_CALLS / longest)))


def _reference_reply(prompt: Prompt, out: Mapping[str, Any]) -> Reply:
    meta = out["meta_info"]
    if meta["chunk_cache"]["reused_tokens"]:
        raise SetupError(f"The reference of prompt {prompt.key} reused chunks; this is a bug.")
    top = tuple((token, _finite(logprob)) for logprob, token, _ in meta["output_top_logprobs"][0])
    return Reply(**_common(prompt, REFERENCE, out), kl=None, top=top)


def _reply(prompt: Prompt, out: Mapping[str, Any], condition: Condition, reference: Reply) -> Reply:
    meta = out["meta_info"]
    _check_reuse(prompt, meta["chunk_cache"], condition)
    found = {token: _finite(logprob) for logprob, token, _ in meta["output_token_ids_logprobs"][0]}
    kl = first_token_kl([p for _, p in reference.top], [found[token] for token, _ in reference.top])
    return Reply(**_common(prompt, condition, out), kl=kl)


def _check_prepared(prompt: Prompt, chunk_cache: Mapping[str, Any], neighbours: Neighbours) -> None:
    near = neighbours[prompt.partition]
    for number, (text, chunk) in enumerate(zip(prompt.chunks, chunk_cache["chunks"], strict=True), 1):
        if chunk["status"] == "hit" and near[text] and not chunk.get("prepared"):
            raise SetupError(
                f"Chunk {number} of prompt {prompt.key} was not used as prepared; give the server a larger "
                "--max-total-tokens in --server-flags."
            )


def _forced(out: Mapping[str, Any], prompt_len: int) -> Forced:
    logprobs = [_finite(logprob) for logprob, _, _ in out["meta_info"]["input_token_logprobs"][1:]]
    num_tokens = out["meta_info"]["prompt_tokens"] - prompt_len
    if len(logprobs) != num_tokens:
        raise SetupError(
            f"{num_tokens} tokens of an answer were sent, and {len(logprobs)} log-probabilities came back."
        )
    return Forced(num_tokens, sum(logprobs) / num_tokens)


def _common(prompt: Prompt, condition: Condition, out: Mapping[str, Any]) -> dict[str, Any]:
    chunk_cache, meta = out["meta_info"]["chunk_cache"], out["meta_info"]
    return {
        "prompt": prompt.key,
        "method": condition.label,
        "ratio": condition.ratio,
        "text": out["text"],
        "first_id": meta["output_token_logprobs"][0][1],
        "prompt_len": meta["prompt_tokens"],
        "reused_len": chunk_cache["reused_tokens"],
        "recomputed_len": chunk_cache["recomputed_tokens"],
    }


def _check_reuse(prompt: Prompt, chunk_cache: Mapping[str, Any], condition: Condition) -> None:
    assert condition.method is not None
    method, ratio = chunk_cache["method"], chunk_cache["ratio"]
    if method != condition.method.method or condition.ratio not in (None, ratio):
        raise SetupError(
            f"Prompt {prompt.key} was asked with {condition.request} and answered with {method}, ratio {ratio} "
            f"({chunk_cache['fallback_reason']}); where the selector was late, give it a longer timeout_s."
        )
    label = condition.label if condition.ratio is None else f"{condition.label}, ratio {condition.ratio:g}"
    if condition.ratio is None:
        is_ranked = 0 < chunk_cache["recomputed_tokens"] < chunk_cache["reused_tokens"]
    else:
        is_ranked = 0 < condition.ratio < 1
    for number, chunk in enumerate(chunk_cache["chunks"], 1):
        if chunk["status"] not in ("hit", "prefix"):
            raise SetupError(
                f"Chunk {number} of prompt {prompt.key} was not reused but {chunk['status']} ({chunk['reason']}) with "
                f"{label}; where it says evicted or memory, give the server a larger --max-total-tokens in "
                "--server-flags."
            )
        if condition.ratio is None and chunk["status"] == "hit" and chunk.get("cfo") is None:
            raise SetupError(
                f"The CFO of chunk {number} of prompt {prompt.key} is unknown, so {condition.label} would fall back to "
                "the server's ratio; let the server take statistics, see docs/methods.md."
            )
        if is_ranked and chunk.get("ranked_by") == "position":
            raise SetupError(
                f"No statistics were stored with chunk {number} of prompt {prompt.key}, so {condition.label} would "
                "rank by position; let the server take them, see docs/methods.md."
            )


def _finite(logprob: float | None) -> float:
    return MIN_LOGPROB if logprob is None else max(logprob, MIN_LOGPROB)
