"""Makes a Hugging Face model folder of a training checkpoint, with its accuracy on held-out questions in its README.

    python benchmark/quality/train/export.py FOLDER/checkpoint.pt benchmark/quality/models/qa-1m-seed0

Written: bfloat16 weights, `config.json` (LlamaForCausalLM), a word-level tokenizer, `generation_config.json` and a
model card. The accuracy is that of the weights as written, read back.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import torch
from benchmark.quality.synthetic.notes import FAMILIES
from benchmark.quality.synthetic.questions import HELD_OUT_SEEDS, make_questions
from benchmark.quality.synthetic.vocabulary import BOS, EOS, ID_OF, PAD, UNKNOWN
from benchmark.quality.train.evaluate import MODES, exact_match
from benchmark.quality.train.hybrid import Hybrid, HybridConfig, make_model
from benchmark.quality.train.model import Llama, ModelConfig
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

MAX_POSITIONS = 2048
MASTERED = 0.95  # families below this are listed as not mastered
NUM_QUESTIONS = 200
WEIGHTS_FILE = "model.safetensors"


@dataclass(frozen=True)
class Run:
    """What a checkpoint says about itself: how it was trained, and its weights in fp32."""

    config: ModelConfig
    seed: int
    step: int
    num_steps: int
    weights: dict[str, torch.Tensor]


def read_checkpoint(path: Path) -> Run:
    """The weights and origin of a checkpoint of `train.py`."""
    state = torch.load(path, map_location="cpu", weights_only=True)
    sizes = state["size"]["model"]
    config = HybridConfig(**sizes) if "full_every" in sizes else ModelConfig(**sizes)
    return Run(config, state["seed"], state["progress"]["step"], state["size"]["num_steps"], state["model"])


def write_model(run: Run, folder: Path) -> None:
    """Weights, configuration and tokenizer; everything that SGLang or transformers loads."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: weight.to(torch.bfloat16).contiguous() for name, weight in run.weights.items()}
    save_file(weights, folder / WEIGHTS_FILE, metadata={"format": "pt"})
    is_hybrid = isinstance(run.config, HybridConfig)
    _write_json(folder / "config.json", hybrid_config(run.config) if is_hybrid else llama_config(run.config))
    _write_json(
        folder / "generation_config.json",
        {
            "bos_token_id": ID_OF[BOS],
            "eos_token_id": ID_OF[EOS],
            "pad_token_id": ID_OF[PAD],
            "do_sample": False,
        },
    )
    make_tokenizer().save_pretrained(folder)


def llama_config(config: ModelConfig) -> dict[str, Any]:
    """`config.json` of the same architecture in transformers and SGLang."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.mlp_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "max_position_embeddings": MAX_POSITIONS,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "bos_token_id": ID_OF[BOS],
        "eos_token_id": ID_OF[EOS],
        "pad_token_id": ID_OF[PAD],
        "torch_dtype": "bfloat16",
    }


def hybrid_config(config: HybridConfig) -> dict[str, Any]:
    """`config.json` of the same architecture, a text model, in transformers and SGLang."""
    changed = {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        "attn_output_gate": True,
        "layer_types": [
            "full_attention" if config.is_full(index) else "linear_attention" for index in range(config.num_layers)
        ],
        "full_attention_interval": config.full_every,
        "partial_rotary_factor": config.rotary_share,  # which SGLang reads here
        "linear_conv_kernel_dim": config.conv_size,
        "linear_key_head_dim": config.state_size,
        "linear_value_head_dim": config.state_size,
        "linear_num_key_heads": config.num_states,
        "linear_num_value_heads": config.num_states,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": config.rope_theta,
            "partial_rotary_factor": config.rotary_share,
        },
    }
    left_out = ("mlp_bias", "rope_theta")
    return {name: value for name, value in llama_config(config).items() if name not in left_out} | changed


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One word, one token; the beginning-of-sequence token in front; decoding joins words by one space."""
    tokenizer = Tokenizer(models.WordLevel(dict(ID_OF), unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, ID_OF[BOS])]
    )
    # Without a decoder, tokens are joined by one space.
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        unk_token=UNKNOWN,
        model_max_length=MAX_POSITIONS,
        clean_up_tokenization_spaces=False,
    )


def read_model(folder: Path, config: ModelConfig) -> Llama | Hybrid:
    """The weights of an exported folder, in fp32."""
    model = make_model(config, torch.Generator().manual_seed(0))
    model.load_state_dict({name: weight.float() for name, weight in load_file(folder / WEIGHTS_FILE).items()})
    return model.eval()


def read_folder(folder: Path) -> Llama | Hybrid:
    """The model of an exported folder, of the sizes "1m" and "hybrid-1m"."""
    is_hybrid = json.loads((folder / "config.json").read_text(encoding="utf-8"))["model_type"] == "qwen3_5_text"
    return read_model(folder, HybridConfig(len(ID_OF)) if is_hybrid else ModelConfig(len(ID_OF)))


def measure(model: Llama | Hybrid, num: int) -> dict[str, dict[str, float]]:
    """Exact match per family and column on `num` held-out questions each: in full on every held-out seed, chunk by
    chunk on the first one."""
    cases = [("full", seed) for seed in HELD_OUT_SEEDS] + [(mode, HELD_OUT_SEEDS[0]) for mode in MODES[1:]]
    return {
        family: {
            f"{mode}, seed {seed}": exact_match(model, make_questions(family, num=num, seed=seed), mode)
            for mode, seed in cases
        }
        for family in FAMILIES
    }


def model_card(run: Run, accuracy: dict[str, dict[str, float]], num: int) -> str:
    """README.md of a model folder; `accuracy` is what `measure` gives."""
    num_params = sum(weight.numel() for weight in run.weights.values())
    columns = list(accuracy[FAMILIES[0]])
    in_full = columns[: len(HELD_OUT_SEEDS)]
    missed = [family for family in FAMILIES if any(accuracy[family][column] < MASTERED for column in in_full)]
    is_hybrid = isinstance(run.config, HybridConfig)
    kind = "hybrid of gated delta rule and attention (Qwen3.5's architecture)" if is_hybrid else "Llama"
    options = "--size hybrid-1m " if is_hybrid else ""
    lines = [
        f"# Question answering over synthetic notes, {num_params / 1e6:.2f} M parameters, training seed {run.seed}",
        "",
        f"A {kind} trained from scratch to measure what reuse of chunk KV does to answers. It knows the words and",
        "sentences of `benchmark/quality/synthetic/` and nothing else. How it was made: `docs/benchmarks.md`.",
        "",
        "- command: `OMP_NUM_THREADS=1 python benchmark/quality/train/train.py"
        f" {options}--seed {run.seed} --out FOLDER`",
        f"- steps: {run.step} of {run.num_steps}, on one CPU core, fp32; the weights are stored in bfloat16",
        f"- {run.config.num_layers} layers, hidden size {run.config.hidden_size}, {run.config.num_heads} heads,"
        f" {run.config.num_kv_heads} KV heads, MLP {run.config.mlp_size}, vocabulary {run.config.vocab_size},"
        f" tied embeddings, {MAX_POSITIONS} positions",
        "- data: made by the generator; license as the repository's",
        "",
        f"Exact match in percent of the stored weights in fp32, {num} questions per family and seed, seeds never",
        "trained on. `full`: every token computed in the whole prompt. `shifted`: every chunk computed alone behind",
        "the system prompt, then put at its place with rotary embeddings for it. `unshifted`: without the shift.",
        "",
        f"| family | {' | '.join(columns)} |",
        f"| --- | {' | '.join('---:' for _ in columns)} |",
    ]
    for family in FAMILIES:
        cells = (f"{100 * accuracy[family][column]:.1f}" for column in columns)
        lines.append(f"| {family} | {' | '.join(cells)} |")
    lines += [
        "",
        f"Not mastered (below {100 * MASTERED:.0f} % in full on a seed): {', '.join(missed) or 'none'}.",
        "",
    ]
    return "\n".join(lines)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--questions", type=int, default=NUM_QUESTIONS, help="per family and held-out seed")
    args = parser.parse_args()
    if not args.checkpoint.is_file():
        parser.error(f"{args.checkpoint} does not exist; give the checkpoint.pt that train.py wrote.")
    run = read_checkpoint(args.checkpoint)
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    write_model(run, args.folder)
    model = read_model(args.folder, run.config)
    card = model_card(run, measure(model, args.questions), args.questions)
    (args.folder / "README.md").write_text(card, encoding="utf-8")
    print(card)
    return 0


if __name__ == "__main__":
    sys.exit(main())
