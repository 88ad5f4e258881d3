"""What SGLang chooses for real checkpoints on three generations of GPUs stands, or is refused in one sentence."""

from __future__ import annotations

from pathlib import Path

import pytest

import stock_choices
from sglang_chunk_cache.start.pool_check import POOL_DTYPES
from sglang_chunk_cache.start.refusals import ATTENTION_BACKENDS
from stock_choices import GPUS, LLAMA, STARTS, Choice, accepted, checkpoints, choices

PAGE = Path(__file__).parents[3] / "docs" / "checkpoints.md"
BACKENDS = {"sm_80": "flashinfer", "sm_90": "fa3", "sm_100": "trtllm_mha"}
"""What stock SGLang 0.5.23 prefers for most models."""


def both(gpu: str, name: str) -> tuple[Choice, Choice]:
    """With the chunk cache, and without it."""
    return choices()[gpu].ours[name], choices()[gpu].stock[name]


def test_checkpoints_name_their_sources():
    assert len(checkpoints()) >= 92
    assert all(checkpoint["source"] for checkpoint in checkpoints().values())


def test_the_most_served_are_thirty_and_most_are_accepted():
    names = [name for name, one in checkpoints().items() if one.get("list") == "most served"]
    assert len(names) == 30
    assert sum(accepted(name) is not None for name in names) >= 20
    assert accepted(LLAMA) == "as it is"
    assert accepted("deepseek-ai/DeepSeek-R1") == "with flags"
    assert accepted("deepseek-ai/DeepSeek-V4-Pro") is None


@pytest.mark.parametrize(
    ("name", "word"),
    [
        ("deepseek-ai/DeepSeek-V3.2", "an index of its own, whose keys would have to move too; no flag helps"),
        ("zai-org/GLM-5.2", "an index of its own"),
        ("MiniMaxAI/MiniMax-M3", "an index of its own"),
        ("deepseek-ai/DeepSeek-V4-Pro", "blocks that begin at fixed places of the prompt"),
        ("google/gemma-4-31B-it", "other heads than the rest"),
        ("XiaomiMiMo/MiMo-V2-Flash", "other heads than the rest"),
        ("meta-llama/Llama-4-Scout-17B-16E-Instruct", "local attention (Llama 4); no flag helps"),
    ],
)
@pytest.mark.parametrize("gpu", GPUS)
def test_model_is_refused_by_name(gpu, name, word):
    ours, stock = both(gpu, name)
    assert word in str(ours.refused)
    assert stock.reason is None


def test_a_class_that_sglang_does_not_have_is_not_served():
    assert both("sm_90", "HuggingFaceTB/SmolLM3-3B")[0].error == "SGLang 0.5.23 does not serve SmolLM3ForCausalLM"


def test_windows_of_one_pool_need_a_backend_that_asks_each_layer():
    name = "stepfun-ai/Step-3.5-Flash"
    assert "flashinfer leaves out the windows" in str(both("sm_80", name)[0].refused)
    assert both("sm_90", name)[0].attention == ("fa3", "fa3")
    assert both("sm_80", f"{name}, --attention-backend fa3")[0].attention == ("fa3", "fa3")


@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize("name", [*checkpoints(), *STARTS])
def test_choice_of_stock_stands_or_is_refused_in_one_sentence(gpu, name):
    ours, stock = both(gpu, name)
    if ours.refused is not None:
        assert "--chunk-cache" in ours.refused
        assert ours.refused.endswith(".")
        assert "\n" not in ours.refused
        return
    assert ours == stock
    if ours.error is None:
        assert set(ours.attention) <= set(ATTENTION_BACKENDS)
        assert ours.kv in POOL_DTYPES


@pytest.mark.parametrize("gpu", GPUS)
def test_backends_are_those_of_the_generation(gpu):
    assert both(gpu, LLAMA)[0].attention == (BACKENDS[gpu], BACKENDS[gpu])


@pytest.mark.parametrize(
    ("name", "kv"),
    [
        ("ModelOpt FP8, quantization_config, FP8 KV", "float8_e4m3fn"),
        ("ModelOpt FP8, hf_quant_config.json, FP8 KV", "float8_e4m3fn"),
        ("ModelOpt NVFP4, hf_quant_config.json, FP8 KV", "float8_e4m3fn"),
        ("compressed-tensors with kv_cache_scheme in FP8", "float8_e4m3fn"),
        ("e4m3", "float8_e4m3fn"),
        ("fa3, e5m2", "float8_e5m2"),  # SGLang's triton attends in fa3's place
    ],
)
def test_fp8_kv_is_served_whoever_asks_for_it(name, kv):
    ours = both("sm_90", name)[0]
    assert (ours.reason, ours.kv) == (None, kv)


@pytest.mark.parametrize("name", ["fa4, e4m3", "trtllm_mha, e5m2"])
def test_fp8_kv_is_refused_where_the_backend_does_not_read_it(name):
    backend = name.partition(",")[0]
    assert f"attention backend {backend} does not read" in str(both("sm_100", name)[0].refused)


def test_fp8_weights_with_a_16_bit_kv_cache_are_served():
    assert both("sm_90", "ModelOpt FP8, hf_quant_config.json, 16-bit KV")[0].kv == "bfloat16"


@pytest.mark.parametrize(
    ("name", "word"),
    [
        ("deterministic, flashinfer", "--enable-deterministic-inference turns the radix cache off with the attention"),
        ("deterministic, any attention", 'add "attention": "runs" to --chunk-cache-config'),
        (
            "deterministic, cacheblend",
            "works between layers, which makes answers depend on the batch, against --enable-det",
        ),
        ("on policy", "--rl-on-policy-target turns the radix cache off with the attention backend flashinfer"),
        ("hnd", "SGLANG_USE_HND_KVCACHE"),
        ("post-capture", "SGLANG_ENABLE_POST_CAPTURE_KV_SIZING"),
    ],
)
@pytest.mark.parametrize("gpu", GPUS)
def test_start_is_refused_by_what_was_given(gpu, name, word):
    assert word in str(both(gpu, name)[0].refused)


def test_determinism_is_served_where_the_radix_cache_stays():
    assert both("sm_90", "deterministic")[0].attention == ("fa3", "fa3")
    assert "attention backend flashinfer" in str(both("sm_100", "deterministic")[0].refused)  # stock's default there
    assert both("sm_100", "deterministic, triton")[0].attention == ("triton", "triton")


@pytest.mark.parametrize(
    ("name", "attention", "page_size", "prefill_graph"),
    [
        ("split", ("triton", "flashinfer"), 64, "breakable"),
        ("fa4", ("fa4", "fa4"), 128, "breakable"),
        ("full prefill graphs", ("trtllm_mha", "trtllm_mha"), 64, "full"),
        ("post-capture, no graphs", ("trtllm_mha", "trtllm_mha"), 64, "disabled"),
    ],
)
def test_start_is_served_as_it_was_asked_for(name, attention, page_size, prefill_graph):
    found = both("sm_100", name)[0]
    assert (found.attention, found.page_size, found.prefill_graph) == (attention, page_size, prefill_graph)


def test_page_has_the_tables_of_today():
    assert stock_choices.tables() in PAGE.read_text(encoding="utf-8"), "run python test/stock_choices.py"
