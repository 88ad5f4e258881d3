"""What is asked of an engine, and the numbers that come of it: `verify_model`.

Everything is compared with the same engine's own full prefill (`"mode": "off"`), by the distribution of the first
token. Four questions, cheapest cause first:

    layer 0     are reused keys where they belong? The deviation of layer 0, which depends on token and position only,
                must be rounding: it is compared with the deviation of keys that were not shifted.
    ratio 1     does recomputing everything give what a full prefill gives?
    reuse       how far is reuse without recomputation?
    configured  how far is the configured method at the configured ratio?
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sglang_chunk_cache.verify.workload import Ask, Case

TOP = 20  # tokens of the full prefill's distribution that are compared; the rest is one bucket
_MIN_MASS = 1e-9  # what is left over of a distribution is a difference of numbers that were rounded to fp32
_SHARE = 0.5  # of the tokens; any ratio in (0, 1) shows the deviation of all


@dataclass(frozen=True)
class First:
    """The first generated token: its id, and log-probabilities of the reference's likeliest tokens, by id."""

    token: int
    logprobs: dict[int, float]


@dataclass(frozen=True)
class Distance:
    """First tokens of all cases against the reference's."""

    mean_kl: float
    max_kl: float
    top1: float
    """Share of the cases in which the likeliest token is the same."""
    max_logprob: float
    """Largest difference of a log-probability among the reference's likeliest tokens."""
    recomputed: float
    """Share of the prompt tokens that were reused and computed again."""
    reused: float
    """Share of the prompt tokens that were brought in."""


@dataclass(frozen=True)
class Findings:
    """All that was measured."""

    num_cases: int
    layer0: float
    """Largest deviation of layer 0 over all cases, as a part of the mean deviation of unshifted keys."""
    ratio_one: Distance
    full_reuse: Distance
    configured: Distance


class MeasureError(RuntimeError):
    """The engine did not do what was asked; the message says what."""


def verify_model(engine: Any, cases: Sequence[Case]) -> Findings:
    """Asks the engine all that is needed; its caches are flushed."""
    reference, tops = _ask_reference(engine, cases)
    engine.flush_cache()
    _generate(
        engine,
        [ask for case in cases for ask in case.priming],
        [{}] * sum(len(c.priming) for c in cases),
    )
    layer0 = _layer0(engine, cases)
    distances = []
    for options in ({"ratio": 1.0}, {"method": "full-reuse"}, {}):
        firsts, replies = _ask_firsts(engine, cases, options, tops)
        distances.append(_distance(reference, firsts, replies))
    return Findings(len(cases), layer0, *distances)


def kl_divergence(p: dict[int, float], q: dict[int, float]) -> float:
    """KL(p || q) in nats from log-probabilities of the same tokens; all other tokens are one bucket."""
    return first_token_kl(list(p.values()), [q[token] for token in p])


def first_token_kl(reference: Sequence[float], other: Sequence[float]) -> float:
    """KL(reference || other) in nats over the given tokens and one bucket for all the rest.

    Both are log-probabilities of the same tokens. Tokens put together into a bucket can only hide a difference, so this
    is a lower bound of the KL over the whole vocabulary.
    """
    assert len(reference) == len(other), f"{len(reference)} and {len(other)} log-probabilities"
    total = sum(math.exp(p) * (p - q) for p, q in zip(reference, other, strict=True))
    rest, other_rest = (max(_MIN_MASS, 1.0 - sum(map(math.exp, values))) for values in (reference, other))
    return max(0.0, total + rest * (math.log(rest) - math.log(other_rest)))


def _ask_reference(engine: Any, cases: Sequence[Case]) -> tuple[list[First], list[list[int]]]:
    outs = _generate(
        engine,
        [case.prompt for case in cases],
        [{"mode": "off"}] * len(cases),
        return_logprob=True,
        top_logprobs_num=TOP,
    )
    firsts = []
    for out in outs:
        top = out["meta_info"]["output_top_logprobs"][0]
        firsts.append(First(out["output_ids"][0], {token: logprob for logprob, token, *_ in top}))
    return firsts, [list(first.logprobs) for first in firsts]


def _ask_firsts(
    engine: Any, cases: Sequence[Case], options: dict[str, Any], tops: list[list[int]]
) -> tuple[list[First], list[dict[str, Any]]]:
    outs = _generate(
        engine,
        [case.prompt for case in cases],
        [options] * len(cases),
        return_logprob=True,
        token_ids_logprob=tops,
    )
    firsts, replies = [], []
    for out in outs:
        logprobs = {token: logprob for logprob, token, *_ in out["meta_info"]["output_token_ids_logprobs"][0]}
        firsts.append(First(out["output_ids"][0], logprobs))
        replies.append(_checked(out["meta_info"]["chunk_cache"]))
    return firsts, replies


def _layer0(engine: Any, cases: Sequence[Case]) -> float:
    found = {}
    for shift in (0, 1):
        options = {"method": "cacheblend", "ratio": _SHARE, "explain": True}
        options["options"] = {"check_layer": 0, "shift": shift}
        outs = _generate(engine, [c.prompt for c in cases], [options] * len(cases))
        scores = [_checked(out["meta_info"]["chunk_cache"])["selection"]["scores"] for out in outs]
        found[shift] = scores
    unshifted = sum(score["mean"] for score in found[0]) / len(cases)
    if unshifted == 0.0:
        raise MeasureError("no chunk of the prompts stands at another position than it was computed at; use others.")
    return max(score["max"] for score in found[1]) / unshifted


def _generate(
    engine: Any, asks: Sequence[Ask], options: Sequence[dict[str, Any]], **fields: Any
) -> list[dict[str, Any]]:
    """One token for each prompt, as one batch."""
    params = []
    for ask, own in zip(asks, options, strict=True):
        spans = {"spans": [list(span) for span in ask.spans]} if ask.spans else {}
        params.append({"max_new_tokens": 1, "temperature": 0.0, "custom_params": {"chunk_cache": {**spans, **own}}})
    names = set().union(*(ask.fields for ask in asks))
    assert len(names) == 1, f"prompts of one batch are all texts or all token ids, not {names}"
    (name,) = names
    prompts = [ask.fields[name] for ask in asks]
    field = {"prompt": prompts} if name == "text" else {"input_ids": prompts}
    return engine.generate(**field, sampling_params=params, **fields)


def _checked(reply: dict[str, Any]) -> dict[str, Any]:
    statuses = [chunk["status"] for chunk in reply["chunks"]]
    if not reply["reused_tokens"] or set(statuses) - {"hit", "prefix"}:
        raise MeasureError(f"chunks that were just computed are not reused: {reply}; raise --max-total-tokens.")
    return reply


def _distance(reference: Sequence[First], firsts: Sequence[First], replies: Sequence[dict[str, Any]]) -> Distance:
    kls = [kl_divergence(a.logprobs, b.logprobs) for a, b in zip(reference, firsts, strict=True)]
    pairs = list(zip(reference, firsts, strict=True))
    totals = [sum(reply[name] for name in ("prefix_tokens", "reused_tokens", "computed_tokens")) for reply in replies]
    return Distance(
        mean_kl=sum(kls) / len(kls),
        max_kl=max(kls),
        top1=sum(a.token == b.token for a, b in pairs) / len(pairs),
        max_logprob=max(abs(a.logprobs[token] - b.logprobs[token]) for a, b in pairs for token in a.logprobs),
        recomputed=sum(reply["recomputed_tokens"] for reply in replies) / sum(totals),
        reused=sum(reply["reused_tokens"] for reply in replies) / sum(totals),
    )
