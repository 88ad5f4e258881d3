"""Which models and KV pools are refused at start, and why; no server is started."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.server_args import ServerArgs

from chunk_cache.options.config import parse_config
from sglang_chunk_cache.api.capabilities import check_default, what_fixes_rows
from sglang_chunk_cache.flags.server_args import ChunkCacheArgs, StartRefused
from sglang_chunk_cache.start import model_refusals, pool_check, refusals
from sglang_chunk_cache.start.runtime import create_runtime
from sglang_chunk_cache.start.window_check import check_windows

SMALL = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "torch_dtype": "float32",
}


def model_config(folder: Path, model_type: str, architecture: str, **extra: Any) -> Any:
    from sglang.srt.configs.model_config import ModelConfig

    config = {**SMALL, "model_type": model_type, "architectures": [architecture], **extra}
    (folder / "config.json").write_text(json.dumps(config))
    return ModelConfig(model_path=str(folder), **({"is_embedding": True} if architecture == "LlamaModel" else {}))


MLA = {
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "n_routed_experts": 4,
    "moe_intermediate_size": 32,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "num_key_value_heads": 4,
}
LLAMA = ("llama", "LlamaForCausalLM")
LONG_ROPE = {
    "rope_scaling": {
        "rope_type": "longrope",
        "factor": 4.0,
        "short_factor": [1.0] * 8,
        "long_factor": [2.0] * 8,
        "original_max_position_embeddings": 1024,
    }
}
SERVED: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": (*LLAMA, {}),
    "llama linear rope": (*LLAMA, {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}),
    "llama 3.1": (
        *LLAMA,
        {
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 1024,
            }
        },
    ),
    "llama yarn": (
        *LLAMA,
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}},
    ),
    "llama dynamic rope": (*LLAMA, {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}),
    "mistral without a window": ("mistral", "MistralForCausalLM", {"sliding_window": None}),
    "qwen2 with its window off": (
        "qwen2",
        "Qwen2ForCausalLM",
        {"use_sliding_window": False, "sliding_window": 1024, "max_window_layers": 2},
    ),
    "qwen3": ("qwen3", "Qwen3ForCausalLM", {"head_dim": 16}),
    "mixtral": ("mixtral", "MixtralForCausalLM", {"num_local_experts": 4, "sliding_window": None}),
    "latent attention": ("deepseek_v2", "DeepseekV2ForCausalLM", MLA),
    "gemma 2, with windows": ("gemma2", "Gemma2ForCausalLM", {"sliding_window": 1024, "head_dim": 16}),
    "windows that SGLang would keep in a pool of their own": (*LLAMA, {"is_hybrid_swa": True}),
    "windows beside sinks": ("gpt_oss", "GptOssForCausalLM", {"sliding_window": 128, "head_dim": 16}),
    "a class that nobody listed": ("stablelm", "PersimmonForCausalLM", {}),
}


@pytest.mark.parametrize("name", SERVED)
def test_model_is_served(tmp_path, name):
    model_type, architecture, extra = SERVED[name]
    model_refusals.check_model(model_config(tmp_path, model_type, architecture, **extra))


def test_long_rope_is_served_within_its_original_context(tmp_path):
    config = model_config(tmp_path, *LLAMA, **LONG_ROPE)
    config.context_len = 1024
    model_refusals.check_model(config)


REFUSED: dict[str, tuple[str, str, dict[str, Any], str]] = {
    "windows of other heads": (
        "gpt_oss",
        "GptOssForCausalLM",
        {"sliding_window": 128, "head_dim": 16, "swa_head_dim": 32},
        "other heads than the rest",
    ),
    "an index of its own": (
        "deepseek_v32",
        "DeepseekV32ForCausalLM",
        {**MLA, "index_topk": 8, "index_n_heads": 4, "index_head_dim": 16},
        "an index of its own, whose keys would have to move too; no flag helps",
    ),
    "GLM-5": ("glm_moe_dsa", "GlmMoeDsaForCausalLM", {**MLA, "index_topk": 8}, "an index of its own"),
    "MiniMax M3": ("minimax_m2", "MiniMaxM3SparseForCausalLM", {"head_dim": 16}, "an index of its own"),
    "DeepSeek V4": (
        "deepseek_v4",
        "DeepseekV4ForCausalLM",
        {**MLA, "sliding_window": 8, "compress_ratios": [4, 128], "index_topk": 8, "index_head_dim": 16},
        "blocks that begin at fixed places of the prompt, and a passage that moves falls into other blocks; no flag",
    ),
    "local attention": (*LLAMA, {"attention_chunk_size": 64}, "attention_chunk_size"),
    "Llama 4": (
        "llama4",
        "Llama4ForConditionalGeneration",
        {"text_config": {**SMALL, "model_type": "llama4_text", "attention_chunk_size": 64}},
        "local attention (Llama 4); no flag helps",
    ),
    "proportional rope": (
        *LLAMA,
        {"is_hybrid_swa": True, "rope_parameters": {"rope_type": "proportional", "rope_theta": 10000.0}},
        "its rope type is proportional, not default, linear, llama3, yarn, dynamic, longrope; no flag helps",
    ),
    "state space": (
        "falcon_h1",
        "FalconH1ForCausalLM",
        {"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 16, "head_dim": 16},
        "in Mamba 2 a passage multiplies the state of a head by one number, not by a matrix",
    ),
    "Granite 4": (
        "granitemoehybrid",
        "GraniteMoeHybridForCausalLM",
        {"layer_types": ["mamba", "attention"], "mamba_n_heads": 2, "mamba_d_head": 64},
        "in Mamba 2 a passage",
    ),
    "Nemotron": (
        "nemotron_h",
        "NemotronHForCausalLM",
        {"hybrid_override_pattern": "M*", "head_dim": 16, "mamba_num_heads": 4, "mamba_head_dim": 16},
        "in Mamba 2 a passage",
    ),
    "Kimi Linear": (
        "kimi_linear",
        "KimiLinearForCausalLM",
        {
            **MLA,
            "linear_attn_config": {
                "kda_layers": [1],
                "full_attn_layers": [2],
                "head_dim": 16,
                "num_heads": 4,
                "short_conv_kernel_size": 4,
            },
        },
        "in Kimi Delta Attention each key channel decays by a factor of its own",
    ),
    "short convolutions": (
        "lfm2",
        "Lfm2ForCausalLM",
        {"layer_types": ["conv", "full_attention"]},
        "its short convolutions keep their last inputs alone; no flag",
    ),
    "long rope beyond its original context": (*LLAMA, LONG_ROPE, "add --context-length 1024"),
    "embedding": ("llama", "LlamaModel", {}, "embedding"),
    "reward": ("llama", "LlamaForSequenceClassificationWithNormal_Weights", {}, "reward"),
    "encoder-decoder": (
        "whisper",
        "WhisperForConditionalGeneration",
        {"d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4},
        "encoder-decoder",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_model_is_refused_with_one_sentence(tmp_path, name):
    model_type, architecture, extra, word = REFUSED[name]
    with pytest.raises(StartRefused) as refused:
        model_refusals.check_model(model_config(tmp_path, model_type, architecture, **extra))
    assert word in str(refused.value.code)
    assert "\n" not in str(refused.value.code)


@pytest.mark.parametrize("prefix", ["Llava", "Qwen2_5_VL", "Gemma3"])
def test_texts_of_a_model_that_sees_images_are_served(tmp_path, prefix):
    import transformers
    from sglang.srt.configs.model_config import ModelConfig

    config = getattr(transformers, f"{prefix}Config")(architectures=[f"{prefix}ForConditionalGeneration"])
    config.save_pretrained(tmp_path)
    model_refusals.check_model(ModelConfig(model_path=str(tmp_path)))


def test_images_of_gemma_are_refused(tmp_path):
    from sglang.srt.configs.model_config import ModelConfig
    from transformers import Gemma3Config

    Gemma3Config(architectures=["Gemma3ForConditionalGeneration"]).save_pretrained(tmp_path)
    with pytest.raises(StartRefused, match="drop --enable-multimodal"):
        model_refusals.check_model(ModelConfig(model_path=str(tmp_path), enable_multimodal=True))


# The KV pool.


def kv_pool(dtype: torch.dtype = torch.bfloat16, **extra: Any) -> MHATokenToKVPool:
    shape = {"head_num": 2, "head_dim": 16, "layer_num": 1, "device": "cpu", "enable_memory_saver": False}
    return MHATokenToKVPool(8, 4, dtype, **shape, **extra)


@pytest.mark.parametrize("name", pool_check.POOL_DTYPES)
def test_pool_of_a_type_that_we_can_move(name):
    pool_check.check_pool(kv_pool(getattr(torch, name)))


def test_pool_of_another_type_is_refused():
    with pytest.raises(StartRefused, match="holds int8, which --chunk-cache cannot move; add --kv-cache-dtype bf16"):
        pool_check.check_pool(kv_pool(torch.int8))


@pytest.mark.parametrize(
    ("dtype", "backends", "unread"),
    [
        (torch.float8_e4m3fn, ("fa3", "trtllm_mha"), None),
        (torch.float8_e5m2, ("flashinfer", "triton"), None),
        (torch.float8_e4m3fn, ("fa4", "fa3"), "fa4"),
        (torch.float8_e5m2, ("triton", "trtllm_mha"), "trtllm_mha"),
        (torch.bfloat16, ("fa4", "trtllm_mha"), None),
    ],
)
def test_pool_must_be_read_by_the_backends(dtype, backends, unread):
    if unread is None:
        pool_check.check_pool(kv_pool(dtype), backends)
        return
    with pytest.raises(StartRefused, match=f"attention backend {unread} does not read, .* --kv-cache-dtype bf16"):
        pool_check.check_pool(kv_pool(dtype), backends)


@pytest.mark.parametrize(
    ("scale", "scale_float", "device", "backend", "word"),
    [
        (None, None, "cuda", "torch_native", None),
        (1.0, 1.0, "cuda", "torch_native", None),
        (0.5, 0.5, "cpu", "torch_native", None),
        (0.5, 0.5, "cuda", "fa3", None),
        (0.5, 0.5, "cuda", "torch_native", "torch_native does not read scales"),
        (0.5, None, "cuda", "fa3", "--quantization-param-path"),
    ],
)
def test_scales_of_the_kv_cache_must_be_read(scale, scale_float, device, backend, word):
    layer = SimpleNamespace(k_scale=scale, k_scale_float=scale_float, v_scale_float=scale_float)
    pool = SimpleNamespace(dtype=torch.float8_e4m3fn, device=device)
    if word is None:
        pool_check.check_scales(pool, [layer], (backend,))
        return
    with pytest.raises(StartRefused, match=word):
        pool_check.check_scales(pool, [layer], (backend,))
    pool_check.check_scales(SimpleNamespace(dtype=torch.bfloat16), [layer], (backend,))


@pytest.mark.parametrize(
    ("window", "of_layers", "backends", "named"),
    [
        (None, (-1, 511), ("fa3", "flashinfer"), "flashinfer"),
        (None, (-1, 511), ("triton", "triton"), "triton"),
        (None, (-1, 511), ("fa3", "trtllm_mha"), None),
        (None, (-1, -1), ("flashinfer", "flashinfer"), None),
        (511, (-1, 511), ("flashinfer", "flashinfer"), None),
    ],
)
def test_windows_must_be_planned_by_the_backends(window, of_layers, backends, named):
    if named is None:
        check_windows(window, of_layers, backends)
        return
    with pytest.raises(StartRefused, match=f"attention backend {named} leaves out the windows .* --attention-backend"):
        check_windows(window, of_layers, backends)


def test_latent_attention_stores_no_scales():
    layer = SimpleNamespace(k_scale=0.5, k_scale_float=0.5, v_scale_float=0.5)
    pool = SimpleNamespace(dtype=torch.float8_e4m3fn, device="cuda", kv_lora_rank=8)
    with pytest.raises(StartRefused, match=r"latent attention \(MLA\) does not store with scales"):
        pool_check.check_scales(pool, [layer], ("fa3",))


def test_pool_of_another_layout_is_refused(monkeypatch):
    monkeypatch.setenv("SGLANG_USE_HND_KVCACHE", "1")
    with pytest.raises(StartRefused, match="MHATokenToKVPool of the layout hnd, and"):
        pool_check.check_pool(kv_pool())
    with pytest.raises(StartRefused, match="SimpleNamespace of the layout None, and"):
        pool_check.check_pool(SimpleNamespace())


def test_scheduler_checks_its_pool():
    allocator = SimpleNamespace(get_kvcache=lambda: kv_pool(torch.int8))
    runner = SimpleNamespace(prefill_attention_backend_str="triton", decode_attention_backend_str="triton")
    context = SimpleNamespace(tp_worker=SimpleNamespace(model_runner=runner))
    with pytest.raises(StartRefused, match="the KV cache holds int8"):
        create_runtime(SimpleNamespace(token_to_kv_pool_allocator=allocator), ChunkCacheArgs(), context)


@pytest.mark.parametrize(
    ("extra", "dtype", "word"),
    [
        ({"head_dim": 128}, "bfloat16", None),
        ({"head_dim": 64}, "float16", None),
        ({"head_dim": 128}, "float32", "float32"),
        ({"head_dim": 96}, "bfloat16", "96, 96"),
        ({"head_dim": 64, "learnable_sink": True}, "bfloat16", "it knows no attention sinks"),
    ],
)
def test_flashinfer_serves_what_it_has_kernels_for(tmp_path, monkeypatch, extra, dtype, word):
    monkeypatch.delitem(sys.modules, "flashinfer", raising=False)  # our CPU platform shuts it out
    config = model_config(tmp_path, *LLAMA, **extra)
    config.dtype = getattr(torch, dtype)
    if word is None:
        model_refusals.check_flashinfer(config)
        return
    with pytest.raises(StartRefused) as refused:
        model_refusals.check_flashinfer(config)
    assert 'kernel: "flashinfer"' in str(refused.value.code)
    assert word in str(refused.value.code)


def test_statistics_of_layers_that_the_model_does_not_have_are_refused():
    config = parse_config({"statistics_layers": [3, 99]})
    with pytest.raises(StartRefused, match=r"statistics_layers: layer 99, but the model has layers 0 to 11; name"):
        refusals._check_layers(config, 12)
    refusals._check_layers(parse_config({"statistics_layers": [3, 11]}), 12)
    refusals._check_layers(parse_config({"statistics_layers": "all"}), 2)


def test_options_of_layers_that_the_model_does_not_have_are_refused():
    args = ChunkCacheArgs(config={"options": {"layers": [0, 5], "check_layer": 1}})
    check_default(args, 6, None)
    with pytest.raises(
        StartRefused, match=r"--chunk-cache-config.options.layers: fusionrag names layer 5, but the mod"
    ):
        check_default(args, 5, None)
    given = ChunkCacheArgs(method="epic", config={"options": {"focus_window": 3}})
    with pytest.raises(StartRefused, match=r"config: options: .* 'epic' with these options works between layers"):
        check_default(given, 6, what_fixes_rows(ServerArgs(model_path="none", enable_deterministic_inference=True)))


def test_replicas_do_not_share_a_file():
    config = parse_config({"verify_share": 0.1, "verify_file": "gate.json"})
    with pytest.raises(StartRefused, match="verify_file: replicas"):
        refusals.check_replicas(config, 2)
    refusals.check_replicas(config, 1)
    refusals.check_replicas(parse_config({"verify_share": 0.1}), 2)
    events = {"endpoint": "tcp://*:5557", "replay_endpoint": "tcp://*:5558", "salt": "x"}
    with pytest.raises(StartRefused, match="--chunk-cache-config: events: replay_endpoint: ports of 2 ranks overlap;"):
        refusals.check_replicas(parse_config({"events": events}), 2)
    refusals.check_replicas(parse_config({"events": events}), 1)
