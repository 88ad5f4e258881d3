"""The reference of hybrids is transformers' Qwen3.5, and a prompt put together from stored pieces is the prompt."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoTokenizer, Qwen3_5ForCausalLM

from reference_hybrid import HybridConfig, Prompt, Run, random_hybrid, read_model, write_model

TINY = HybridConfig(183, hidden_size=32, num_layers=4, full_every=2, num_states=2, state_size=8, mlp_size=48)
CLOSE = dict(atol=1e-4, rtol=1e-4)


def ids_of(seed, size):
    return torch.randint(0, TINY.vocab_size, (size,), generator=torch.Generator().manual_seed(seed)).tolist()


def test_logits_are_those_of_transformers(tmp_path):
    write_model(random_hybrid(TINY, seed=1), tmp_path)
    theirs, loading = Qwen3_5ForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, output_loading_info=True)
    assert not any(loading.values()), loading
    assert len(AutoTokenizer.from_pretrained(tmp_path)) == TINY.vocab_size
    ids = ids_of(2, 150)
    with torch.no_grad():
        expected = theirs(torch.tensor([ids])).logits[0]
    torch.testing.assert_close(Prompt(read_model(tmp_path, TINY), [Run(ids)]).logits, expected, **CLOSE)


@pytest.mark.parametrize("skip", [0, 1, 3, 20])
def test_pieces_of_the_same_prompt_are_the_prompt(skip):
    """Whatever is computed and whatever is stored."""
    model, ids = random_hybrid(TINY, seed=1), ids_of(3, 110)
    whole = Prompt(model, [Run(ids)])
    parts = [Run(ids[:10])]
    for start, end in ((10, 50), (50, 91)):
        parts += [Run(ids[start : start + skip])] if skip else []
        parts.append(whole.piece(start + skip, end))
    prompt = Prompt(model, [*parts, Run(ids[91:])])
    torch.testing.assert_close(prompt.logits[-19:], whole.logits[-19:], **CLOSE)


def test_pieces_of_another_context_are_not_the_prompt():
    """Else the tests of servers could not tell what was reused."""
    model, ids = random_hybrid(TINY, seed=1), ids_of(4, 80)
    other = Prompt(model, [Run([*ids_of(5, 20), *ids[10:60]])])
    prompt = Prompt(model, [Run(ids[:10]), other.piece(20, 70), Run(ids[60:])])
    whole = Prompt(model, [Run(ids)])
    assert (prompt.logits[-20:].log_softmax(-1) - whole.logits[-20:].log_softmax(-1)).abs().max() > 0.01
