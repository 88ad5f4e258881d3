"""Measurement: turns the kept replies of one condition into the numbers that are judged."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from chunk_cache.methods import METHODS, Stage
from chunk_cache_tools.conditions import REFERENCE, Condition
from chunk_cache_tools.verify.recommendation import Floats, Measured
from chunk_cache_tools.verify.reply_log import Reply, ReplyLog
from chunk_cache_tools.verify.token_prompt import TokenPrompt


def measure(condition: Condition, prompts: Sequence[TokenPrompt], log: ReplyLog, num_layers: int) -> Measured:
    """What a condition did to these prompts, whose replies are all in the log.

    Args:
        num_layers: number of layers of the model.
    """
    pairs = [(_found(log, prompt, REFERENCE), _found(log, prompt, condition)) for prompt in prompts]
    computed = full = 0.0
    for prompt, (_, reply) in zip(prompts, pairs, strict=True):
        without = reply.prompt_len - reply.prefix_len
        full += without
        computed += without - reply.reused_len + rows_of(condition, prompt, reply, num_layers)
    return Measured(
        condition=condition,
        losses=_losses("own", pairs),
        kls=np.array([reply.kl for _, reply in pairs], dtype=np.float64),
        gold_losses=_losses("gold", pairs),
        same_first=float(np.mean([full.first_id == reply.first_id for full, reply in pairs])),
        rows=computed / full,
    )


def rows_of(condition: Condition, prompt: TokenPrompt, reply: Reply, num_layers: int) -> float:
    """Rows that a method adds to those of the question and of new text, as a mean over the layers.

    A method that chooses at a layer computes all reused rows below that layer. A method that runs the question first
    computes the question twice. A method that does both also computes its chosen rows twice below the layer.
    """
    assert condition.method is not None
    method = METHODS[condition.method.method]
    if condition.ratio is None or method.stage is Stage.BEFORE:
        return reply.recomputed_len
    if not reply.recomputed_len:
        return 0.0
    options = condition.method.options
    counts = method.layer_counts(reply.reused_len, condition.ratio, num_layers, options)
    again: float = prompt.question_len if method.stage is Stage.QUESTION else 0
    if (last_layer := method.last_asked_layer(options)) is not None:
        again = (prompt.question_len + counts[-1]) * last_layer / num_layers
    return sum(counts) / num_layers + again


def _losses(name: str, pairs: Sequence[tuple[Reply, Reply]]) -> Floats:
    """Nats lost per token, for each prompt that has the answer `name`."""
    forced = [(getattr(full, name), getattr(reply, name)) for full, reply in pairs]
    return np.array([a.logprob - b.logprob for a, b in forced if a is not None and b is not None], dtype=np.float64)


def _found(log: ReplyLog, prompt: TokenPrompt, condition: Condition) -> Reply:
    reply = log.find(prompt.key, condition)
    assert reply is not None, f"{condition.label} at {condition.ratio} of {prompt.key} was not asked"
    return reply
