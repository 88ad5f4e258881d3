"""Refuses models by their configuration, before any process is started.

Verbs: `check_model` (one resolved model configuration), `check_flashinfer`. Forwards of the loaded model show later
whether reuse fits it (`model_check`).
"""

from __future__ import annotations

from typing import Any

from sglang_chunk_cache.api.capabilities import has_states
from sglang_chunk_cache.flags.server_args import refuse

SEES_IMAGES_BOTH_WAYS = {"Gemma3ForConditionalGeneration"}
REUSES_IMAGES = {"Qwen2_5_VLForConditionalGeneration", "Qwen3VLForConditionalGeneration"}
"""Model classes whose images were tried; with others a prompt that has images is computed exactly."""
ROPE_TYPES = ("default", "linear", "llama3", "yarn", "dynamic", "longrope")


def check_flashinfer(model_config: Any) -> None:
    """Checks that the FlashInfer version of sparse_extend can serve a model, before a request finds that it cannot.

    Raises:
        StartRefused: it cannot; the sentence says why.
    """
    from sgl_kernel_ext.sparse_extend.flashinfer import unserved

    dtype = model_config.dtype  # the pool's is known later
    dims = model_config.head_dim, model_config.v_head_dim
    problem = unserved(dtype, *dims, dtype, model_config.has_attention_sinks)
    if problem is not None:
        refuse(f'--chunk-cache-config: kernel: "flashinfer": {problem}; use "auto" or "triton".')


def check_model(model_config: Any) -> None:
    """Checks a model by its resolved `ModelConfig`.

    Raises:
        StartRefused: the model does not work with the chunk cache.
    """
    for check in (_kind_reason, _sparse_reason, _window_reason, _rope_reason, _attention_reason):
        reason = check(model_config)
        if reason is not None:
            refuse(f"this model cannot be served with --chunk-cache because {reason}.")


def _kind_reason(model_config: Any) -> str | None:
    if model_config.is_encoder_decoder:
        return "it is an encoder-decoder model"
    if model_config.is_audio_model:
        return "it is a speech model"
    if model_config.is_multimodal and set(model_config.hf_config.architectures) & SEES_IMAGES_BOTH_WAYS:
        return (
            "tokens of an image see those behind them, which fused batches do not show; drop --enable-multimodal, and "
            "texts are served"
        )
    if not model_config.is_generation:
        return "it is an embedding, reward or classification model"
    return None


def _sparse_reason(model_config: Any) -> str | None:
    """A row attends to few tokens only, and the index that chooses them is stored for one place in the prompt."""
    from sglang.srt.configs.model_config import is_deepseek_dsa, is_deepseek_v4, is_minimax_sparse

    if is_deepseek_v4(model_config.hf_config):
        return (
            "DeepSeek V4 compresses tokens in blocks that begin at fixed places of the prompt, and a passage that "
            "moves falls into other blocks; no flag helps"
        )
    if is_deepseek_dsa(model_config.hf_config) or is_minimax_sparse(model_config.hf_config):
        return (
            "its sparse attention (DeepSeek V3.2, GLM-5, MiniMax M3) chooses tokens by an index of its own, whose keys "
            "would have to move too; no flag helps"
        )
    if model_config.is_local_attention_model:
        return "it uses local attention (Llama 4); no flag helps"
    return None


def has_window_pool(model_config: Any) -> bool:
    """Whether SGLang would keep the layers with a window in a KV pool of their own."""
    from sglang.srt.configs.model_config import is_hybrid_swa_model

    return bool(is_hybrid_swa_model(model_config.hf_config.architectures, model_config.hf_text_config))


def _window_reason(model_config: Any) -> str | None:
    """All layers share one pool, since a passage that moves needs its KV in each of them."""
    if not has_window_pool(model_config):
        return None
    all_heads = model_config.get_num_kv_heads(1), model_config.head_dim, model_config.v_head_dim
    window_heads = model_config.get_swa_num_kv_heads(1), model_config.swa_head_dim, model_config.swa_v_head_dim
    if all_heads == window_heads:
        return None
    return (
        "its layers with a window have other heads than the rest (Gemma 4, MiMo V2), which one KV pool cannot hold; "
        "no flag helps"
    )


def _attention_reason(model_config: Any) -> str | None:
    from sglang.srt.configs.hybrid_arch import mambaish_config
    from sglang.srt.configs.model_config import AttentionArch

    text_config = model_config.hf_text_config
    layer_types = set(getattr(text_config, "layer_types", None) or ())
    if has_states(model_config):
        return None
    if model_config.attention_arch == AttentionArch.SSM or mambaish_config(model_config) is not None:
        other = _other_states(model_config)
        return f"its layers keep states otherwise than by the gated delta rule: {other}; no flag helps"
    if layer_types & {"linear_attention", "mamba", "recurrent", "conv"}:
        return "it has state-space or linear-attention layers"
    if model_config.attention_chunk_size:
        return "it uses local attention (attention_chunk_size in its config.json)"
    return None


def _other_states(model_config: Any) -> str:
    """How the layers of such a model keep states, and why that is not served."""
    from sglang.srt.configs.hybrid_arch import hybrid_kda_config, hybrid_lightning_config, mamba2_config

    if hybrid_kda_config(model_config) is not None:
        return (
            "in Kimi Delta Attention each key channel decays by a factor of its own, which another kernel computes, "
            "and the pool holds convolutions the other way round"
        )
    if hybrid_lightning_config(model_config) is not None:
        return "in Lightning Attention each head decays by a fixed factor, in a backend without convolutions"
    kind = type(mamba2_config(model_config)).__name__
    if kind.startswith(("NemotronH", "GraniteMoeHybrid", "FalconH1", "Mamba2")):
        return (
            "in Mamba 2 a passage multiplies the state of a head by one number, not by a matrix, and each layer calls "
            "its kernel by itself, not by SGLang's backend"
        )
    if kind.startswith("Lfm2"):
        return "its short convolutions keep their last inputs alone"
    return "nobody takes or composes what a passage does to them"


def _rope_reason(model_config: Any) -> str | None:
    """Keys can be moved only where each rotary dimension turns by a fixed angle per position."""
    text_config = model_config.hf_text_config
    rope = getattr(text_config, "rope_parameters", None) or getattr(text_config, "rope_scaling", None) or {}
    if getattr(text_config, "dual_chunk_attention_config", None) is not None:
        return "it uses dual-chunk attention (dual_chunk_attention_config in its config.json)"
    of_kinds = [value for value in rope.values() if isinstance(value, dict)]  # one per kind of layer
    for one in of_kinds or [rope]:
        rope_type = one.get("rope_type", one.get("type", "default"))
        if rope_type not in ROPE_TYPES or one.get("use_fope"):
            what = "fope" if one.get("use_fope") else rope_type
            return f"its rope type is {what}, not {', '.join(ROPE_TYPES)}; no flag helps"
        if rope_type == "longrope":
            reason = _longrope_reason(model_config, one)
            if reason is not None:
                return reason
    return None


def _longrope_reason(model_config: Any, rope: dict[str, Any]) -> str | None:
    text_config = model_config.hf_text_config
    original_len = (
        getattr(text_config, "original_max_position_embeddings", None)
        or rope.get("original_max_position_embeddings")
        or text_config.max_position_embeddings
    )
    if model_config.context_len <= original_len:
        return None
    return (
        f"its long rope turns all keys by other angles where a prompt is longer than {original_len} tokens; add "
        f"--context-length {original_len}"
    )
