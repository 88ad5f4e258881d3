"""An image processor, and a tokenizer with the tokens that it needs, for a tiny model that sees images.

Verb: `add_image_processor`. `TEMPLATE` is a chat template that has a place for images.
"""

from __future__ import annotations

import json
from pathlib import Path

import transformers

PLACEHOLDER = "<|vision_start|><|image_pad|><|vision_end|>"
"""What stands for an image in a text."""
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|{{ m['role'] }}|>"
    "{% if m['content'] is string %}{{ m['content'] }}{% else %}"
    "{% for part in m['content'] %}"
    "{% if part['type'] == 'text' %}{{ part['text'] }}{% else %}" + PLACEHOLDER + "{% endif %}"
    "{% endfor %}{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
_TOKENS = ("<|video_pad|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>")


def add_image_processor(folder: Path) -> Path:
    """Has a tiny Qwen3-VL of `tiny_models.make_model` read images of files; returns its folder.

    The tokens of images take the places of the last four of its tokenizer.
    """
    file = folder / "tokenizer.json"
    raw = json.loads(file.read_text())
    vocab = raw["model"]["vocab"]
    first = len(vocab) - len(_TOKENS)
    known = {token: i for token, i in vocab.items() if i < first}
    merges = [pair for pair in raw["model"]["merges"] if "".join(pair) in known]
    raw["model"] |= {"vocab": known, "merges": merges}
    flags = {"special": True, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    raw["added_tokens"] += [{"id": first + i, "content": token, **flags} for i, token in enumerate(_TOKENS)]
    file.write_text(json.dumps(raw))
    file = folder / "config.json"
    config = json.loads(file.read_text())
    names = ("video_token_id", "vision_start_token_id", "vision_end_token_id", "image_token_id")
    file.write_text(json.dumps(config | {name: first + i for i, name in enumerate(names)}))
    tower = config["vision_config"]
    sizes = {
        "patch_size": tower["patch_size"],
        "temporal_patch_size": tower["temporal_patch_size"],
        "merge_size": tower["spatial_merge_size"],
    }
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = TEMPLATE
    transformers.Qwen3VLProcessor(
        image_processor=transformers.Qwen2VLImageProcessor(min_pixels=64, max_pixels=4096, **sizes),
        tokenizer=tokenizer,
        video_processor=transformers.Qwen3VLVideoProcessor(**sizes),
        chat_template=TEMPLATE,
    ).save_pretrained(folder)
    return folder
