"""Classes of models that need more than Llama does: SGLang on the CPU platform computes what transformers does."""

from __future__ import annotations

import pytest
import torch
import transformers

from exactness.runner import Config, run_cases

CASE = "prompts"


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind",
    [
        *("qwen2_moe", "deepseek_v2", "gemma3", "gpt_oss"),
        *(pytest.param(kind, marks=pytest.mark.all) for kind in ("mixtral", "glm4_moe", "deepseek_v3")),
        *(pytest.param(kind, marks=pytest.mark.all) for kind in ("qwen3_5", "qwen3_next")),
    ],
)
def test_first_tokens_are_those_of_transformers(kind: str) -> None:
    config = Config(kind=kind, layers=4)
    replies = run_cases(config, is_ours=False, names=[CASE], module="exactness.platform_cases")[CASE]
    assert not isinstance(replies, str), replies
    model = transformers.AutoModelForCausalLM.from_pretrained(config.model_dir, dtype=torch.float32).eval()
    for prompt, reply in replies:
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *reply.output_ids[:-1]]])).logits[0]
        best = logits[len(prompt) - 1 :].log_softmax(-1)
        assert best.argmax(-1).tolist() == reply.output_ids
        assert best.max(-1).values.tolist() == pytest.approx(reply.logprobs, abs=1e-3)
