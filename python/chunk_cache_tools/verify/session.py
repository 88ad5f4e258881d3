"""Session: asks one server, and checks that each reply was computed as asked for.

- `ask_reference` asks for full prefills by stock SGLang, in a partition of their own.
- `prime` stores the chunks of some prompts; `ask` then asks these prompts under all conditions.
- `blocks` cuts prompts into groups whose chunks the KV pool can hold at once.

Of a server with several replicas, each with chunks of its own, one is asked.

    flush | off, off, off ... | flush | [system, chunk] ... | condition 1: all prompts | condition 2 ... | flush | ...
            ask_reference               prime                 ask                        ask

A reference prompt enters the exact cache, where the same prompt would later find all of itself; so references come
first, and the cache is emptied after them. On a server that others use too (`salt`) nothing is emptied: references lie
in partitions of their own, and the oldest KV is evicted first. Fused prompts leave nothing behind. Every reply must
say that each chunk was taken from the store (`hit`) or lay in the exact prefix (`prefix`); anything else raises a
`SetupError`, because the numbers would not mean what they claim to.

What `prime` stores decides what Cache-Craft's alpha means, because CFO compares the context of a chunk with the context
that it had when it was stored:

    WARMED     [system, filler, chunk] once per chunk, as `chunk-cache warm` stores it
    PREPARED   [system, similar chunks of these prompts, chunk] once per chunk, as `chunk-cache warm --neighbours` does
    ALONE      [system, chunk] once per chunk; without a context CFO = alpha for all of them
    SHUFFLED   [system, all chunks of the prompt in another order] once per prompt, computed exactly
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeAlias

from chunk_cache.prompt.filler import FILLER
from chunk_cache.types import Span
from chunk_cache_tools.conditions import REFERENCE, Condition
from chunk_cache_tools.server_client import ServerClient, one_replica
from chunk_cache_tools.verify.distance import first_token_kl
from chunk_cache_tools.verify.reply_log import Forced, Reply
from chunk_cache_tools.warm.warm_server import warming

NUM_CALLS = 2  # HTTP calls at a time: the server tokenizes one while it answers the other
MAX_BATCH = 64  # prompts in one call
# Shares of the KV pool for chunks primed at once, and for prompts that run at once. Together with the slots that a
# scheduler keeps free for decoding they stay below one, so no primed chunk is evicted.
PRIMED_SHARE, RUNNING_SHARE = 0.5, 0.25
MIN_LOGPROB = -1e4  # stands for a probability of zero
WARMED, PREPARED, ALONE, SHUFFLED = "warmed", "prepared", "alone", "shuffled"
STORED = (WARMED, PREPARED, ALONE, SHUFFLED)
NUM_NEIGHBOURS = 10  # of a prepared chunk, as FusionRAG recommends (figure 17)


@dataclass(frozen=True)
class Body:
    """A prompt as it is sent: a text with separators, or token ids with the spans of their chunks."""

    content: str | tuple[int, ...]
    spans: tuple[Span, ...] = ()


class Prompt(Protocol):
    """A marked prompt as the session needs it."""

    @property
    def key(self) -> str:
        """Name of the prompt in a reply log."""

    @property
    def partition(self) -> str:
        """`extra_key` of the requests, one per head: chunks are reused only behind the head they were stored with."""

    @property
    def head(self) -> Any:
        """What stands in front of the first chunk, text or token ids."""

    @property
    def chunks(self) -> Sequence[Any]:
        """The chunks, text or token ids."""

    @property
    def body(self) -> Body:
        """The whole prompt."""

    def front(self, filler: Any) -> Body:
        """The head and the filler, with which all prompts of `priming` begin."""

    def priming(self, page_size: int, filler: Any = None) -> Sequence[Body]:
        """One prompt per different chunk: the head, the chunk, and with pages something behind it.

        Args:
            filler: stands between head and chunk, marked as a chunk; text or token ids, as `body`.
        """

    def shuffled(self, page_size: int) -> Body:
        """The head and the different chunks in another order, which is the same at every call."""

    def answered(self, reference: Reply) -> Mapping[str, Body]:
        """The prompt with an answer behind it: `gold` the right one, `own` the reference's; no empty answers."""


Ask: TypeAlias = tuple[Prompt, Condition]
Extra: TypeAlias = Mapping[str, Any]


class SetupError(RuntimeError):
    """A reply was not computed as the experiment assumes."""


@dataclass(frozen=True)
class Asking:
    """How all prompts of a task are asked, greedily.

    Attributes:
        max_new_tokens: most tokens of an answer.
        stop: strings that end an answer; the end-of-sequence token always ends it.
        num_top: number of likeliest tokens of the reference's first distribution that are compared.
        likelihood: also ask how likely the right answer and the reference's own are, token by token.
        first_only: generate only the reference's whole answer, and one token under other conditions.
        tolerated: reasons for which a chunk may be computed instead of reused, as it would be for a user.
    """

    max_new_tokens: int
    stop: tuple[str, ...] = ()
    num_top: int = 20
    likelihood: bool = False
    first_only: bool = False
    tolerated: tuple[str, ...] = ()


class Session:
    """Asks one server. Not for several threads."""

    def __init__(self, client: ServerClient, asking: Asking, stored: str = WARMED, salt: str = "") -> None:
        """
        Args:
            stored: one of `STORED`.
            salt: keeps this session apart from everything else on the server, whose caches are then never flushed;
                every run needs another salt. Empty = the server belongs to this session.
        """
        self._client = client
        self._asking = asking
        self._stored = stored
        self._salt = salt
        self._pool_len = int(client.ask("GET", "/v1/loads", has=("loads",))["loads"][0]["max_total_num_tokens"])
        info = client.ask("GET", "/server_info", has=("page_size",))
        self._page_size, self._replica = int(info["page_size"]), one_replica(info)

    def ask_reference(self, prompts: Sequence[Prompt]) -> Iterator[list[Reply]]:
        """Asks for full prefills of stock SGLang; gives some replies at a time.

        Without a salt, flushes the caches before and after.
        """
        self._flush()
        for asks, outs in self._post([(prompt, REFERENCE) for prompt in prompts], self._ask_for_top):
            replies = [_reference_reply(prompt, out) for (prompt, _), out in zip(asks, outs, strict=True)]
            yield self._with_likelihood(asks, replies, replies)
        self._flush()

    def blocks(self, prompts: Sequence[Prompt], lengths: Mapping[str, int]) -> Iterator[list[Prompt]]:
        """Groups of consecutive prompts that fit into the KV pool.

        Args:
            lengths: number of tokens of each prompt, by its key.

        Raises:
            SetupError: a single prompt does not fit.
        """
        room = int(PRIMED_SHARE * self._pool_len)
        block: list[Prompt] = []
        block_len = 0
        for prompt in prompts:
            length = lengths[prompt.key]
            if length > min(room, int(RUNNING_SHARE * self._pool_len)):
                raise SetupError(
                    f"A prompt of {length} tokens is too long for a KV pool of {self._pool_len}; give the server more "
                    f"with --max-total-tokens {length * 5}."
                )
            if block and block_len + length > room:
                yield block
                block, block_len = [], 0
            block.append(prompt)
            block_len += length
        if block:
            yield block

    def prime(self, prompts: Sequence[Prompt]) -> None:
        """Flushes the caches (only without a salt) and stores every chunk of these prompts."""
        self._flush()
        if self._stored == PREPARED:
            for partition in dict.fromkeys(prompt.partition for prompt in prompts):
                self._prepare([prompt for prompt in prompts if prompt.partition == partition])
            return
        if self._stored == SHUFFLED:
            bodies = [(prompt.shuffled(self._page_size), prompt.partition) for prompt in prompts]
            size = self._batch_size([prompt.body for prompt in prompts])
        else:
            page_size, filler = self._page_size, self._filler_for(prompts)
            if filler is not None:  # prompts that warm leave no path in the tree; this one is their exact prefix
                fronts = dict.fromkeys((p.front(filler), p.partition) for p in prompts)
                self._prime_all(list(fronts), {"mode": "off"}, MAX_BATCH)
            wanted = dict.fromkeys((b, p.partition) for p in prompts for b in p.priming(page_size, filler))
            bodies, size = list(wanted), MAX_BATCH
        # With "exact" no stored chunk is reused, so every variant comes from a full prefill of its context.
        self._prime_all(bodies, {SHUFFLED: {"mode": "exact"}, WARMED: {"mode": "warm"}}.get(self._stored, {}), size)

    def _prime_all(self, bodies: Sequence[tuple[Body, str]], mode: dict[str, str], size: int) -> None:
        def prime(batch: Sequence[tuple[Body, str]]) -> None:
            params = [{"max_new_tokens": 0, "temperature": 0.0, **custom_params(mode, body)} for body, _ in batch]
            keys = [self._salt + partition for _, partition in batch]
            content = content_of([body for body, _ in batch])
            body = {**content, "extra_key": keys, "sampling_params": params, **self._replica}
            self._client.send("POST", "/generate", body)

        batches = [bodies[i : i + size] for i in range(0, len(bodies), size)]
        with ThreadPoolExecutor(NUM_CALLS) as calls:
            for _ in calls.map(prime, batches):
                pass

    def _prepare(self, prompts: Sequence[Prompt]) -> None:
        """Stores the chunks of prompts of one head, each behind its most similar ones."""
        chunks = list(dict.fromkeys(chunk for prompt in prompts for chunk in prompt.chunks))
        head, partition = prompts[0].head, self._salt + prompts[0].partition
        of_chunks, of_head = ("texts", "prefix_text") if isinstance(head, str) else ("input_ids", "prefix_ids")
        body = {of_chunks: chunks, "neighbours": NUM_NEIGHBOURS, "extra_key": partition}
        if head:
            body[of_head] = head
        *_, summary = warming(self._client, body)
        if summary["present"] < len(chunks):
            raise SetupError(f"Only {summary['present']} of {len(chunks)} chunks could be prepared: {summary}")

    def _filler_for(self, prompts: Sequence[Prompt]) -> str | tuple[int, ...] | None:
        if self._stored != WARMED or not prompts:
            return None
        if isinstance(prompts[0].body.content, str):
            return FILLER
        body = {"prompt": FILLER, "add_special_tokens": False}
        return tuple(self._client.send("POST", "/tokenize", body).json()["tokens"])

    def ask(self, asks: Sequence[Ask], references: Mapping[str, Reply]) -> Iterator[list[Reply]]:
        """Asks primed prompts, each under its condition; gives some replies at a time.

        Args:
            references: replies of `ask_reference`, by the prompt's key.

        Raises:
            SetupError: a chunk was not reused, or another method or ratio was used.
        """

        def ask_for_ids(prompt: Prompt) -> Extra:
            return {"token_ids_logprob": [token for token, _ in references[prompt.key].top]}

        for batch, outs in self._post(asks, ask_for_ids):
            own = [references[prompt.key] for prompt, _ in batch]
            replies = [
                _reply(prompt, out, condition, reference, self._asking.tolerated)
                for (prompt, condition), out, reference in zip(batch, outs, own, strict=True)
            ]
            yield self._with_likelihood(batch, replies, own)

    def _with_likelihood(
        self, asks: Sequence[Ask], replies: Sequence[Reply], references: Sequence[Reply]
    ) -> list[Reply]:
        """The replies, with the likelihoods of the right answer and the reference's own if they are asked for."""
        if not self._asking.likelihood:
            return list(replies)
        answers = [
            (i, name, body)
            for i, ((prompt, _), reference) in enumerate(zip(asks, references, strict=True))
            for name, body in prompt.answered(reference).items()
        ]
        forced: list[dict[str, Any]] = [{} for _ in asks]  # a `Forced` of each answer
        size = self._batch_size([body for *_, body in answers])
        for first in range(0, len(answers), size):
            batch = answers[first : first + size]
            outs = self._call_forced([(asks[i], references[i], name, body) for i, name, body in batch])
            for (i, name, _), out in zip(batch, outs, strict=True):
                forced[i][name] = _forced(out, references[i].prompt_len)
        return [replace(reply, **answers) for reply, answers in zip(replies, forced, strict=True)]

    def _call_forced(self, asked: Sequence[tuple[Ask, Reply, str, Body]]) -> list[dict[str, Any]]:
        params = []
        for (_, condition), reference, name, body in asked:
            known: Forced | None = getattr(reference, name)  # None if the reference is asked, which needs no question
            tokens = {} if known is None else {"answer_tokens": known.num_tokens}
            params.append(self._sampling_params(condition.request | tokens, body, max_new_tokens=1))
        return self._send(
            [ask for ask, *_ in asked],
            [body for *_, body in asked],
            params,
            # The token at the start gets no log-probability, so start one token before the answer.
            logprob_start_len=[reference.prompt_len - 1 for _, reference, _, _ in asked],
        )

    def _flush(self) -> None:
        if not self._salt:
            self._client.flush()

    def _ask_for_top(self, prompt: Prompt) -> Extra:
        return {"top_logprobs_num": self._asking.num_top}

    def _post(
        self, asks: Sequence[Ask], extra: Callable[[Prompt], Extra]
    ) -> Iterator[tuple[Sequence[Ask], list[dict[str, Any]]]]:
        """Gives (asks, outputs) of each call, in order; `extra` returns further fields of a prompt's request."""
        size = self._batch_size([prompt.body for prompt, _ in asks])
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
        bodies = [prompt.body for prompt, _ in asks]
        params = [
            self._sampling_params(condition.request, body, self._num_new_tokens(condition))
            for (_, condition), body in zip(asks, bodies, strict=True)
        ]
        fields = {name: [each[name] for each in extras] for name in extras[0]}
        return self._send(asks, bodies, params, **fields)

    def _send(
        self, asks: Sequence[Ask], bodies: Sequence[Body], params: list[dict[str, Any]], **fields: list[Any]
    ) -> list[dict[str, Any]]:
        body = {
            **content_of(bodies),
            # References lie in partitions of their own, so that no prompt finds itself in the exact cache.
            "extra_key": [self._salt + prompt.partition + ("/full" if c == REFERENCE else "") for prompt, c in asks],
            "sampling_params": params,
            "return_logprob": True,
            **self._replica,
            **fields,
        }
        return self._client.send("POST", "/generate", body).json()

    def _sampling_params(self, request: Extra, body: Body, max_new_tokens: int) -> dict[str, Any]:
        return {
            "temperature": 0.0,
            "max_new_tokens": max_new_tokens,
            "stop": list(self._asking.stop),
            **custom_params(request, body),
        }

    def _num_new_tokens(self, condition: Condition) -> int:
        return 1 if self._asking.first_only and condition != REFERENCE else self._asking.max_new_tokens

    def _batch_size(self, bodies: Sequence[Body]) -> int:
        # Counts a character of text as a token, which is seldom too few; a wrong guess only costs speed.
        longest = max((len(body.content) for body in bodies), default=1)
        return max(1, min(MAX_BATCH, int(RUNNING_SHARE * self._pool_len / NUM_CALLS / longest)))


def content_of(bodies: Sequence[Body]) -> dict[str, Any]:
    """The request field with the prompts; the prompts of one session are all texts or all token ids."""
    name = "text" if isinstance(bodies[0].content, str) else "input_ids"
    return {name: [body.content for body in bodies]}


def custom_params(request: Extra, body: Body) -> dict[str, Any]:
    """The part of `sampling_params` that marks chunks by token and carries options; empty if there is neither."""
    fields = {**request, **({"spans": body.spans} if body.spans else {})}
    return {"custom_params": {"chunk_cache": fields}} if fields else {}


def _reference_reply(prompt: Prompt, out: Mapping[str, Any]) -> Reply:
    meta = out["meta_info"]
    if meta["chunk_cache"]["reused_tokens"]:
        raise SetupError(f"The reference of prompt {prompt.key} reused chunks; this is a bug.")
    top = tuple((token, _finite(logprob)) for logprob, token, _ in meta["output_top_logprobs"][0])
    return Reply(**_common(prompt, REFERENCE, out), kl=None, top=top, ids=_answer_ids(out))


def _reply(
    prompt: Prompt, out: Mapping[str, Any], condition: Condition, reference: Reply, tolerated: Sequence[str]
) -> Reply:
    meta = out["meta_info"]
    _check_reuse(prompt, meta["chunk_cache"], condition, tolerated)
    found = {token: _finite(logprob) for logprob, token, _ in meta["output_token_ids_logprobs"][0]}
    kl = first_token_kl([p for _, p in reference.top], [found[token] for token, _ in reference.top])
    return Reply(**_common(prompt, condition, out), kl=kl)


def _answer_ids(out: Mapping[str, Any]) -> tuple[int, ...]:
    """The tokens of the answer, without the stop token that ended it, which is not in the text either."""
    ids = tuple(out.get("output_ids", ()))
    reason = out["meta_info"].get("finish_reason") or {}
    return ids[:-1] if ids and reason.get("matched") == ids[-1] else ids


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
        "prefix_len": chunk_cache.get("prefix_tokens", 0),
        "reused_len": chunk_cache["reused_tokens"],
        "recomputed_len": chunk_cache["recomputed_tokens"],
    }


def _check_reuse(
    prompt: Prompt, chunk_cache: Mapping[str, Any], condition: Condition, tolerated: Sequence[str]
) -> None:
    assert condition.method is not None
    method, ratio = chunk_cache["method"], chunk_cache["ratio"]
    if method != condition.method.method or condition.ratio not in (None, ratio):
        raise SetupError(
            f"Prompt {prompt.key} was asked with {condition.request} and answered with {method}, ratio {ratio}."
        )
    if condition.method.keep_tokens is not None:
        tolerated = (*tolerated, "prompt_end")  # computed, as their attention chooses what is kept
    label = condition.label if condition.ratio is None else f"{condition.label}, ratio {condition.ratio:g}"
    if condition.ratio is None:
        is_ranked = 0 < chunk_cache["recomputed_tokens"] < chunk_cache["reused_tokens"]
    else:
        is_ranked = 0 < condition.ratio < 1
    for number, chunk in enumerate(chunk_cache["chunks"], 1):
        if chunk["status"] not in ("hit", "prefix") and chunk["reason"] not in tolerated:
            raise SetupError(
                f"Chunk {number} of prompt {prompt.key} was not reused but {chunk['status']} ({chunk['reason']}) with "
                f"{label}; where it says evicted or memory, give the server a larger "
                "--max-total-tokens."
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
