"""Table: makes one row per model, family, method and ratio from replies.

- `tabulate` scores the replies of one model to one task and compares each condition with the reference.
- `write_table`, `read_table` write and read the CSV that the report is made from.

Comparisons are paired: the same prompts under both conditions. If answers are right or wrong and the reference answers
fewer than `MASTERED` of the prompts right, only those prompts are scored that it answers right; the column `scored`
says so. The reference is then perfect by construction, and a method can only lose.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, get_type_hints

import numpy as np
import numpy.typing as npt
from benchmark.quality.metrics import METRICS, RIGHT_OR_WRONG, score
from benchmark.quality.question import DataError, Question
from scipy.stats import bootstrap

from chunk_cache.options.defaults import DEFAULT_METHOD, DEFAULT_RATIO
from chunk_cache_tools.conditions import REFERENCE, Condition, parse_method
from chunk_cache_tools.verify.reply_log import FORCED, Reply

MASTERED = 0.95
NUM_RESAMPLES = 2000
CONFIDENCE = 0.95
DEFAULT = Condition(parse_method(DEFAULT_METHOD), DEFAULT_RATIO)

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Row:
    """One cell of the experiment. Shares and scores are from 0 to 1; None means no value.

    Attributes:
        ratio: effective ratio; None for the reference (method `off`).
        metric: the metric of `score`.
        num_asked, num_scored: numbers of prompts; `scored` is `all` or `full-right`.
        mastered: whether the reference reaches 95 % on all prompts.
        score, score_se: mean over the scored prompts and its standard error.
        score_all: mean over all prompts.
        diff: `score` minus the reference's; `diff_low`, `diff_high` its 95 % interval, from resampling the prompts.
        kl, kl_se: mean KL of the first token's distribution to the reference's, nats, over all prompts.
        first_same, text_same: share of all prompts whose first token, or whole answer, equals the reference's.
        recomputed: recomputed tokens / reused tokens, as the server counts them.
        prompt_len, reused_len: mean numbers of tokens.
        exact_match, token_f1, rouge_l, substring: means over the scored prompts.
        gold_loss, own_loss: how much less likely the right answer, and the reference's own answer, are than under the
            reference: mean over all prompts of the difference of log-probability per token, nats; with standard error
            and 95 % interval, from resampling the prompts.
        gold_more, own_more: `gold_loss` and `own_loss` minus those of the server's default method and ratio, question
            by question, with intervals corrected for the number of all such comparisons (Bonferroni); None if the
            default was not asked.
        num_right: number of all prompts that the reference answers with a full score; 0 if answers are right or wrong,
            where `diff` may be of these already.
        right_diff: mean score on these minus the reference's, which is 1, with its interval.
    """

    model: str
    family: str
    method: str
    ratio: float | None
    metric: str
    num_asked: int
    num_scored: int
    scored: str
    mastered: bool
    score: float | None
    score_se: float | None
    score_all: float
    diff: float | None
    diff_low: float | None
    diff_high: float | None
    kl: float | None
    kl_se: float | None
    first_same: float
    text_same: float
    recomputed: float | None
    prompt_len: float
    reused_len: float
    exact_match: float | None
    token_f1: float | None
    rouge_l: float | None
    substring: float | None
    gold_loss: float | None = None
    gold_loss_se: float | None = None
    gold_loss_low: float | None = None
    gold_loss_high: float | None = None
    own_loss: float | None = None
    own_loss_se: float | None = None
    own_loss_low: float | None = None
    own_loss_high: float | None = None
    gold_more: float | None = None
    gold_more_low: float | None = None
    gold_more_high: float | None = None
    own_more: float | None = None
    own_more_low: float | None = None
    own_more_high: float | None = None
    num_right: int = 0
    right_diff: float | None = None
    right_diff_low: float | None = None
    right_diff_high: float | None = None


def tabulate(
    model: str,
    family: str,
    metric: str,
    asked: Sequence[tuple[Question, str]],
    replies: Mapping[Condition, Mapping[str, Reply]],
    conditions: Sequence[Condition],
) -> list[Row]:
    """Rows of the reference and of `conditions`.

    Args:
        asked: questions with the keys of their prompts. Without answers, the reference's reply counts as right.
        replies: condition -> prompt key -> reply, including the reference.
    """
    reference = [replies[REFERENCE][key] for _, key in asked]
    asked = [
        (question if question.answers else replace(question, answers=(reply.text,)), key)
        for (question, key), reply in zip(asked, reference, strict=True)
    ]
    full = _scores(metric, asked, reference)
    mastered = bool(full.mean() >= MASTERED)
    chosen = np.ones(len(asked), dtype=bool) if mastered or metric not in RIGHT_OR_WRONG else full == 1.0
    right = (full == 1.0) & (metric not in RIGHT_OR_WRONG)
    default = [replies[DEFAULT][key] for _, key in asked] if DEFAULT in replies else None
    compared = max(1, sum(condition != DEFAULT for condition in conditions))
    rows = []
    for condition in (REFERENCE, *conditions):
        current = [replies[condition][key] for _, key in asked]
        other = None if condition == DEFAULT else default
        scores = {name: _scores(name, asked, current) for name in METRICS}
        rows.append(
            Row(
                model=model,
                family=family,
                method=condition.label,
                ratio=condition.ratio,
                metric=metric,
                num_asked=len(asked),
                num_scored=int(chosen.sum()),
                scored="all" if chosen.all() else "full-right",
                mastered=mastered,
                score=_mean(scores[metric][chosen]),
                score_se=_standard_error(scores[metric][chosen]),
                score_all=float(scores[metric].mean()),
                **_differences((scores[metric] - full)[chosen], is_reference=condition == REFERENCE),
                num_right=int(right.sum()),
                **({} if condition == REFERENCE else _with_interval("right_diff", (scores[metric] - full)[right])),
                **_agreement(current, reference),
                **({} if condition == REFERENCE else _losses(current, reference)),
                **({} if other is None or condition == REFERENCE else _more(current, other, compared)),
                **_lengths(current),
                **{name: _mean(values[chosen]) for name, values in scores.items()},
            )
        )
    return rows


def write_table(path: str | Path, rows: Iterable[Row]) -> None:
    """Writes a CSV with a header; numbers have six significant digits, None is an empty cell."""
    with Path(path).open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, [field.name for field in fields(Row)], lineterminator="\n")
        writer.writeheader()
        writer.writerows({name: _format(value) for name, value in asdict(row).items()} for row in rows)


def read_table(path: str | Path) -> list[Row]:
    """The rows of a CSV that `write_table` wrote.

    Raises:
        DataError: the file is missing, or a line is not such a row.
    """
    types = get_type_hints(Row)
    rows = []
    try:
        with Path(path).open(encoding="utf-8", newline="") as file:
            for number, line in enumerate(csv.DictReader(file), 2):
                try:
                    rows.append(Row(**{name: _parse(line[name], kind) for name, kind in types.items() if name in line}))
                except (KeyError, ValueError, TypeError, AttributeError) as error:
                    raise DataError(f"{path}:{number}: not a row of this table ({error}).") from error
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error}).") from error
    return rows


def _scores(metric: str, asked: Sequence[tuple[Question, str]], replies: Sequence[Reply]) -> Floats:
    return np.array([score(metric, reply.text, question) for (question, _), reply in zip(asked, replies, strict=True)])


def _differences(values: Floats, *, is_reference: bool) -> dict[str, Any]:
    if is_reference:
        return dict.fromkeys(("diff", "diff_low", "diff_high"))
    return _with_interval("diff", values)


def _agreement(current: Sequence[Reply], reference: Sequence[Reply]) -> dict[str, Any]:
    kls = np.array([reply.kl for reply in current if reply.kl is not None])
    pairs = list(zip(current, reference, strict=True))
    return {
        "kl": _mean(kls),
        "kl_se": _standard_error(kls),
        "first_same": float(np.mean([a.first_id == b.first_id for a, b in pairs])),
        "text_same": float(np.mean([a.text == b.text for a, b in pairs])),
    }


def _losses(current: Sequence[Reply], reference: Sequence[Reply]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in FORCED:
        losses = _less_likely(name, current, reference)
        found |= _with_interval(f"{name}_loss", losses) | {f"{name}_loss_se": _standard_error(losses)}
    return found


def _more(current: Sequence[Reply], default: Sequence[Reply], compared: int) -> dict[str, Any]:
    """Args: compared: number of conditions that are compared with the default; all their intervals hold jointly."""
    found: dict[str, Any] = {}
    for name in FORCED:
        confidence = 1 - (1 - CONFIDENCE) / (compared * len(FORCED))
        found |= _with_interval(f"{name}_more", _less_likely(name, current, default), confidence)
    return found


def _less_likely(name: str, current: Sequence[Reply], other: Sequence[Reply]) -> Floats:
    """How much less likely the forced answer `name` is than in `other`, prompt by prompt, nats a token."""
    pairs = [(getattr(a, name), getattr(b, name)) for a, b in zip(other, current, strict=True)]
    return np.array([a.logprob - b.logprob for a, b in pairs if a is not None and b is not None])


def _with_interval(name: str, values: Floats, confidence: float = CONFIDENCE) -> dict[str, Any]:
    low, high = interval(values, confidence)
    return {name: _mean(values), f"{name}_low": low, f"{name}_high": high}


def _lengths(current: Sequence[Reply]) -> dict[str, Any]:
    num_reused = sum(reply.reused_len for reply in current)
    return {
        "recomputed": sum(reply.recomputed_len for reply in current) / num_reused if num_reused else None,
        "prompt_len": float(np.mean([reply.prompt_len for reply in current])),
        "reused_len": num_reused / len(current),
    }


def _mean(values: Floats) -> float | None:
    return float(values.mean()) if values.size else None


def _standard_error(values: Floats) -> float | None:
    return float(values.std(ddof=1) / values.size**0.5) if values.size > 1 else None


def interval(differences: Floats, confidence: float = CONFIDENCE) -> tuple[float | None, float | None]:
    """Percentile bootstrap of the mean; if all differences are equal, that value twice, which is no proof."""
    if differences.size < 2:
        return None, None
    if (differences == differences[0]).all():
        return float(differences[0]), float(differences[0])
    found = bootstrap(
        (differences,), np.mean, n_resamples=NUM_RESAMPLES, confidence_level=confidence, method="percentile", rng=0
    )
    return float(found.confidence_interval.low), float(found.confidence_interval.high)


def mean_with_interval(values: Floats, digits: int) -> str:
    """`mean [low, high]`; without the interval if it is unknown."""
    low, high = interval(values)
    ends = "" if low is None else f" [{low:.{digits}f}, {high:.{digits}f}]"
    return f"{np.mean(values):.{digits}f}{ends}"


def _format(value: object) -> object:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.6g}"
    return "" if value is None else value


def _parse(text: str, kind: object) -> object:
    if kind is bool:
        return {"yes": True, "no": False}[text]
    if kind in (int, str):
        return int(text) if kind is int else text
    return float(text) if text or kind is float else None
