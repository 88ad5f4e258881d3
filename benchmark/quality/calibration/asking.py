"""Asking: a value of the grid as a condition of the harness, and its replies as one point of the curve.

- `condition_of` is one value of the grid: a ratio, or an alpha in place of a ratio.
- `answers_of` gives the scores and lengths of all questions under a condition, once they have been asked.
"""

from __future__ import annotations

import numpy as np
from benchmark.quality.calibration.curve import Answers
from benchmark.quality.conditions import Condition, MethodSpec
from benchmark.quality.experiment import Experiment
from benchmark.quality.metrics import score

from chunk_cache.methods import find_method
from chunk_cache.methods.options import ALPHA as ALPHA_OPTION

ALPHA, RATIO = ALPHA_OPTION.name, "ratio"
BY = (ALPHA, RATIO)


def condition_of(method: MethodSpec, by: str, value: float) -> Condition:
    """How a value of the grid is asked.

    Raises:
        ChunkCacheRequestError: the method has no option `alpha`, or the value lies outside its range.
    """
    if by == RATIO:
        return Condition(method, value)
    options = find_method(method.method, "--method").check_options({**dict(method.options), ALPHA: value}, "--values")
    return Condition(MethodSpec(method.method, options))


def answers_of(experiment: Experiment, condition: Condition) -> Answers:
    """Scores and lengths of all questions; everything must have been asked."""
    task = experiment.task
    replies = [experiment.reply(prompt, condition) for prompt in experiment.prompts]
    scored = zip(replies, task.questions, strict=True)
    return Answers(
        scores=np.array([score(task.metric, reply.text, question) for reply, question in scored]),
        kls=np.array([reply.kl for reply in replies if reply.kl is not None]),
        reused_len=sum(reply.reused_len for reply in replies),
        recomputed_len=sum(reply.recomputed_len for reply in replies),
    )
