"""Stock SGLang on the CPU serves a hybrid of states and attention (Qwen3.5's class) as our own forward computes it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from benchmark.quality.synthetic.vocabulary import WORDS
from benchmark.quality.train.export import Run, read_model, write_model
from benchmark.quality.train.hybrid import Hybrid, HybridConfig
from benchmark.quality.train.model import Layout

from server_fixture import Server

pytestmark = pytest.mark.server

CONFIG = HybridConfig(len(WORDS), hidden_size=64, num_layers=4, full_every=2, num_states=2, state_size=16, mlp_size=96)
CLOSE = 1e-4


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A random hybrid, no weight of which is at zero."""
    model = Hybrid(CONFIG, torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(1)
    for name, weight in model.named_parameters():
        if weight.ndim >= 2 and "embed" not in name:
            torch.nn.init.normal_(weight, std=1.5 * weight[0].numel() ** -0.5, generator=generator)
    folder = tmp_path_factory.mktemp("hybrid")
    write_model(Run(CONFIG, 0, 0, 0, model.state_dict()), folder)
    return folder


@pytest.fixture(scope="module")
def hybrid(folder):
    with Server(folder, "--dtype", "float32", "--max-total-tokens", "8192", "--chunked-prefill-size", "512") as server:
        yield server


def worst_difference(model, server, prompts, num_generated):
    """Of the log probabilities of generated tokens, all prompts at once; and how many tokens were cached."""

    def ask(ids):
        body = {"input_ids": ids, "return_logprob": True}
        body["sampling_params"] = {"temperature": 0, "max_new_tokens": num_generated, "ignore_eos": True}
        return server.post("/generate", body).json()

    with ThreadPoolExecutor(len(prompts)) as pool:
        replies = list(pool.map(ask, prompts))
    worst = 0.0
    for ids, reply in zip(prompts, replies, strict=True):
        every = torch.tensor([*ids, *reply["output_ids"]])
        layout = Layout(len(every), torch.arange(len(every))[None], None)
        with torch.no_grad():
            expected = model.logits(model(every[None], layout))[0].log_softmax(-1)
        for place, (found, token, _) in enumerate(reply["meta_info"]["output_token_logprobs"], start=len(ids) - 1):
            worst = max(worst, abs(found - float(expected[place, token])))
    return worst, [reply["meta_info"]["cached_tokens"] for reply in replies]


def test_prompts_chunks_of_prompts_and_continued_prompts(folder, hybrid):
    """Six at once, one longer than a step; then again with more behind, from states that the radix cache kept."""
    model = read_model(folder, CONFIG)
    draw = torch.Generator().manual_seed(2)
    prompts = [
        torch.randint(2, len(WORDS), (length,), generator=draw).tolist() for length in (5, 64, 130, 300, 301, 900)
    ]
    worst, cached = worst_difference(model, hybrid, prompts, 12)
    assert worst < CLOSE
    assert not any(cached)
    longer = [[*prompt, *prompts[0]] for prompt in prompts]
    worst, cached = worst_difference(model, hybrid, longer, 4)
    assert worst < CLOSE
    assert max(cached) >= 256, "SGLang keeps states at multiples of its interval"
