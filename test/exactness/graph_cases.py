"""Prefills by SGLang's breakable graphs (`recorded_graph`), and which forwards they served.

By graphs or without; see `methods`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from exactness.cases import Prompt, Session
from exactness.recorded_graph import use_graphs
from local_scheduler import Reply

__all__ = ["CASES", "Served", "Session"]

BUCKETS = [32, 64, 128, 256]


@dataclass(frozen=True)
class Served:
    """One prefill forward: what attended, its rows, and what it was padded to; None = eager."""

    attention: str
    num_observers: int
    num_rows: int
    bucket: int | None


def watch(model_runner: Any) -> list[Served]:
    """Every prefill from here on, as it happens."""
    from sglang_chunk_cache.forward.attending import _SCOPE

    served: list[Served] = []
    graphs, eager = model_runner.prefill_cuda_graph_runner, model_runner.eager_runner

    def note(batch: Any, bucket: int | None) -> None:
        attention, observers = getattr(model_runner.attn_backend, _SCOPE, (None, ()))
        name = "stock" if attention is None else type(attention).__name__
        served.append(Served(name, len(observers), len(batch.input_ids), bucket))

    def watched(execute: Callable[..., Any], of_graph: bool) -> Callable[..., Any]:
        def run(batch: Any, **kwargs: Any) -> Any:
            if batch.forward_mode.is_extend():
                buckets = [one for one in BUCKETS if one >= len(batch.input_ids)] if of_graph else [None]
                note(batch, buckets[0])
            return execute(batch, **kwargs)

        return run

    graphs.execute, eager.execute = watched(graphs.execute, True), watched(eager.execute, False)
    return served


def methods(by_graphs: bool, s: Session) -> tuple[list[Reply], list[Reply], dict[str, list[Served]]]:
    """Chunks are computed, then brought in by methods of every stage, alone and beside plain prompts.

    Replies to compare with stock, those at other ratios, and what served each part of the traffic.
    """
    served: list[Served] = []
    if by_graphs:
        model_runner = s.local.scheduler.tp_worker.model_runner
        use_graphs(model_runner, BUCKETS)
        served = watch(model_runner)
    parts: dict[str, list[Served]] = {}
    others: list[Reply] = []

    def note(name: str) -> None:
        parts.setdefault(name, []).extend(served)
        served.clear()

    chunks = s.chunks(40, 33, 51, 46)
    for chunk in chunks:
        s.send(s.prompt([chunk], question=25))
        note("observed")
    s.send(Prompt().text(s.tokens(50)), marked=False)
    note("plain")
    for ratio in (1.0, 0.0, 0.3):
        for method in ("epic", "random", "cacheblend", "fusionrag", "question-drift"):
            order = s.rng.sample(chunks, 3)
            prompt = s.prompt([s.tokens(9), *order], question=20)
            if ratio == 1.0:
                s.send(prompt, options={"method": method})
            elif s.is_ours:
                others += s.local.generate([s.request(prompt, ratio=ratio, options={"method": method})])
            note(f"{method} {ratio:g}")
    order = s.rng.sample(chunks, 2)
    s.send(s.prompt([s.tokens(8), *order]), Prompt().text(s.tokens(40)), s.prompt([s.tokens(30)]))
    note("beside plain ones")
    if s.is_ours:
        asked = [
            s.request(
                s.prompt([s.tokens(9), *s.rng.sample(chunks, 2)], question=20), ratio=0.3, options={"method": one}
            )
            for one in ("question-drift", "epic", "fusionrag")
        ]
        others += s.local.generate(asked)
    note("questions beside others")
    return s.replies, others, parts


CASES = {"by_graphs": partial(methods, True), "eagerly": partial(methods, False)}
