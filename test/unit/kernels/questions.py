"""Questions of several requests over several layers: inputs of `question_mass`, poisoned where nothing may be read."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from sgl_kernel_ext.backend import Backend
from sgl_kernel_ext.question_mass import Questions, question_mass
from sgl_kernel_ext.question_mass.naive import question_mass_reference


class Problem(NamedTuple):
    """Arguments of `question_mass`, in its order."""

    q: torch.Tensor
    k_buffers: list[torch.Tensor]
    questions: Questions


OPTIONS: list[dict[str, Any]] = [{}, {"squared": True}, {"logit_cap": 3.0}, {"sinks": 4}, {"k_scales": [0.5, 2.0]}]
"""Arguments of `given`."""

# (kv_len, position of the question's first row, its rows) of each request: one key; a question that is the whole
# prompt; an answer behind it; more rows than a tile; keys of more than one piece.
HARD = {
    "one key": [(1, 0, 1)],
    "a whole prompt": [(40, 0, 40)],
    "an answer behind": [(67, 50, 9)],
    "three": [(33, 30, 3), (150, 100, 37), (5, 4, 1)],
    "long": [(280, 262, 17), (20, 10, 5)],
}


def build(
    requests: list[tuple[int, int, int]],
    *,
    num_layers: int = 2,
    num_q_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 16,
    dtype: torch.dtype = torch.float32,
    kv_dtype: torch.dtype | None = None,
    seed: int = 0,
) -> Problem:
    """Slots of other requests, and keys behind a question, hold NaN."""
    rng = torch.Generator().manual_seed(seed)
    kv_lens, starts, row_lens = (list(one) for one in zip(*requests, strict=True))
    slots = torch.randperm(sum(kv_lens) + 9, generator=rng)[: sum(kv_lens)]
    seen = [own[: start + n] for own, start, n in zip(slots.split(kv_lens), starts, row_lens, strict=True)]
    buffers = []
    for _ in range(num_layers):
        buffer = torch.full((len(slots) + 9, num_kv_heads, head_dim), float("nan"))
        for own in seen:
            buffer[own] = torch.randn(len(own), num_kv_heads, head_dim, generator=rng)
        buffers.append(buffer.to(dtype).to(kv_dtype or dtype))
    q = torch.randn(num_layers, sum(row_lens), num_q_heads, head_dim, generator=rng).to(dtype)
    first_rows = [sum(row_lens[:i]) for i in range(len(row_lens))]
    return Problem(q, buffers, Questions(first_rows, row_lens, starts, kv_lens, slots))


def alone(problem: Problem, i: int) -> Problem:
    """The question of request i by itself."""
    asked = problem.questions
    row, row_len = sum(asked.row_lens[:i]), asked.row_lens[i]
    slots = asked.kv_slots.split(asked.kv_lens)[i]
    own = Questions([0], [row_len], [asked.starts[i]], [asked.kv_lens[i]], slots)
    return Problem(problem.q[:, row : row + row_len].contiguous(), problem.k_buffers, own)


def check(problem: Problem, *, backend: Backend = "auto", **options: Any) -> torch.Tensor:
    """What `question_mass` returns, compared with its definition."""
    found = question_mass(*problem, **options, backend=backend)
    expected = question_mass_reference(*problem, **options)
    assert (found.dtype, found.shape) == (torch.float32, problem.questions.kv_slots.shape)
    torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=1e-5)
    return found


def given(**options: Any) -> dict[str, Any]:
    """Arguments by name, `sinks` as a number of heads."""
    heads = options.pop("sinks", None)
    if heads is not None:
        options["sinks"] = [torch.linspace(-3, 4, heads).bfloat16(), torch.linspace(2, -1, heads).bfloat16()]
    return {"sm_scale": 0.25} | options
