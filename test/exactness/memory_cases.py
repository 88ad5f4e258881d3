"""Peak memory of what steps allocate: prompts of a long text, and near its end a chunk that is stored.

Every allocation and release of torch is counted from where a batch is handed to the model until it has its result, also
those within an operation (the memory events of torch's profiler); the KV pool and the weights were there before.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch.profiler import ProfilerActivity, profile

from exactness.cases import Session

CHUNK_LEN, QUESTION_LEN = 40, 9


def peak_bytes(run: Callable[[], Any]) -> tuple[Any, int]:
    """What `run` returns, and most bytes that were allocated at once while it ran, above what was there before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as trace:
        result = run()
    events = [event for event in trace.profiler.kineto_results.events() if event.name() == "[memory]"]
    live = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    return result, peak


def late_hit(method: str, s: Session, prompt_len: int) -> dict[str, Any]:
    """Of one prompt: its peak, the rows of its largest forward, and what its reply says."""
    (chunk,) = s.chunks(CHUNK_LEN)
    s.prime([chunk])
    text_len = prompt_len - len(s.system) - CHUNK_LEN - QUESTION_LEN
    prompt = s.prompt([], question=text_len).chunk(chunk).text(s.tokens(QUESTION_LEN))
    assert len(prompt.ids) == prompt_len
    num_rows: list[int] = []
    runner = s.local.scheduler.tp_worker.model_runner
    handle = runner.model.model.register_forward_pre_hook(lambda model, args: num_rows.append(len(args[0])))
    request = s.request(prompt, ratio=0.5, max_new_tokens=1, logprobs=False, options={"method": method})
    worker, peaks = s.local.scheduler.model_worker, []
    step = worker.forward_batch_generation

    def measured(*args: Any, **kwargs: Any) -> Any:
        result, peak = peak_bytes(lambda: step(*args, **kwargs))
        peaks.append(peak)
        return result

    worker.forward_batch_generation = measured
    (reply,) = s.local.generate([request])
    del worker.forward_batch_generation
    handle.remove()
    return {"peak": max(peaks), "most_rows": max(num_rows), "num_forwards": len(num_rows), "info": reply.info}


CASES = {method: partial(late_hit, method) for method in ("epic", "cacheblend")}
__all__ = ["CASES", "Session"]
