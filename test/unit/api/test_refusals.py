"""Which flags and places are refused at start, and why; no server is started."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.arg_groups.overrides import declare_resolution
from sglang.srt.server_args import ServerArgs

from chunk_cache.options.config import parse_config
from sglang_chunk_cache.api.capabilities import check_default, what_fixes_rows, what_keeps_all
from sglang_chunk_cache.flags.server_args import ChunkCacheArgs, StartRefused, attach
from sglang_chunk_cache.plugin import engine
from sglang_chunk_cache.start import refusals
from sglang_chunk_cache.start.dp_attention_refusals import check_dp_attention
from sglang_chunk_cache.start.state_refusals import check_states

FLAGS: list[tuple[str, Any, str]] = [
    ("pp_size", 2, "--pp-size"),
    ("attn_cp_size", 2, "--attn-cp-size"),
    ("dcp_size", 2, "--dcp-size"),
    ("enable_prefill_cp", True, "--enable-prefill-cp"),
    ("enable_kv_cache_sharding", True, "--enable-kv-cache-sharding"),
    ("enable_layernorm_sp", True, "--enable-layernorm-sp"),
    ("enable_attn_tp_input_scattered", True, "--enable-attn-tp-input-scattered"),
    ("moe_a2a_backend", "deepep", "--moe-a2a-backend"),
    ("moe_dense_tp_size", 1, "--moe-dense-tp-size"),
    ("cpu_offload_gb", 4, "--cpu-offload-gb"),
    ("offload_group_size", 2, "--offload-group-size"),
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
    ("radix_eviction_policy", "slru", '--radix-eviction-policy lfu or slru; the eviction "frequency-reuse"'),
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


def check_draft(config, algorithm: str, device: str, **flags) -> None:
    args = ServerArgs(model_path="none", speculative_algorithm=algorithm, device=device, **flags)
    refusals.check_draft(args, config)


@pytest.mark.parametrize("backend", refusals.ATTENTION_BACKENDS)
def test_supported_attention_backends(backend):
    refusals.check_flags(ServerArgs(model_path="none", attention_backend=backend))
    refusals.check_flags(ServerArgs(model_path="none", prefill_attention_backend=backend))
    refusals.check_flags(ServerArgs(model_path="none", decode_attention_backend=backend))


@pytest.mark.parametrize("algorithm", refusals.SPECULATIVE_ALGORITHMS)
def test_supported_speculative_algorithms(algorithm):
    refusals.check_flags(ServerArgs(model_path="none", speculative_algorithm=algorithm))
    check_draft(parse_config({"draft_on_gpu": True}), algorithm, "cuda")
    check_draft(parse_config({}), algorithm, "cpu")


def test_a_model_with_states_loads_no_layer_before_the_others(monkeypatch, tmp_path):
    monkeypatch.setenv("SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND", "python")

    def check(loading: str) -> str:
        args = ChunkCacheArgs(config={"tiers": {"disk": str(tmp_path), "loading": loading}})
        return check_states(ServerArgs(model_path="none"), args)

    assert [check(loading) for loading in ("prefetch", "sync")] == ["seams", "seams"]
    with pytest.raises(StartRefused, match=r"tiers.loading: this model keeps states, .*; give prefetch or sync"):
        check("layerwise")


def test_what_is_passed_from_passage_to_passage_keeps_its_digits(monkeypatch):
    monkeypatch.setenv("SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND", "python")
    with pytest.raises(StartRefused, match=r"--enable-tf32-matmul\) cannot be combined with --chunk-cache for a model"):
        check_states(ServerArgs(model_path="none", enable_tf32_matmul=True), ChunkCacheArgs())


@pytest.mark.parametrize("algorithm", ["STANDALONE", "EAGLE", "EAGLE3"])
def test_a_draft_has_no_tiers_and_no_gpu_has_seen_it(algorithm, tmp_path):
    tiers = parse_config({"tiers": {"disk": {"path": str(tmp_path), "max_bytes": "1GB"}}})
    with pytest.raises(StartRefused, match=rf'{algorithm} drafts with a model, .* drop "tiers".*or use NGRAM'):
        check_draft(tiers, algorithm, "cpu")
    with pytest.raises(StartRefused, match=rf'{algorithm} .* on a CPU only; add "draft_on_gpu": true'):
        check_draft(parse_config({}), algorithm, "cuda")
    check_draft(tiers, "NGRAM", "cuda")


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
    found = what_keeps_all(
        ServerArgs(model_path="none", **flags),
        SimpleNamespace(sliding_window_size=window, hf_config=SimpleNamespace(get_text_config=lambda: None)),
    )
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
    check_draft(parse_config({}), "NGRAM", "cpu", **{flag: value})
    with pytest.raises(StartRefused, match=f"--{flag.replace('_', '-')}. cannot be combined with .* and EAGLE; drop"):
        check_draft(parse_config({}), "EAGLE", "cpu", **{flag: value})


@pytest.mark.parametrize("algorithm", ["EAGLE", "eagle3"])
def test_eagle_needs_a_method_that_chooses_before_the_forward(algorithm):
    rows_are_fixed = what_fixes_rows(ServerArgs(model_path="none", speculative_algorithm=algorithm))
    check_default(ChunkCacheArgs(method="epic"), 2, rows_are_fixed)
    for args in (ChunkCacheArgs(method="cacheblend"), ChunkCacheArgs(method="epic", config={"options": {"drift": 1}})):
        with pytest.raises(StartRefused, match=r"with these options works between layers, which drafts of EAGLE"):
            check_default(args, 2, rows_are_fixed)
    others = ServerArgs(model_path="none", speculative_algorithm="STANDALONE")
    check_default(ChunkCacheArgs(method="cacheblend"), 2, what_fixes_rows(others))


RANKS = {"tp_size": 2, "attn_dp_size": 2, "device": "cpu"}
PLAIN = SimpleNamespace(hf_config=SimpleNamespace(get_text_config=lambda: None))


@pytest.mark.parametrize("flags", [RANKS, {"tp_size": 2, "dp_size": 2, "enable_dp_attention": True}])
def test_ranks_that_attend_apart_need_a_method_that_chooses_before_the_forward(flags):
    refusals.check_flags(ServerArgs(model_path="none", **flags))
    rows_are_fixed = what_fixes_rows(ServerArgs(model_path="none", **flags))
    check_default(ChunkCacheArgs(method="near"), 2, rows_are_fixed)
    with pytest.raises(StartRefused, match=r"between layers, which ranks of data-parallel attention .*; choose near"):
        check_default(ChunkCacheArgs(method="cacheblend"), 2, rows_are_fixed)
    assert what_fixes_rows(ServerArgs(model_path="none", dp_size=2)) is None


@pytest.mark.parametrize(
    ("flags", "config", "sentence"),
    [
        ({"tp_size": 4}, {}, "--attn-dp-size 2 with --tp-size 4 .* give both flags the same number"),
        ({"speculative_algorithm": "NGRAM"}, {}, r"\(--speculative-algorithm\) cannot be combined .*; drop one"),
        ({"disaggregation_mode": "prefill"}, {}, r"\(--disaggregation-mode\) cannot be combined .*; drop one"),
        ({"enable_lora": True}, {}, r"LoRA \(--enable-lora\) cannot be combined"),
        ({"elastic_ep_backend": "mooncake"}, {}, r"\(--elastic-ep-backend\) cannot be combined"),
        ({"dwdp_size": 2}, {}, r"\(--dwdp-size\) cannot be combined"),
        ({}, {"verify_share": 0.1}, 'verify_share: .* drop "verify_share"'),
        ({}, {"tiers": {"host_bytes": 2**20, "loading": "layerwise"}}, "tiers.loading: .*; give prefetch or sync"),
    ],
)
def test_what_ranks_that_attend_apart_cannot_have(flags, config, sentence):
    check_dp_attention(ServerArgs(model_path="none", **RANKS), ChunkCacheArgs(), PLAIN)
    with pytest.raises(StartRefused, match=sentence):
        check_dp_attention(ServerArgs(model_path="none", **RANKS | flags), ChunkCacheArgs(config=config), PLAIN)


def test_ranks_that_attend_apart_replay_no_prefill_graph():
    args = ServerArgs(model_path="none", **RANKS)
    graphs = SimpleNamespace(prefill=SimpleNamespace(backend="breakable"))
    declare_resolution(args, "a handler of SGLang", cuda_graph_config=graphs)
    with pytest.raises(StartRefused, match=r"prefill graphs, .*; add --disable-prefill-cuda-graph"):
        check_dp_attention(args, ChunkCacheArgs(), PLAIN)


def test_ranks_that_attend_apart_tell_each_other(monkeypatch):
    monkeypatch.setenv("SGLANG_SCHEDULER_SKIP_ALL_GATHER", "1")
    with pytest.raises(StartRefused, match=r"\(SGLANG_SCHEDULER_SKIP_ALL_GATHER\) cannot be combined .*; unset"):
        check_dp_attention(ServerArgs(model_path="none", **RANKS), ChunkCacheArgs(), PLAIN)


@pytest.mark.parametrize("dtype", refusals.KV_CACHE_DTYPES)
def test_supported_types_of_the_kv_cache(dtype):
    refusals.check_flags(ServerArgs(model_path="none", kv_cache_dtype=dtype))


def test_what_is_left_open_is_left_to_sglang():
    server_args = ServerArgs(model_path="none")
    refusals.prepare_flags(server_args, parse_config({}))
    assert vars(server_args) == vars(ServerArgs(model_path="none", disable_hybrid_swa_memory=True))


def test_the_start_says_what_one_kv_pool_costs(tmp_path, caplog):
    config = {"model_type": "gpt_oss", "architectures": ["GptOssForCausalLM"], "num_hidden_layers": 4, "head_dim": 16}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "hidden_size": 64, "sliding_window": 8}
    kinds = {"layer_types": ["sliding_attention"] * 3 + ["full_attention"]}
    (tmp_path / "config.json").write_text(json.dumps({**config, **heads, **kinds}))
    args = ServerArgs(model_path=str(tmp_path), skip_tokenizer_init=True, swa_full_tokens_ratio=0.5)
    attach(args, ChunkCacheArgs())
    with caplog.at_level("INFO"):
        refusals.check_resolved(args)
    assert "holds 62 % of the tokens of SGLang's two pools (--swa-full-tokens-ratio 0.5)" in caplog.text
    assert "decode server" not in caplog.text
    args.disaggregation_mode = "prefill"
    refusals.check_resolved(args)
    assert "start the decode server with --disable-hybrid-swa-memory" in caplog.text


def test_a_model_that_only_says_that_it_has_windows_starts(tmp_path):
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4, "hidden_size": 64}
    names = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "is_hybrid_swa": True}
    (tmp_path / "config.json").write_text(json.dumps({**names, **sizes}))
    args = ServerArgs(model_path=str(tmp_path), skip_tokenizer_init=True)
    attach(args, ChunkCacheArgs())
    refusals.check_resolved(args)


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


def test_options_among_preferred_sampling_parameters_are_refused():
    """SGLang adds them behind the check of a request; its scheduler would end at the first one."""
    preferred = {"custom_params": {"chunk_cache": {"ratio": 0.3}}}
    server_args = ServerArgs(model_path="none", preferred_sampling_params=preferred)
    attach(server_args, ChunkCacheArgs())
    with pytest.raises(StartRefused, match=r"--preferred-sampling-params: custom_params.chunk_cache .*-cache-ratio"):
        refusals.check_resolved(server_args)


def test_another_radix_cache_is_refused():
    from sglang_chunk_cache import plugin

    with pytest.raises(StartRefused, match="--radix-cache-backend flexkv"):
        plugin.enable(ServerArgs(model_path="none", radix_cache_backend="flexkv"), ChunkCacheArgs())


# What would be found only once the model is loaded.


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_a_port_that_is_taken_is_refused(host):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(StartRefused, match=f"--port {port} is used by another program; end it, or"):
            refusals.check_port(ServerArgs(model_path="none", host=host, port=port))
    refusals.check_port(ServerArgs(model_path="none", host=host, port=port))


def test_a_disk_tier_needs_a_folder(tmp_path):
    def tiers(path: Path) -> dict[str, Any]:
        return {"tiers": {"disk": str(path)}}

    (tmp_path / "file").touch()
    with pytest.raises(StartRefused, match=r"tiers.disk: '.*/file' cannot be made a folder \(it is a file\); name"):
        refusals.check_folders(parse_config(tiers(tmp_path / "file")))
    with pytest.raises(StartRefused, match=r"tiers.disk: '.*/below' cannot be made a folder \(Not a directory\)"):
        refusals.check_folders(parse_config(tiers(tmp_path / "file" / "below")))
    with pytest.raises(ValueError, match=r"tiers.disk: '.*/file' cannot be made a folder"):
        engine(model_path="none", chunk_cache_config=tiers(tmp_path / "file"))
    refusals.check_folders(parse_config(tiers(tmp_path / "new" / "folder")))
    assert (tmp_path / "new" / "folder").is_dir()
    for bad in ("x" * 300, "a\0b", "\udcff\ud800"):
        with pytest.raises(StartRefused, match=r"tiers.disk: '.*' cannot be made a folder \(.*\); name"):
            refusals.check_folders(parse_config(tiers(tmp_path / bad)))


def test_the_file_of_verification_needs_a_folder(tmp_path):
    for name in ("none/quality.json", "a\0b/c"):
        with pytest.raises(StartRefused, match=r"verify_file: '.*' cannot be written, .*; make the folder, or name"):
            refusals.check_folders(parse_config({"verify_share": 1, "verify_file": str(tmp_path / name)}))
    refusals.check_folders(parse_config({"verify_share": 1, "verify_file": str(tmp_path / "quality.json")}))


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
