"""What a verification finds: `measure` compares a fused reply with the exact prefill of the same tokens."""

from __future__ import annotations

from array import array
from dataclasses import dataclass

import torch

from chunk_cache.gate.verification_ledger import Measure


@dataclass(frozen=True)
class ExactAnswer:
    """The exact prefill of a prompt and of what was sent behind it.

    Attributes:
        first_logits: `[vocab_size]` float32 behind the prompt, on the device.
        logprobs: `[num_sent - 1]` of the tokens sent, from the second on, in nats.
        best, best_ids: `[num_sent - 1]` log-probability and id of the likeliest token at the same places.
    """

    first_logits: torch.Tensor
    logprobs: list[float]
    best: list[float]
    best_ids: list[int]


def measure(fused_logits: torch.Tensor, exact: ExactAnswer, sent: array[int]) -> Measure:
    """See `chunk_cache.gate.verification_ledger.Measure`.

    Both are the model's own logits, before penalties, temperature and sampling, so KL is that of the model.

    Args:
        fused_logits: `[vocab_size]` behind the prompt, of the fused request.
        sent: the tokens of the answer.
    """
    first = torch.log_softmax(exact.first_logits.double(), dim=-1)
    other = torch.log_softmax(fused_logits.double(), dim=-1)
    # A token that is impossible in the exact prefill adds nothing.
    kl = torch.where(first == -torch.inf, 0.0, first.exp() * (first - other)).sum()
    if not sent:
        return Measure(float(kl))
    logprobs = [float(first[sent[0]]), *exact.logprobs]
    best_id = int(first.argmax())
    best, best_ids = [float(first[best_id]), *exact.best], [best_id, *exact.best_ids]
    assert len(logprobs) == len(best) == len(sent), (len(logprobs), len(best), len(sent))
    return Measure(
        kl=float(kl),
        agreement=sum(map(int.__eq__, best_ids, sent)) / len(sent),
        nats_lost=(sum(best) - sum(logprobs)) / len(sent),
    )
