"""APE, a baseline: passages are encoded in parallel and nothing is recomputed (Yang et al., arXiv:2502.05431).

All passages stand behind one shared prefix, each at the positions right behind it, and the question behind the longest
of them. The rows of question and answer attend to the passages with scores / `temperature`, to everything else as
always, and the two results are merged by their log-sum-exps, that of the passages times `scale`.

The paper tunes both numbers per task; 0.9 and 0.9 are ours, and so is the prompt's own head as the shared prefix.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from benchmark.quality.lab.case import Case

TEMPERATURE, SCALE = 0.9, 0.9


@dataclass(frozen=True)
class MergedAttention:
    """Attention of rows to passages at `[start, end)` and to the rest, merged; see the head of this file."""

    start: int
    end: int
    temperature: float = TEMPERATURE
    scale: float = SCALE

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """`[num_rows, num_heads, head_dim]`; arguments as of `rows.Attend`."""
        num_groups = q.shape[1] // k.shape[1]
        keys, values = (part.transpose(0, 1).repeat_interleave(num_groups, 0) for part in (k, v))
        scores = q.transpose(0, 1) @ keys.transpose(1, 2) * q.shape[-1] ** -0.5 + mask
        is_passage = torch.zeros(k.shape[0], dtype=torch.bool)
        is_passage[self.start : self.end] = True
        passages = (scores / self.temperature).masked_fill(~is_passage, float("-inf"))
        rest = scores.masked_fill(is_passage, float("-inf"))
        weight_of = torch.stack([self.scale * passages.logsumexp(-1), rest.logsumexp(-1)]).softmax(0)[..., None]
        weights = weight_of[0] * passages.softmax(-1) + weight_of[1] * rest.softmax(-1)
        return (weights @ values).transpose(0, 1)


def ape(case: Case) -> Iterator[tuple[str, dict[str, Any]]]:
    """(name, arguments of `Case.judge`): APE, and what each of its parts does alone."""
    parallel = case.reused.clone()
    for start, end in case.spans:
        parallel.k[:, start:end] = case.model.turn(parallel.k[:, start:end], case.head_len - start)
    shift = case.tail_start - case.head_len - max(end - start for start, end in case.spans)
    merged = MergedAttention(case.head_len, case.tail_start)
    none = torch.arange(0)
    yield "APE", {"rows": none, "cache": parallel, "attend": merged, "shift": shift}
    yield "parallel encoding, as it is", {"rows": none, "cache": parallel, "shift": shift}
    yield "reused, attention merged as by APE", {"rows": none, "attend": merged}
