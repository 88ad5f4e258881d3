"""Tokenizer and shape of the model in a folder, read on this machine; `load_tokenizer`, `load_shape`.

If transformers is installed, it loads the tokenizer as a server does. Otherwise the package tokenizers reads
`tokenizer.json`, without chat templates.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from chunk_cache.errors import one_line, request_error

INSTALL = "or run `pip install transformers`"
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")


def load_tokenizer(path: str, flag: str = "--tokenizer") -> Any:
    """The tokenizer in a model folder; with transformers installed, also of a Hugging Face name.

    Raises:
        ChunkCacheRequestError: there is no tokenizer; the message names `flag`.
    """
    if not _has_transformers():
        return PlainTokenizer(path, flag)
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError) as error:
        problem = f"no tokenizer in {path!r} ({one_line(error)[:120]})"
        raise request_error(flag, problem, "name a folder with the tokenizer of the server's model") from None


class Shape(NamedTuple):
    """The shape that a model's configuration gives; `has_states`: some layers keep a state instead of KV."""

    num_layers: int
    has_states: bool


def load_shape(path: str, flag: str) -> Shape:
    """The shape of the model in a folder; with transformers installed, also of a Hugging Face name.

    Raises:
        ChunkCacheRequestError: there is no model; the message names `flag`.
    """
    try:
        if _has_transformers():
            from transformers import AutoConfig

            config = AutoConfig.from_pretrained(path).get_text_config().to_dict()
        else:
            config = json.loads((Path(path) / "config.json").read_text(encoding="utf-8"))
            config = config.get("text_config", config)
        num_layers = int(next(config[name] for name in _LAYERS if name in config))
        return Shape(num_layers, "linear_attention" in (config.get("layer_types") or ()))
    except (OSError, ValueError, StopIteration) as error:
        problem = f"no model in {path!r} ({one_line(error)[:120]})"
        remedy = "name a Hugging Face folder, or with --tokenizer where it lies"
        raise request_error(flag, problem, remedy if _has_transformers() else f"{remedy}, {INSTALL}") from None


def _has_transformers() -> bool:
    return importlib.util.find_spec("transformers") is not None


class PlainTokenizer:
    """The methods of a Hugging Face tokenizer that the tools need, for a `tokenizer.json`."""

    is_fast = True  # it gives the offsets of tokens
    chat_template = None

    def __init__(self, path: str, flag: str) -> None:
        from tokenizers import Tokenizer

        try:
            text = (Path(path) / "tokenizer.json").read_text(encoding="utf-8")
            json.loads(text)["model"]
        except (OSError, ValueError, LookupError, TypeError) as error:
            problem = f"no tokenizer.json in {path!r} ({one_line(error)[:120]})"
            remedy = f"name a folder with the tokenizer of the server's model, {INSTALL}"
            raise request_error(flag, problem, remedy) from None
        try:
            self._core = Tokenizer.from_str(text)
        except Exception as error:  # noqa: BLE001  (the package raises no narrower kind)
            problem = f"tokenizer.json in {path!r} cannot be used ({one_line(error)[:120]})"
            raise request_error(flag, problem, "name a folder with the tokenizer of the server's model") from None

    def __len__(self) -> int:
        return int(self._core.get_vocab_size())

    def __call__(self, text: str, add_special_tokens: bool = True, **_: Any) -> dict[str, list[Any]]:
        """The token ids of a text, their offsets in it, and a mask of the special tokens that the tokenizer adds."""
        found = self._core.encode(text, add_special_tokens=add_special_tokens)
        return {
            "input_ids": found.ids, "offset_mapping": found.offsets, "special_tokens_mask": found.special_tokens_mask
        }  # fmt: skip

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """The token ids of a text."""
        return self(text, add_special_tokens)["input_ids"]

    def decode(self, ids: Sequence[int], **_: Any) -> str:
        """The text of tokens, special ones included."""
        return str(self._core.decode(list(ids), skip_special_tokens=False))

    def convert_ids_to_tokens(self, token_id: int) -> str:
        """The token as the vocabulary spells it."""
        return str(self._core.id_to_token(token_id))
