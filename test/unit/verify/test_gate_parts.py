"""The gate without a server: its measures, what ranks agree on, what it forgets, and its file."""

from __future__ import annotations

import json
import math
from array import array
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from chunk_cache.gate.controller import Decision, TargetController
from chunk_cache.gate.target import Step, Target
from chunk_cache.gate.verification_ledger import QualityLedger
from chunk_cache.gate.verification_queue import Candidate
from chunk_cache.options.request_options import RequestOptions
from chunk_cache.prompt.chunk_prompt import ChunkPrompt
from sglang_chunk_cache.kv.ranks import of_one_rank
from sglang_chunk_cache.request.chunk_request import ChunkRequest
from sglang_chunk_cache.telemetry.gate_metrics import GateMetrics
from sglang_chunk_cache.verification.gate import MAX_NATS, Gate
from sglang_chunk_cache.verification.measure import ExactAnswer, measure
from sglang_chunk_cache.verification.state_file import StateFile

VOCAB_SIZE = 50
TARGET = Target(0.1, 95.0, (Step("epic", 0.15), Step("epic", 0.5)))
PROMPT = array("q", [1, 2, 3])


def logits(seed: int) -> torch.Tensor:
    return torch.randn(VOCAB_SIZE, generator=torch.Generator().manual_seed(seed))


def open_gate(**fields: object) -> Gate:
    values = {"target": TARGET, "reduce_max": of_one_rank, "state_file": None, **fields}
    return Gate(1.0, metrics=GateMetrics(enabled=False, model=""), **values)  # type: ignore[arg-type]


def state(**fields: Any) -> ChunkRequest:
    """Of a fused request."""
    request = ChunkRequest(ChunkPrompt(RequestOptions(spans=((0, 2),), **fields), (b"",)))
    plan: Any = SimpleNamespace(method="epic", ratio=0.15, num_reused=9)
    request.admission.propose(plan)
    return request


def serve(gate: Gate, fused: torch.Tensor) -> Candidate:
    """A request that was answered and waits."""
    one = state()
    gate.steer(one)
    assert one.admission.plan is not None
    gate.admit("r", PROMPT, one, one.admission.plan)
    assert one.verification.candidate is not None
    one.verification.candidate.first_logits = fused
    gate.release(one, array("q", [7]), None)
    candidate = gate.queue.take(10**6)
    assert candidate is not None
    return candidate


def exact_answer(seed: int) -> ExactAnswer:
    return ExactAnswer(logits(seed), [], [], [])


def test_kl_is_that_of_the_whole_vocabulary() -> None:
    p, q = (np.exp(one.double().numpy()) for one in (logits(0), logits(1)))
    p, q = p / p.sum(), q / q.sum()
    found = measure(logits(1), exact_answer(0), array("q", []))
    assert found.kl == pytest.approx(float((p * np.log(p / q)).sum()), abs=1e-6)
    assert (found.agreement, found.nats_lost) == (None, None)
    assert measure(logits(0), exact_answer(0), array("q", [])).kl == pytest.approx(0.0, abs=1e-9)


def test_answers_are_compared_token_by_token() -> None:
    first = logits(0)
    likeliest, other = int(first.argmax()), int(first.argmin())
    lost = float(first.max() - first.min())
    exact = ExactAnswer(first, logprobs=[-0.5, -2.0], best=[-0.5, -1.0], best_ids=[4, 6])
    found = measure(logits(1), exact, array("q", [likeliest, 4, 5]))
    assert found.agreement == pytest.approx(2 / 3)
    assert found.nats_lost == pytest.approx(1.0 / 3)
    found = measure(logits(1), exact, array("q", [other, 4, 5]))
    assert found.agreement == pytest.approx(1 / 3)
    assert found.nats_lost == pytest.approx((lost + 1.0) / 3, abs=1e-5)


def test_a_reply_without_numbers_is_far_off() -> None:
    gate = open_gate()
    gate.complete(serve(gate, logits(0) * math.nan), exact_answer(0))
    assert gate.stats()["newest"][0]["kl"] == MAX_NATS


def test_impossible_tokens_are_far_and_not_infinitely() -> None:
    fused, exact = logits(0), exact_answer(0)
    fused[3] = exact.first_logits[5] = -math.inf
    assert measure(fused, exact, array("q", [])).kl == math.inf
    gate = open_gate()
    gate.complete(serve(gate, fused), exact)
    assert gate.stats()["newest"][0]["kl"] == MAX_NATS
    json.dumps(gate.stats(), allow_nan=False)


def test_ranks_agree_although_they_round_differently() -> None:
    gates = []
    for seed in (1, 2):  # the other rank's measure is larger, or smaller

        def reduce_max(votes: np.ndarray) -> np.ndarray:
            return np.maximum(votes, [300_000_000, 0, 0])

        gate = open_gate(reduce_max=reduce_max)
        close = logits(0) + 1e-3 * logits(seed)
        gate.complete(serve(gate, close), exact_answer(0))
        gates.append(gate)
    kls = [gate.stats()["newest"][0]["kl"] for gate in gates]
    assert kls == [0.3, 0.3]


@pytest.mark.parametrize(
    "fields", [{"method": "epic"}, {"ratio": 0.2}, {"mode": "exact"}, {"mode": "off"}], ids=lambda fields: str(fields)
)
def test_who_says_how_is_served_so(fields: dict[str, Any]) -> None:
    gate, one = open_gate(), state(**fields)
    gate.steer(one)
    assert one.verification.decision is None


def test_a_decision_is_made_once() -> None:
    gate, one = open_gate(), state()
    gate.steer(one)
    assert one.verification.decision == Decision(0, TARGET.steps[0], "the first step, nothing speaks against it")
    for _ in range(2):
        gate.complete(serve(gate, logits(1)), exact_answer(0))
    gate.steer(one)
    assert one.verification.decision is not None
    assert one.verification.decision.number == 0
    other = state()
    gate.steer(other)
    assert other.verification.decision is not None
    assert other.verification.decision.number == 1


def test_other_weights_begin_anew(tmp_path: Path) -> None:
    file = StateFile(str(tmp_path / "gate.json"), "model", is_writer=True)
    gate = open_gate(state_file=file)
    for _ in range(2):
        gate.complete(serve(gate, logits(1)), exact_answer(0))
    kept = (tmp_path / "gate.json").read_text()
    gate.forget()
    gate.complete(serve(gate, logits(1)), exact_answer(0))
    assert gate.stats()["quality"][0]["kl"]["count"] == 1
    assert (tmp_path / "gate.json").read_text() == kept, "of the weights that the server started with"


def test_one_rank_writes_and_all_read(tmp_path: Path) -> None:
    path = str(tmp_path / "gate.json")
    for is_writer in (False, True):
        gate = open_gate(state_file=StateFile(path, "model", is_writer=is_writer))
        gate.complete(serve(gate, logits(1)), exact_answer(0))
        assert Path(path).exists() == is_writer
    again = open_gate(state_file=StateFile(path, "model", is_writer=False))
    assert again.stats()["quality"] == gate.stats()["quality"]


def test_another_target_is_not_taken_over(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = StateFile(str(tmp_path / "gate.json"), "model", is_writer=True)
    gate = open_gate(state_file=file)
    for _ in range(2):
        gate.complete(serve(gate, logits(1)), exact_answer(0))
    ledger, controller = QualityLedger(), TargetController(Target(0.2, 95.0, TARGET.steps))
    file.read(ledger, controller)
    assert ledger.rows() == gate.ledger.rows()
    assert controller.states() == {}
    assert "tells of another target" in caplog.text


def test_a_folder_that_cannot_be_written_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    gate = open_gate(state_file=StateFile(str(tmp_path / "none" / "gate.json"), "model", is_writer=True))
    gate.complete(serve(gate, logits(1)), exact_answer(0))
    assert "cannot be written" in caplog.text


def test_metrics_name_the_model_that_sglang_chose(monkeypatch: pytest.MonkeyPatch) -> None:
    """A flag that was not given is None on the record of the flags."""
    from sglang_chunk_cache.flags.server_args import ChunkCacheArgs
    from sglang_chunk_cache.start import runtime

    monkeypatch.setattr(runtime, "get_serving", lambda: SimpleNamespace(served_model_name="models/llama"))
    named: list[str] = []
    monkeypatch.setattr(runtime, "GateMetrics", lambda *, enabled, model: named.append(model))
    context: Any = SimpleNamespace(server_args=SimpleNamespace(served_model_name=None))
    args, assembler = ChunkCacheArgs(config={"verify_share": 0.5}), SimpleNamespace()
    gate = runtime._create_gate(args, context, assembler, is_counting=True, reduce_max=of_one_rank)  # type: ignore[arg-type]
    assert gate is not None
    assert named == ["models/llama"]
