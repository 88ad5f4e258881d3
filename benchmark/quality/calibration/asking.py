"""Asking: the replies that a curve is made of, under a budget by ratio or by alpha.

- `condition_of` is one value of the grid: a ratio, or an alpha in place of a ratio.
- `Sheet` is one family with its prompts and replies: `num_missing`, `ask`, `answers`.
- `CalibrationSession` asks as the harness's `Session` does, and can store chunks in a context first.

How the chunks are stored decides what alpha means, for CFO compares the context of a chunk with the one it had then:

    ALONE      [system, chunk] once per chunk; without a context CFO = alpha / 2 for all of them
    SHUFFLED   [system, all chunks of the prompt in another order] once per prompt, computed exactly
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
from benchmark.common.server import Server
from benchmark.quality.calibration.curve import Answers
from benchmark.quality.conditions import REFERENCE, Condition, MethodSpec
from benchmark.quality.metrics import score
from benchmark.quality.prompts import SEPARATOR, Prompt
from benchmark.quality.replies import Reply, ReplyLog
from benchmark.quality.session import MIN_LOGPROB, NUM_CALLS, Ask, Asking, Session, SetupError
from benchmark.quality.tasks import Task

from chunk_cache.methods import find_method
from sglang_chunk_cache.verify.measure import first_token_kl

ALPHA, RATIO = "alpha", "ratio"
BY = (ALPHA, RATIO)
ALONE, SHUFFLED = "alone", "shuffled"
STORED = (ALONE, SHUFFLED)


@dataclass(frozen=True)
class AlphaCondition(Condition):
    """A condition without a ratio: the option `alpha` of its method sets the budget of each chunk."""

    @property
    def request(self) -> dict[str, Any]:
        """What goes into `custom_params.chunk_cache`; a ratio beside alpha would be refused."""
        return {name: value for name, value in super().request.items() if name != RATIO}


def condition_of(method: MethodSpec, by: str, value: float) -> Condition:
    """How a value of the grid is asked.

    Raises:
        ChunkCacheRequestError: the method has no option `alpha`, or the value lies outside its range.
    """
    if by == RATIO:
        return Condition(method, value)
    options = find_method(method.method, "--method").check_options({**dict(method.options), ALPHA: value}, "--values")
    return AlphaCondition(MethodSpec(method.method, options))


class CalibrationSession(Session):
    """A session whose conditions may lack a ratio, and whose chunks may have been stored in a context."""

    def __init__(self, server: Server, asking: Asking, stored: str = ALONE) -> None:
        super().__init__(server, asking)
        self._stored = stored

    def prime(self, prompts: Sequence[Prompt]) -> None:
        """Empties the caches and stores every chunk of these prompts."""
        if self._stored == ALONE:
            super().prime(prompts)
            return
        self._server.flush()
        size = self._batch_size([(prompt, REFERENCE) for prompt in prompts])
        batches = [prompts[i : i + size] for i in range(0, len(prompts), size)]
        with ThreadPoolExecutor(NUM_CALLS) as calls:
            for _ in calls.map(self._store_shuffled, batches):
                pass

    def ask(self, asks: Sequence[Ask], references: Mapping[str, Reply]) -> Iterator[list[Reply]]:
        """Asks primed prompts, each under its condition, some replies at a time.

        Raises:
            SetupError: a chunk was not reused, or another method or ratio was used.
        """

        def ask_for_ids(prompt: Prompt) -> dict[str, Any]:
            return {"token_ids_logprob": [token for token, _ in references[prompt.key].top]}

        for batch, outs in self._post(asks, ask_for_ids):
            yield [
                _reply(prompt, condition, out["text"], out["meta_info"], references[prompt.key])
                for (prompt, condition), out in zip(batch, outs, strict=True)
            ]

    def _store_shuffled(self, prompts: Sequence[Prompt]) -> None:
        # In mode `exact` nothing stored is brought in, so every variant is that of a full prefill in its context.
        params = {"max_new_tokens": 0, "temperature": 0.0, "custom_params": {"chunk_cache": {"mode": "exact"}}}
        body = {
            "text": [SEPARATOR.join((p.head, *shuffled(p), self._priming_tail)) for p in prompts],
            "extra_key": [prompt.partition for prompt in prompts],
            "sampling_params": params,
        }
        self._server.post("/generate", body)


def shuffled(prompt: Prompt) -> tuple[str, ...]:
    """The different chunks of a prompt in another order, the same one every time."""
    chunks = list(dict.fromkeys(prompt.chunks))
    before = list(chunks)
    draw = random.Random(prompt.key)
    while len(chunks) > 1 and chunks == before:  # the same order would be an exact prefix, and nothing to reuse
        draw.shuffle(chunks)
    return tuple(chunks)


@dataclass(frozen=True)
class Sheet:
    """A task with one prompt per question, and the log of the replies.

    Attributes:
        stored: one of `STORED`.
    """

    task: Task
    prompts: Sequence[Prompt]
    log: ReplyLog
    stored: str = ALONE

    def num_missing(self, conditions: Iterable[Condition]) -> int:
        """Replies that are not in the log, the reference's included."""
        return sum(len(self._missing(condition)) for condition in (REFERENCE, *conditions))

    def num_needed(self, conditions: Sequence[Condition]) -> int:
        """Replies that the curve is made of, the reference's included."""
        return len(self._distinct()) * (1 + len(conditions))

    def ask(self, server: Server, conditions: Sequence[Condition], tick: Callable[[int], None]) -> None:
        """Asks what is missing, the references first; `tick` hears how many replies have come in.

        Raises:
            SetupError: a reply was not computed as wanted.
        """
        session = CalibrationSession(server, self.task.asking, self.stored)
        if missing := self._missing(REFERENCE):
            for replies in session.ask_reference(missing):
                self._keep(replies, tick)
        references = {prompt.key: self._found(prompt, REFERENCE) for prompt in self.prompts}
        lengths = {key: reply.prompt_len for key, reply in references.items()}
        for block in session.blocks(self._distinct(), lengths):
            keys = {prompt.key for prompt in block}
            asks = [(p, c) for c in conditions for p in self._missing(c) if p.key in keys]
            if asks:
                session.prime(block)
                for replies in session.ask(asks, references):
                    self._keep(replies, tick)

    def answers(self, condition: Condition) -> Answers:
        """Scores and lengths of all questions; everything must have been asked."""
        replies = [self._found(prompt, condition) for prompt in self.prompts]
        scored = zip(replies, self.task.questions, strict=True)
        return Answers(
            scores=np.array([score(self.task.metric, reply.text, question) for reply, question in scored]),
            kls=np.array([reply.kl for reply in replies if reply.kl is not None]),
            reused_len=sum(reply.reused_len for reply in replies),
            recomputed_len=sum(reply.recomputed_len for reply in replies),
        )

    def _distinct(self) -> list[Prompt]:
        return list({prompt.key: prompt for prompt in self.prompts}.values())

    def _missing(self, condition: Condition) -> list[Prompt]:
        return [prompt for prompt in self._distinct() if self.log.find(prompt.key, condition) is None]

    def _keep(self, replies: list[Reply], tick: Callable[[int], None]) -> None:
        self.log.append(replies)
        tick(len(replies))

    def _found(self, prompt: Prompt, condition: Condition) -> Reply:
        reply = self.log.find(prompt.key, condition)
        assert reply is not None, f"{condition.label} of {prompt.key} was not asked"
        return reply


def _reply(prompt: Prompt, condition: Condition, text: str, meta: Mapping[str, Any], reference: Reply) -> Reply:
    chunk_cache = meta["chunk_cache"]
    _check(prompt, condition, chunk_cache)
    found = {token: _finite(logprob) for logprob, token, _ in meta["output_token_ids_logprobs"][0]}
    return Reply(
        prompt=prompt.key,
        method=condition.label,
        ratio=condition.ratio,
        text=text,
        first_id=meta["output_token_logprobs"][0][1],
        prompt_len=meta["prompt_tokens"],
        reused_len=chunk_cache["reused_tokens"],
        recomputed_len=chunk_cache["recomputed_tokens"],
        kl=first_token_kl([p for _, p in reference.top], [found[token] for token, _ in reference.top]),
    )


def _check(prompt: Prompt, condition: Condition, chunk_cache: Mapping[str, Any]) -> None:
    assert condition.method is not None, "the reference is asked by ask_reference"
    used = chunk_cache["method"]
    if used != condition.method.method or condition.ratio not in (None, chunk_cache["ratio"]):
        raise SetupError(
            f"Prompt {prompt.key} was asked with {condition.request} and answered with {used}, "
            f"ratio {chunk_cache['ratio']}."
        )
    is_partial = 0 < chunk_cache["recomputed_tokens"] < chunk_cache["reused_tokens"]
    for number, chunk in enumerate(chunk_cache["chunks"], 1):
        if chunk["status"] not in ("hit", "prefix"):
            raise SetupError(
                f"Chunk {number} of prompt {prompt.key} was not reused but {chunk['status']} ({chunk['reason']}) with "
                f"{condition.label}; where it says evicted or memory, give the server a larger --max-total-tokens in "
                "--server-flags."
            )
        if condition.ratio is None and chunk["status"] == "hit" and chunk.get("cfo") is None:
            raise SetupError(
                f"The CFO of chunk {number} of prompt {prompt.key} is unknown, so {condition.label} would fall back to "
                "the server's ratio; let the server take statistics, see docs/methods.md."
            )
        if is_partial and chunk.get("ranked_by") == "position":
            raise SetupError(
                f"No statistics were stored with chunk {number} of prompt {prompt.key}, so {condition.label} would "
                "rank by position; let the server take them, see docs/methods.md."
            )


def _finite(logprob: float | None) -> float:
    return MIN_LOGPROB if logprob is None else max(logprob, MIN_LOGPROB)
