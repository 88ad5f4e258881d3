"""QuestionPass: every request's scores are the definition's, whatever the layers, the batch and the room for Q."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sgl_kernel_ext.attention_mass.naive import attention_mass_reference
from sglang_chunk_cache.forward.attending import ObservedRows
from sglang_chunk_cache.forward.selection import question_pass as module
from sglang_chunk_cache.forward.selection.question_pass import QuestionPass

NUM_LAYERS, NUM_Q_HEADS, HEAD_DIM, SCALE = 4, 4, 8, 0.3
ALL = frozenset(range(NUM_LAYERS))
# Keys, rows in the forward, rows of the question, rows of the answer behind it, how it is scored; None = it asks not.
REQUESTS = (
    (30, 9, 4, 2, ("fusionrag", ALL)),
    (12, 12, 0, 0, None),
    (41, 5, 5, 0, ("fusionrag", ALL)),
    (23, 3, 1, 1, ("infoflow", frozenset({1, 3}))),
)


class Pool:
    """K of the layers, in slots that are in no order; layers may have another number of heads."""

    dtype = torch.float32

    def __init__(self, kv_heads: list[int]) -> None:
        rng = torch.Generator().manual_seed(0)
        num_keys, num_rows = (sum(one[i] for one in REQUESTS) for i in (0, 1))
        self.k = [torch.randn(num_keys, heads, HEAD_DIM, generator=rng) for heads in kv_heads]
        self.q = torch.randn(NUM_LAYERS, num_rows, NUM_Q_HEADS, HEAD_DIM, generator=rng)
        self.slots = torch.randperm(num_keys, generator=rng)

    def get_key_buffer(self, layer: int) -> torch.Tensor:
        return self.k[layer]

    get_value_buffer = get_key_buffer


class Request:
    """What a `QuestionPass` knows of a `RequestProgress`."""

    def __init__(self, num_question: int, num_answer: int, scoring: tuple[str, frozenset[int]] | None) -> None:
        self.num_question, self.num_answer = num_question, num_answer
        self.question_scoring = scoring
        self.question_scores: torch.Tensor | None = None
        self.seconds = 0.0

    def count_seconds(self, seconds: float) -> None:
        self.seconds += seconds


def ask(pool: Pool, which: list[int], sinks: list[torch.Tensor | None]) -> list[Request]:
    """A forward in which the questions of some of the requests ask."""
    requests = [Request(*REQUESTS[i][2:]) for i in which]
    slots = [pool.slots.split([one[0] for one in REQUESTS])[i] for i in which]
    rows: Any = SimpleNamespace(
        kv_pool=pool,
        kernel="torch",
        kv_lens=[REQUESTS[i][0] for i in which],
        kv_indices=torch.cat(slots),
        slots_of=lambda i: slots[i],
    )
    own = [torch.arange(sum(one[1] for one in REQUESTS)).split([one[1] for one in REQUESTS])[i] for i in which]
    members = [i for i, request in enumerate(requests) if request.question_scoring is not None]
    asking = QuestionPass(requests, members, [len(one) for one in own], rows, tp_size=1)
    for layer_id in range(NUM_LAYERS):
        q = pool.q[layer_id, torch.cat(own)]
        layer: Any = SimpleNamespace(
            layer_id=layer_id, tp_q_head_num=NUM_Q_HEADS, qk_head_dim=HEAD_DIM, scaling=SCALE, logit_cap=0.0
        )
        if asking.observes(layer_id):
            q = q.clone()
            asking.observe(ObservedRows(layer, q.flatten(1), torch.empty(0), [], sinks[layer_id]))
            q.fill_(float("nan"))  # a graph writes over it
    asking.finish()
    return requests


def expected(pool: Pool, i: int, sinks: list[torch.Tensor | None]) -> torch.Tensor:
    kv_len, num_rows, num_question, num_answer, scoring = REQUESTS[i]
    assert scoring is not None
    method, layers = scoring
    first = sum(one[1] for one in REQUESTS[:i]) + num_rows - num_answer - num_question
    slots = pool.slots.split([one[0] for one in REQUESTS])[i]
    at = torch.arange(num_question) + kv_len - num_answer - num_question
    total = torch.zeros(kv_len, dtype=torch.float64)
    for layer in layers:
        q, k = pool.q[layer, first : first + num_question], pool.k[layer][slots]
        options = {"sm_scale": SCALE, "squared": method == "infoflow", "sinks": sinks[layer]}
        total += attention_mass_reference(q, k, at, **options)[0]
    return total


SINKS: dict[str, list[torch.Tensor | None]] = {
    "no sinks": [None] * NUM_LAYERS,
    "sinks": [torch.linspace(-2, 3, NUM_Q_HEADS) + i for i in range(NUM_LAYERS)],
    "sinks of some layers": [None, torch.zeros(NUM_Q_HEADS), None, None],
}


@pytest.mark.parametrize("sinks", SINKS.values(), ids=SINKS)
@pytest.mark.parametrize("kv_heads", [[2, 2, 2, 2], [2, 4, 2, 4]], ids=["layers alike", "two layouts"])
@pytest.mark.parametrize("most_bytes", [1, 5000, 1 << 20])
def test_scores_are_those_of_the_definition(
    most_bytes: int, kv_heads: list[int], sinks: list[torch.Tensor | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_BYTES", most_bytes)
    pool = Pool(kv_heads)
    for i, request in enumerate(ask(pool, [0, 1, 2, 3], sinks)):
        if REQUESTS[i][4] is None:
            assert request.question_scores is None
            continue
        assert request.question_scores is not None
        torch.testing.assert_close(request.question_scores.double(), expected(pool, i, sinks), atol=1e-5, rtol=1e-5)
        assert request.seconds > 0


@pytest.mark.parametrize("most_bytes", [1, 1 << 20])
def test_a_request_is_scored_bit_for_bit_as_alone(most_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    pool, sinks = Pool([2] * NUM_LAYERS), SINKS["no sinks"]
    together = ask(pool, [0, 1, 2, 3], sinks)
    monkeypatch.setattr(module, "MAX_BYTES", most_bytes)
    for i in (0, 2, 3):
        (alone,) = ask(pool, [i], sinks)
        assert torch.equal(alone.question_scores, together[i].question_scores)
