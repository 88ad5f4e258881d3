"""Small seeded models with their tokenizers, written as Hugging Face folders on the spot.

- `make_model(kind, out_dir, ...)` writes one and returns its folder; the same arguments give the same weights.
- `make_draft(kind, out_dir)` writes one that drafts for them (EAGLE, EAGLE3), with random weights as well.
- `make_tokenizer(vocab_size, add_bos=...)` is the tokenizer it comes with: byte-level, so any text has ids.

The weights are random, but wider than a fresh initialisation: attention is peaked and log-probabilities differ by
whole units between contexts. A test that compares them would pass on near-uniform logits whatever was computed.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "norm_topk_prob": True}
_ROUTED = {
    "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "first_k_dense_replace": 1,
    "n_shared_experts": 1, "n_group": 1, "topk_group": 1,
}  # fmt: skip
_LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "moe_layer_freq": 1,
}
_DEEPSEEK_V3 = {**_ROUTED, **_LATENT, "q_lora_rank": 24, "topk_method": "noaux_tc", "scoring_func": "sigmoid"}
_WINDOW = {"sliding_window": 24}
_GEMMA3 = {
    **_WINDOW, "query_pre_attn_scalar": 16, "tie_word_embeddings": True,
    "layer_types": ("sliding_attention", "full_attention"),
}  # fmt: skip
_STATES = {
    "layer_types": ("linear_attention", "full_attention"), "full_attention_interval": 2, "partial_rotary_factor": 0.5,
    "linear_key_head_dim": 16, "linear_value_head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
}  # fmt: skip
# Prefix of the classes' names in transformers, and what its configuration has beside what all have.
_CLASSES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama_sharp": ("Llama", {}),  # attention looks at single tokens, so that rounding in one layer moves those behind
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "phi3": ("Phi3", {"sliding_window": None}),
    "glm4": ("Glm4", {"partial_rotary_factor": 0.5}),
    "granite": ("Granite", {"embedding_multiplier": 2.0, "residual_multiplier": 0.7, "logits_scaling": 2.0}),
    "olmo2": ("Olmo2", {}),
    "cohere": ("Cohere", {"use_qk_norm": True, "logit_scale": 0.25, "tie_word_embeddings": True}),
    "stablelm": ("StableLm", {"partial_rotary_factor": 0.25}),
    "gemma": ("Gemma", {"tie_word_embeddings": True}),
    "arcee": ("Arcee", {}),
    "starcoder2": ("Starcoder2", {"sliding_window": None}),
    "qwen3_moe": ("Qwen3Moe", {**_MOE, "decoder_sparse_step": 1, "mlp_only_layers": []}),
    "qwen2_moe": ("Qwen2Moe", {**_MOE, "decoder_sparse_step": 1, "shared_expert_intermediate_size": 64}),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}),
    "glm4_moe": ("Glm4Moe", {**_ROUTED, "partial_rotary_factor": 0.5, "use_qk_norm": True}),
    "olmoe": ("Olmoe", {"num_experts": 4, "num_experts_per_tok": 2, "num_key_value_heads": 4}),
    "deepseek_v2": (
        "DeepseekV2",
        {**_ROUTED, **_LATENT, "q_lora_rank": None, "topk_method": "greedy", "scoring_func": "softmax"},
    ),
    "deepseek_v3": ("DeepseekV3", _DEEPSEEK_V3),
    "gemma2": (
        "Gemma2",
        {**_WINDOW, "query_pre_attn_scalar": 16, "hidden_act": "gelu_pytorch_tanh", "tie_word_embeddings": True},
    ),
    "gemma3": ("Gemma3", _GEMMA3),
    "gpt_oss": (
        "GptOss",
        {**_WINDOW, "num_local_experts": 4, "num_experts_per_tok": 2, "layer_types": _GEMMA3["layer_types"]},
    ),
    "qwen3_5": ("Qwen3_5", _STATES),
    "qwen3_next": (
        "Qwen3Next",
        {**_STATES, **_MOE, "decoder_sparse_step": 1, "mlp_only_layers": [], "shared_expert_intermediate_size": 64},
    ),
    "gemma3_mm": ("Gemma3", _GEMMA3),
    "mistral_window": ("Mistral", _WINDOW),
    "mistral3": ("Mistral3", {"sliding_window": None}),
    "kimi_k25": ("DeepseekV3", _DEEPSEEK_V3),
    "qwen2_5_vl": ("Qwen2_5_VL", {"mrope_section": (2, 3, 3)}),
    "qwen3_vl": ("Qwen3VL", {"mrope_section": (4, 2, 2)}),
    "llama_fp8_kv": ("Llama", {}),
}  # fmt: skip
_TOWER = {"hidden_size": 32, "intermediate_size": 64, "patch_size": 4, "num_hidden_layers": 1, "num_attention_heads": 2}
_BLOCKS = {
    "hidden_size": 32, "intermediate_size": 64, "patch_size": 4, "depth": 2, "num_heads": 2, "spatial_merge_size": 2,
    "temporal_patch_size": 1, "out_hidden_size": 64,
}  # fmt: skip
# SGLang knows patches of this class by their number of values, 3 x 2 x 14 x 14.
_QWEN2_5_BLOCKS = {
    **_BLOCKS, "patch_size": 14, "temporal_patch_size": 2, "window_size": 56, "fullatt_block_indexes": [1]
}  # fmt: skip
# Of a kind that sees images: configuration of its text in transformers, of its tower, and what else it has.
_TOWERS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "gemma3_mm": (
        "Gemma3TextConfig", {**_TOWER, "image_size": 16, "vision_use_head": False},
        {"mm_tokens_per_image": 4, "image_token_index": 511},
    ),
    "mistral3": ("MistralConfig", {**_TOWER, "image_size": 16}, {"image_token_index": 511, "spatial_merge_size": 2}),
    "qwen2_5_vl": (
        "Qwen2_5_VLTextConfig", _QWEN2_5_BLOCKS, {"image_token_id": 511}
    ),
    "qwen3_vl": (
        "Qwen3VLTextConfig",
        {**_BLOCKS, "num_position_embeddings": 16, "deepstack_visual_indexes": [0, 1]},
        {"image_token_id": 511},
    ),
}  # fmt: skip
KINDS: tuple[str, ...] = tuple(_CLASSES)
_KIMI = "KimiK25ForConditionalGeneration"

# Parameters of `rope` by name; the original context is a quarter of the model's, so that tests cross it.
_ROPE: dict[str, dict[str, Any]] = {
    "linear": {"factor": 4.0},
    "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "yarn": {"factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0},
    "dynamic": {"factor": 2.0},
    "longrope": {
        "short_factor": [1.0 + pair / 10 for pair in range(8)],
        "long_factor": [2.0 + pair for pair in range(8)],
    },
}

BOS, EOS, PAD = "<|bos|>", "<|eos|>", "<|pad|>"
SPECIAL_TOKENS = (PAD, BOS, EOS, "<|user|>", "<|assistant|>", "<|system|>")
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def architecture_of(kind: str) -> str:
    """The class that the configuration of such a model names."""
    return _KIMI if kind == "kimi_k25" else _class_of(kind)


def _class_of(kind: str) -> str:
    """The class in transformers."""
    return f"{_CLASSES[kind][0]}{'ForConditionalGeneration' if kind in _TOWERS else 'ForCausalLM'}"


def make_model(
    kind: str,
    out_dir: str | Path,
    *,
    layers: int = 2,
    hidden: int = 64,
    heads: int = 4,
    kv_heads: int = 2,
    vocab: int = 512,
    dtype: torch.dtype = torch.float32,
    rope: str | None = None,
    tokenizer: bool = True,
    seed: int = 0,
    max_position: int = 8192,
) -> Path:
    """Writes a random model of class `kind` as safetensors into `out_dir` and returns the folder.

    Args:
        hidden, heads, kv_heads: `hidden` must be a multiple of `heads`, `heads` of `kv_heads`.
        vocab: at least 262 (256 bytes and the special tokens) when a tokenizer is made.
        rope: None or a key of `_ROPE`; the original context is `max_position // 4`.
        tokenizer: False leaves the folder without any tokenizer file (`--skip-tokenizer-init`).

    A folder that already holds exactly this model is left as it is.
    """
    out_dir = Path(out_dir)
    prefix, own = _CLASSES[kind]
    if "layer_types" in own:
        own = {**own, "layer_types": [own["layer_types"][layer % 2] for layer in range(layers)]}
    text, tower, around = _TOWERS.get(kind, ("", {}, {}))
    recipe = json.dumps(
        [kind, own, layers, hidden, heads, kv_heads, vocab, str(dtype), rope, tokenizer, seed, max_position, tower, 3]
    )
    mark = out_dir / ".recipe.json"
    if mark.exists() and mark.read_text() == recipe:
        return out_dir
    out_dir.mkdir(parents=True, exist_ok=True)
    names = (text, f"{prefix}TextConfig", f"{prefix}Config")
    config_class = next(getattr(transformers, name) for name in names if hasattr(transformers, name))
    config = config_class(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        head_dim=hidden // heads,
        max_position_embeddings=max_position,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        rope_parameters=_rope_parameters(rope, max_position, own),
        **{"num_key_value_heads": kv_heads, "tie_word_embeddings": False, **own},
    )
    if tower:
        around = {**around, "tie_word_embeddings": config.tie_word_embeddings}
        config = getattr(transformers, f"{prefix}Config")(text_config=config.to_dict(), vision_config=tower, **around)
    model_class = getattr(transformers, _class_of(kind))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = model_class(config).to(torch.float32)
        _widen(model)
    if kind == "llama_sharp":
        for name, parameter in model.named_parameters():
            if name.endswith(("q_proj.weight", "k_proj.weight")):
                parameter.data *= 6
    with tempfile.TemporaryDirectory(dir=out_dir) as name:  # two processes may write the same model
        folder = Path(name)
        model.to(dtype).save_pretrained(folder, safe_serialization=True)
        if kind == "llama_fp8_kv":
            _scale_kv_cache(folder, layers)
        if kind == "gemma3_mm":
            _rename_weights(folder, "vision_tower.", "vision_tower.vision_model.")
        if kind == "kimi_k25":
            _wrap_kimi(folder)
        if tokenizer:
            make_tokenizer(vocab, add_bos=kind in ("llama", "llama_sharp", "mistral")).save_pretrained(folder)
        for file in folder.iterdir():
            file.replace(out_dir / file.name)
    mark.write_text(recipe)
    return out_dir


def _rename_weights(out_dir: Path, old: str, new: str) -> None:
    """Gives weights whose names begin with `old` the names of published checkpoints, which begin with `new`."""
    file = out_dir / "model.safetensors"
    tensors = {(new + name[len(old) :] if name.startswith(old) else name): t for name, t in load_file(file).items()}
    save_file(tensors, file, metadata={"format": "pt"})


def _wrap_kimi(out_dir: Path) -> None:
    """Makes the text of a Kimi K2.5 of a DeepSeek V3; its tower has no weights, as transformers has no such class."""
    _rename_weights(out_dir, "", "language_model.")
    config = out_dir / "config.json"
    text = json.loads(config.read_text())
    tower = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    wrapped = {"architectures": [_KIMI], "model_type": "kimi_k25", "text_config": text}
    wrapped |= {
        "vision_config": {**tower, "patch_size": 4, "text_hidden_size": text["hidden_size"], "vt_hidden_size": 32}
    }
    config.write_text(json.dumps({**wrapped, "dtype": text["dtype"], "media_placeholder_token_id": 511}))


def _scale_kv_cache(out_dir: Path, layers: int) -> None:
    """Asks for a KV cache in FP8 and gives each layer scales, in the form of llm-compressor's checkpoints."""
    config, weights = out_dir / "config.json", out_dir / "model.safetensors"
    scheme = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True, "dynamic": False}
    quantization = {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": {}}
    quantization |= {"ignore": ["lm_head"], "kv_cache_scheme": scheme}
    config.write_text(json.dumps(json.loads(config.read_text()) | {"quantization_config": quantization}))
    tensors = load_file(weights)
    for layer in range(layers):
        for name, scale in (("k_scale", 0.03), ("v_scale", 0.01)):
            tensors[f"model.layers.{layer}.self_attn.{name}"] = torch.tensor(scale * (1 + layer / 2))
    save_file(tensors, weights, metadata={"format": "pt"})


DRAFTS = {"llama_eagle": "LlamaForCausalLMEagle", "llama_eagle3": "LlamaForCausalLMEagle3"}
"""Kinds of drafts, and their classes in SGLang."""


def make_draft(kind: str, out_dir: str | Path, *, hidden: int = 64, seed: int = 1) -> Path:
    """Writes a model of one layer that drafts from the hidden states of a "llama" of that size; returns the folder.

    EAGLE3 looks at those of three layers, so the target has four.
    """
    out_dir = make_model("llama", out_dir, layers=1, hidden=hidden, seed=seed)
    config, weights = out_dir / "config.json", out_dir / "model.safetensors"
    values = json.loads(config.read_text())
    if values["architectures"] == [DRAFTS[kind]]:
        return out_dir
    values |= {"architectures": [DRAFTS[kind]], "draft_vocab_size": values["vocab_size"]}
    tensors = {name.removeprefix("model."): value for name, value in load_file(weights).items()}
    generator = torch.Generator().manual_seed(seed)
    num_inputs = 2
    if kind == "llama_eagle":  # it has no norm in front of its layer, and none behind it
        del tensors["layers.0.input_layernorm.weight"], tensors["norm.weight"], tensors["lm_head.weight"]
        tensors["fc.bias"] = torch.zeros(hidden)
    else:
        num_inputs = 3
        values["eagle_config"] = {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": [0, 1, 2]}
        for name in ("q_proj", "k_proj", "v_proj"):
            key = f"layers.0.self_attn.{name}.weight"
            tensors[key] = torch.cat([tensors[key]] * 2, 1) / 2**0.5
        tensors["layers.0.hidden_norm.weight"] = tensors["layers.0.input_layernorm.weight"].clone()
    tensors["fc.weight"] = torch.randn(hidden, num_inputs * hidden, generator=generator) / (num_inputs * hidden) ** 0.5
    save_file(tensors, weights, metadata={"format": "pt"})
    config.write_text(json.dumps(values))
    return out_dir


ADAPTED = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""Projections of a decoder layer that an adapter changes."""


def make_adapter(model_dir: str | Path, out_dir: str | Path, *, rank: int = 4, seed: int = 0) -> Path:
    """Writes a random LoRA adapter of a Llama's attention and MLP, wide enough to change answers; the folder."""
    out_dir = Path(out_dir)
    out_dir.mkdir(parents=True, exist_ok=True)
    weights = load_file(Path(model_dir) / "model.safetensors")
    random = torch.Generator().manual_seed(seed)
    adapter = {}
    for name, weight in weights.items():
        module = name.removesuffix(".weight")
        if module.split(".")[-1] in ADAPTED:
            out_len, in_len = weight.shape
            stem = f"base_model.model.{module}"
            adapter[f"{stem}.lora_A.weight"] = torch.randn(rank, in_len, generator=random) / in_len**0.5
            adapter[f"{stem}.lora_B.weight"] = torch.randn(out_len, rank, generator=random) / 2
    save_file(adapter, out_dir / "adapter_model.safetensors")
    settings = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": rank,
        "bias": "none",
        "target_modules": ADAPTED,
    }
    (out_dir / "adapter_config.json").write_text(json.dumps(settings))
    return out_dir


def make_tokenizer(
    vocab_size: int = 512, *, add_bos: bool = True, add_prefix_space: bool = False
) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer with special tokens, filler up to `vocab_size`, a chat template and, if wanted, BOS.

    Args:
        add_prefix_space: it puts a space in front of a text.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*SPECIAL_TOKENS, *alphabet]
    if vocab_size < len(tokens):
        raise ValueError(f"vocab: {vocab_size} is too small for a byte-level tokenizer; use at least {len(tokens)}")
    merges, fillers = _merges(alphabet, vocab_size - len(tokens))
    vocab = {token: index for index, token in enumerate([*tokens, *fillers])}
    core = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    core.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL_TOKENS])
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space)
    core.decoder = decoders.ByteLevel()
    if add_bos:
        core.post_processor = processors.TemplateProcessing(
            single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B", special_tokens=[(BOS, vocab[BOS])]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token=BOS, eos_token=EOS, pad_token=PAD, chat_template=CHAT_TEMPLATE
    )


def _merges(alphabet: list[str], count: int) -> tuple[list[tuple[str, str]], list[str]]:
    """`count` merges of two characters, frequent English pairs first: a text tokenizes differently at a cut."""
    space = "\u0120"
    pairs = [(space, letter) for letter in "taoswcbpfmdrhiulgeny"]
    pairs += [(a, b) for a in "etaoinsrhl" for b in "etaoinsrhldc" if a != b or a in "tels"]
    pairs += [(a, b) for a in alphabet for b in alphabet if (a, b) not in set(pairs)] if count > len(pairs) else []
    chosen = pairs[:count]
    return chosen, [a + b for a, b in chosen]


def _rope_parameters(name: str | None, max_position: int, own: dict[str, Any]) -> dict[str, Any]:
    base: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000.0}
    if "partial_rotary_factor" in own:
        base["partial_rotary_factor"] = own["partial_rotary_factor"]
    if "kv_lora_rank" in own:  # DeepSeek's own YaRN is all that SGLang has on a CPU
        base |= {"mscale": 1.0, "mscale_all_dim": 0.7}
        name = "yarn"
    if {"layer_types", "query_pre_attn_scalar"} <= own.keys():  # Gemma 3 has a base for each kind of layer
        local = {"rope_type": "default", "rope_theta": 1000.0}
        return {"sliding_attention": local, "full_attention": base}
    if "mrope_section" in own:
        base |= {"mrope_section": list(own["mrope_section"]), "mrope_interleaved": own["mrope_section"][0] > 2}
    if name is None:
        return base
    extra = _ROPE[name]
    original = {} if name in ("linear", "dynamic") else {"original_max_position_embeddings": max_position // 4}
    return {**base, "rope_type": name, **extra, **original}


def _widen(model: torch.nn.Module) -> None:
    """Scales the matrices so that signals keep unit size and attention logits spread over several units."""
    is_tied = model.config.tie_word_embeddings
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            if name.endswith("bias"):
                torch.nn.init.normal_(parameter, std=0.2)
            elif "q_norm" in name or "k_norm" in name:  # they undo the scale of the projections, so give it here
                torch.nn.init.uniform_(parameter, 1.2, 2.0)
            else:  # norms: not all one, so that a forgotten norm shows
                torch.nn.init.uniform_(parameter, 0.7, 1.3)
                if name.endswith("sinks"):  # SGLang has them in bf16
                    parameter.data = parameter.data.bfloat16().float()
            continue
        fan_in = parameter.shape[-1]
        if "embed_tokens" in name:
            std = 2.0 / fan_in**0.5 if is_tied else 1.0
        elif "q_proj" in name or "k_proj" in name:
            std = 1.6 / fan_in**0.5
        elif "lm_head" in name:
            std = 2.0 / fan_in**0.5
        else:
            std = 1.0 / fan_in**0.5
        torch.nn.init.normal_(parameter, std=std)
