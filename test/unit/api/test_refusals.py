"""What is refused at start, and why; no server is started."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.arg_groups.overrides import declare_resolution
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.server_args import ServerArgs

from chunk_cache.options.config import parse_config
from sglang_chunk_cache.api.capabilities import check_default, what_fixes_rows, what_keeps_all
from sglang_chunk_cache.flags.server_args import ChunkCacheArgs, StartRefused
from sglang_chunk_cache.start import model_refusals, pool_check, refusals
from sglang_chunk_cache.start.runtime import create_runtime

FLAGS: list[tuple[str, Any, str]] = [
    ("pp_size", 2, "--pp-size"),
    ("attn_dp_size", 2, "--attn-dp-size"),
    ("enable_dp_attention", True, "--enable-dp-attention"),
    ("attn_cp_size", 2, "--attn-cp-size"),
    ("dcp_size", 2, "--dcp-size"),
    ("enable_prefill_cp", True, "--enable-prefill-cp"),
    ("enable_kv_cache_sharding", True, "--enable-kv-cache-sharding"),
    ("enable_layernorm_sp", True, "--enable-layernorm-sp"),
    ("enable_attn_tp_input_scattered", True, "--enable-attn-tp-input-scattered"),
    ("moe_a2a_backend", "deepep", "--moe-a2a-backend"),
    ("moe_dense_tp_size", 1, "--moe-dense-tp-size"),
    ("nnodes", 2, "--nnodes"),
    ("use_ray", True, "--use-ray"),
    ("enable_pdmux", True, "--enable-pdmux"),
    ("encoder_only", True, "--encoder-only"),
    ("language_only", True, "--language-only"),
    ("speculative_algorithm", "DFLASH", "other than NGRAM, STANDALONE, EAGLE, EAGLE3, NEXTN (--speculative-algorithm)"),
    ("enable_multi_layer_eagle", True, "--enable-multi-layer-eagle"),
    ("decoupled_spec_role", "drafter", "--decoupled-spec-role"),
    ("disable_radix_cache", True, "--disable-radix-cache"),
    ("enable_hierarchical_cache", True, "--enable-hierarchical-cache"),
    ("hicache_storage_backend", "file", "--hicache-storage-backend"),
    ("disaggregation_decode_retraction_backup", "host_pool", "host_pool"),
    ("enable_lmcache", True, "--enable-lmcache"),
    ("enable_flexkv", True, "--enable-flexkv"),
    ("enable_unified_cache_external_linker", True, "--enable-unified-cache-external-linker"),
    ("enable_session_radix_cache", True, "--enable-session-radix-cache"),
    ("enable_hisparse", True, "--enable-hisparse"),
    ("enable_unified_memory", True, "--enable-unified-memory"),
    ("enable_page_major_kv_layout", True, "--enable-page-major-kv-layout"),
    ("kv_canary", "log", "--kv-canary"),
    ("kv_events_config", "{}", '--kv-events-config; here "events" of --chunk-cache-config'),
    ("smg_grpc_mode", True, "--smg-grpc-mode"),
    ("grpc_mode", True, "--grpc-mode"),
    ("grpc_port", 50051, "--grpc-port"),
    ("enable_streaming_session", True, "--enable-streaming-session"),
    ("enable_two_batch_overlap", True, "--enable-two-batch-overlap"),
    ("enable_single_batch_overlap", True, "--enable-single-batch-overlap"),
    ("enable_mis", True, "--enable-mis"),
    ("enable_return_aux_hidden_states", True, "--enable-return-aux-hidden-states"),
    ("enable_return_routed_experts", True, "--enable-return-routed-experts"),
    ("prefill_only_disable_kv_cache", True, "--prefill-only-disable-kv-cache"),
    ("is_embedding", True, "--is-embedding"),
    ("dllm_algorithm", "LowConfidence", "--dllm-algorithm"),
    ("model_impl", "transformers", "--model-impl"),
    ("enable_nvidia_megakernel", True, "--enable-nvidia-megakernel"),
    ("kv_cache_dtype", "nvfp4", "--kv-cache-dtype nvfp4 does not work with --chunk-cache; use one of auto, bf16"),
    ("attention_backend", "intel_amx", "--attention-backend intel_amx does not work with --chunk-cache; use one of"),
    ("prefill_attention_backend", "flex_attention", "--prefill-attention-backend flex_attention"),
    ("decode_attention_backend", "flashmla", "--decode-attention-backend flashmla"),
]


def test_every_rule_has_a_case():
    rules = {rule.name for rule in refusals.FLAG_RULES} | refusals.CHOICE_RULES.keys()
    assert rules == {name for name, _, _ in FLAGS}


def test_defaults_are_served():
    refusals.check_flags(ServerArgs(model_path="none"))


def test_a_prefill_server_is_served():
    refusals.check_flags(ServerArgs(model_path="none", disaggregation_mode="prefill"))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"disaggregation_mode": "decode"}, "--disaggregation-mode decode: .* start it without --chunk-cache"),
        ({"disaggregation_mode": "prefill", "enable_pd_role_switch": True}, "--enable-pd-role-switch"),
        ({"disaggregation_mode": "prefill", "speculative_algorithm": "NGRAM"}, "--speculative-algorithm"),
    ],
)
def test_other_roles_are_refused(fields, message):
    with pytest.raises(StartRefused, match=message):
        refusals.check_flags(ServerArgs(model_path="none", **fields))


def test_staging_buffers_are_refused(monkeypatch):
    monkeypatch.setenv("SGLANG_DISAGG_STAGING_BUFFER", "1")
    refusals.check_flags(ServerArgs(model_path="none"))
    with pytest.raises(StartRefused, match="SGLANG_DISAGG_STAGING_BUFFER"):
        refusals.check_flags(ServerArgs(model_path="none", disaggregation_mode="prefill"))


@pytest.mark.parametrize("backend", refusals.ATTENTION_BACKENDS)
def test_supported_attention_backends(backend):
    refusals.check_flags(ServerArgs(model_path="none", attention_backend=backend))
    refusals.check_flags(ServerArgs(model_path="none", prefill_attention_backend=backend))
    refusals.check_flags(ServerArgs(model_path="none", decode_attention_backend=backend))


@pytest.mark.parametrize("algorithm", refusals.SPECULATIVE_ALGORITHMS)
def test_supported_speculative_algorithms(algorithm):
    refusals.check_flags(ServerArgs(model_path="none", speculative_algorithm=algorithm))
    refusals.check_draft(parse_config({"draft_on_gpu": True}), algorithm, "cuda")
    refusals.check_draft(parse_config({}), algorithm, "cpu")


@pytest.mark.parametrize("algorithm", ["STANDALONE", "EAGLE", "EAGLE3"])
def test_a_draft_has_no_tiers_and_no_gpu_has_seen_it(algorithm, tmp_path):
    tiers = parse_config({"tiers": {"disk": {"path": str(tmp_path), "max_bytes": "1GB"}}})
    with pytest.raises(StartRefused, match=rf'{algorithm} drafts with a model, .* drop "tiers".*or use NGRAM'):
        refusals.check_draft(tiers, algorithm, "cpu")
    with pytest.raises(StartRefused, match=rf'{algorithm} .* on a CPU only; add "draft_on_gpu": true'):
        refusals.check_draft(parse_config({}), algorithm, "cuda")
    refusals.check_draft(tiers, "NGRAM", "cuda")


@pytest.mark.parametrize(
    ("flags", "window", "what"),
    [
        ({}, None, None),
        ({"speculative_algorithm": "NGRAM"}, None, "speculative decoding"),
        ({"enable_mixed_chunk": True}, None, "a batch that mixes prefill and decoding"),
        ({}, 4096, "attention in a sliding window"),
    ],
)
def test_what_needs_all_tokens_while_it_decodes(flags, window, what):
    found = what_keeps_all(ServerArgs(model_path="none", **flags), SimpleNamespace(sliding_window_size=window))
    assert (found or "").startswith(what or "")
    assert bool(found) == bool(what)


def test_what_several_tokenizer_workers_cannot_have():
    args = ServerArgs(model_path="none", tokenizer_worker_num=2, admin_api_key="secret")
    with pytest.raises(StartRefused, match="--admin-api-key is asked for by none"):
        refusals.check_tokenizer_workers(ChunkCacheArgs(), args)
    with pytest.raises(StartRefused, match="--chunk-cache-selector belongs to the one process"):
        refusals.check_tokenizer_workers(ChunkCacheArgs(selector="small"), args)
    refusals.check_tokenizer_workers(ChunkCacheArgs(selector="small"), ServerArgs(model_path="none"))


@pytest.mark.parametrize(
    ("flag", "value"),
    [("enable_mixed_chunk", True), ("enable_return_hidden_states", True), ("return_hidden_states_mode", "last")],
)
def test_flags_that_a_draft_does_not_follow(flag, value):
    args = ServerArgs(model_path="none", **{flag: value})
    refusals.check_flags_with_draft(args, "NGRAM")
    with pytest.raises(StartRefused, match=f"--{flag.replace('_', '-')}. cannot be combined with .* and EAGLE; drop"):
        refusals.check_flags_with_draft(args, "EAGLE")


@pytest.mark.parametrize("algorithm", ["EAGLE", "eagle3"])
def test_eagle_needs_a_method_that_chooses_before_the_forward(algorithm):
    rows_are_fixed = what_fixes_rows(ServerArgs(model_path="none", speculative_algorithm=algorithm))
    check_default(ChunkCacheArgs(method="epic"), 2, rows_are_fixed)
    for args in (ChunkCacheArgs(method="cacheblend"), ChunkCacheArgs(method="epic", config={"options": {"drift": 1}})):
        with pytest.raises(StartRefused, match=r"with these options works between layers, which drafts of EAGLE"):
            check_default(args, 2, rows_are_fixed)
    others = ServerArgs(model_path="none", speculative_algorithm="STANDALONE")
    check_default(ChunkCacheArgs(method="cacheblend"), 2, what_fixes_rows(others))


@pytest.mark.parametrize("dtype", refusals.KV_CACHE_DTYPES)
def test_supported_types_of_the_kv_cache(dtype):
    refusals.check_flags(ServerArgs(model_path="none", kv_cache_dtype=dtype))


def test_what_is_left_open_is_left_to_sglang():
    server_args = ServerArgs(model_path="none")
    refusals.prepare_flags(server_args, parse_config({}))
    assert vars(server_args) == vars(ServerArgs(model_path="none"))


@pytest.mark.parametrize(("name", "value", "word"), FLAGS, ids=[name for name, _, _ in FLAGS])
def test_flag_is_refused_with_one_sentence(name, value, word):
    server_args = ServerArgs(model_path="none")
    setattr(server_args, name, value)
    with pytest.raises(StartRefused) as refused:
        refusals.check_flags(server_args)
    assert word in str(refused.value.code)
    assert "--chunk-cache" in str(refused.value.code)
    assert "\n" not in str(refused.value.code)


@pytest.mark.parametrize(
    ("name", "value"), [("SGLANG_RUST_SERVER", "1"), ("SGLANG_GRPC_PORT", "50051"), ("SGLANG_USE_HND_KVCACHE", "1")]
)
def test_variable_is_refused(monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    with pytest.raises(StartRefused, match=rf"\({name}\) cannot be combined with --chunk-cache; unset"):
        refusals.check_flags(ServerArgs(model_path="none"))


@pytest.mark.parametrize(
    ("name", "value", "sentence"),
    [
        ("disable_radix_cache", True, "--disable-radix-cache, which SGLang turned on by itself, cannot be combined"),
        (
            "attention_backend",
            "dsa",
            r"--attention-backend dsa, which SGLang chose by itself, .*; add --attention",
        ),
    ],
)
def test_what_sglang_chose_is_not_blamed_on_the_user(name, value, sentence):
    server_args = ServerArgs(model_path="none")
    declare_resolution(server_args, "a handler of SGLang", **{name: value})
    with pytest.raises(StartRefused, match=sentence):
        refusals._check_chosen(server_args)


def test_another_radix_cache_is_refused():
    from sglang_chunk_cache import plugin

    with pytest.raises(StartRefused, match="--radix-cache-backend flexkv"):
        plugin.enable(ServerArgs(model_path="none", radix_cache_backend="flexkv"), ChunkCacheArgs())


# What would be found only once the model is loaded.


def places(disk: object = None, **flags: Any) -> None:
    config = parse_config({} if disk is None else {"tiers": {"disk": str(disk)}})
    refusals.check_places(ServerArgs(model_path="none", **flags), config)


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_a_port_that_is_taken_is_refused(host):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(StartRefused, match=f"--port {port} is used by another program; end it, or"):
            places(host=host, port=port)
    places(host=host, port=port)


def test_a_disk_tier_needs_a_folder(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(StartRefused, match=r"tiers.disk: .*/file cannot be made a folder \(it is a file\); name"):
        places(tmp_path / "file", port=0)
    with pytest.raises(StartRefused, match=r"tiers.disk: .*/below cannot be made a folder \(Not a directory\)"):
        places(tmp_path / "file" / "below", port=0)
    places(tmp_path / "new" / "folder", port=0)
    assert (tmp_path / "new" / "folder").is_dir()


def test_a_model_that_is_not_there_is_one_sentence(tmp_path):
    from sglang_chunk_cache import plugin
    from sglang_chunk_cache.flags.server_args import attach

    def original(_: Any) -> None:
        raise OSError("Repo id must be in the form 'name'.\nAnd more.")

    missing = ServerArgs(model_path=str(tmp_path / "missing"))
    with pytest.raises(OSError, match="And more"):
        plugin.resolve_once(original, missing)  # of stock, as it is
    attach(missing, ChunkCacheArgs())
    with pytest.raises(StartRefused, match=r"--model-path .*/missing: there is no such folder.*in the form 'name'\)"):
        plugin.resolve_once(original, missing)
    there = ServerArgs(model_path=str(tmp_path))
    attach(there, ChunkCacheArgs())
    with pytest.raises(OSError, match="And more"):
        plugin.resolve_once(original, there)


# Models.

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
GPT_OSS = (
    "gpt_oss",
    "GptOssForCausalLM",
    {
        "sliding_window": 128,
        "head_dim": 16,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "quantization_config": {"quant_method": "mxfp4"},
    },
)
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
    "a class that nobody listed": ("stablelm", "PersimmonForCausalLM", {}),
}


@pytest.mark.parametrize("name", SERVED)
def test_model_is_served(tmp_path, name):
    model_type, architecture, extra = SERVED[name]
    model_refusals.check_model(model_config(tmp_path, model_type, architecture, **extra))


def test_sinks_are_served_where_all_layers_are_in_one_pool(tmp_path):
    config = model_config(tmp_path, *GPT_OSS[:2], **GPT_OSS[2])
    assert config.has_attention_sinks
    config.is_hybrid_swa = False
    model_refusals.check_model(config, "listed")


def test_long_rope_is_served_within_its_original_context(tmp_path):
    config = model_config(tmp_path, *LLAMA, **LONG_ROPE)
    config.context_len = 1024
    model_refusals.check_model(config)


REFUSED: dict[str, tuple[str, str, dict[str, Any], str]] = {
    "windows in a pool of their own": (*LLAMA, {"is_hybrid_swa": True}, "add --disable-hybrid-swa-memory"),
    "sinks, and windows in a pool of their own": (*GPT_OSS, "add --disable-hybrid-swa-memory"),
    "state space": (
        "falcon_h1",
        "FalconH1ForCausalLM",
        {"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 16, "head_dim": 16},
        "state-space",
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


def test_only_listed_models_are_served_where_that_is_asked_for(tmp_path):
    (tmp_path / "llama").mkdir()
    model_refusals.check_model(model_config(tmp_path / "llama", *LLAMA), "listed")
    with pytest.raises(StartRefused, match=r'architecture PersimmonForCausalLM is not listed, and "models"'):
        model_refusals.check_model(model_config(tmp_path, "stablelm", "PersimmonForCausalLM"), "listed")


@pytest.mark.parametrize("prefix", ["Llava", "Qwen2_5_VL", "Gemma3"])
def test_texts_of_a_model_that_sees_images_are_served(tmp_path, prefix):
    import transformers
    from sglang.srt.configs.model_config import ModelConfig

    config = getattr(transformers, f"{prefix}Config")(architectures=[f"{prefix}ForConditionalGeneration"])
    config.save_pretrained(tmp_path)
    model_config = ModelConfig(model_path=str(tmp_path))
    model_config.is_hybrid_swa = False
    model_refusals.check_model(model_config)


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
    ],
)
def test_flashinfer_serves_what_it_has_kernels_for(tmp_path, extra, dtype, word):
    config = model_config(tmp_path, *LLAMA, **extra)
    config.dtype = getattr(torch, dtype)
    if word is None:
        model_refusals.check_flashinfer(config)
        return
    with pytest.raises(StartRefused) as refused:
        model_refusals.check_flashinfer(config)
    assert 'kernel: "flashinfer"' in str(refused.value.code)
    assert word in str(refused.value.code)


def test_flashinfer_knows_no_sinks(tmp_path):
    config = model_config(tmp_path, *GPT_OSS[:2], **GPT_OSS[2])
    with pytest.raises(StartRefused, match='kernel: "flashinfer": it knows no attention sinks'):
        model_refusals.check_flashinfer(config)


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
    refusals.check_replicas(parse_config({"events": events}), None)
