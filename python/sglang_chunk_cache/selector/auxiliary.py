"""AuxiliaryModel: a small causal model that reads chunks ahead of time and says what a question attends to in them.

Verbs: `load`, `read` (keys and values of tokens, behind those of others), `attend` (a question behind each of many
texts, in one batch).

The model's own code runs; only the attention that its layers call is ours (`transformers.AttentionInterface`). So a
batch of texts of different lengths needs no padding, and the attention of the last layer computes only what is asked
for: the keys of a text, or the weights of a question.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AttentionInterface, AttentionMaskInterface, AutoConfig, AutoModel, AutoTokenizer

from chunk_cache.errors import one_line

ATTENTION = "chunk_cache_selector"
STORED = torch.bfloat16
"""Number format of the keys and values that are kept: it halves the memory, and the ranking hardly changes."""


class SelectorModelError(ValueError):
    """A model that cannot serve as the selector's; the message is the end of a sentence about it."""


@dataclass(frozen=True)
class KeysValues:
    """What a model has read of one text.

    Attributes:
        keys: per layer `[num_kv_heads, num_tokens, head_dim]`, rotated.
        values: the same, without the last layer.
        num_tokens: of this text.
    """

    keys: tuple[torch.Tensor, ...] = ()
    values: tuple[torch.Tensor, ...] = ()
    num_tokens: int = 0

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in (*self.keys, *self.values))


@dataclass
class _Pass:
    """One forward: what stands in front of each row, and what is taken from its layers.

    Attributes:
        pasts: per row, the texts in front of it, in order.
        scored: per row, the columns `[start, end)` whose weights in the last layer are wanted; None = keys are wanted.
    """

    pasts: Sequence[Sequence[KeysValues]]
    num_layers: int
    scored: Sequence[tuple[int, int]] | None = None
    keys: list[torch.Tensor] = field(default_factory=list)
    values: list[torch.Tensor] = field(default_factory=list)
    scores: list[torch.Tensor] = field(default_factory=list)
    num_scoring: int = 0
    """Tokens at the end of each row whose weights count; 0 = all."""

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scaling: float) -> torch.Tensor:
        """Output of one layer, `[num_rows, num_tokens, num_heads, head_dim]`; zeros for the last one.

        Args:
            q, k, v: `[num_rows, heads, num_tokens, head_dim]`, rotated.
        """
        is_last = layer == self.num_layers - 1
        if self.scored is None:
            self.keys.append(k[0].to(STORED))
            if not is_last:
                self.values.append(v[0].to(STORED))
        outputs = []
        for row, texts in enumerate(self.pasts):
            past = [text for text in texts if text.num_tokens]
            keys = torch.cat([*(one.keys[layer].to(k.dtype) for one in past), k[row]], dim=1)
            if is_last:
                if self.scored is not None:
                    self.scores.append(self._weights(q[row], keys, scaling, self.scored[row]))
                continue
            values = torch.cat([*(one.values[layer].to(v.dtype) for one in past), v[row]], dim=1)
            mask = _causal(q.shape[2], keys.shape[1], q.device)
            outputs.append(
                torch.nn.functional.scaled_dot_product_attention(
                    q[row : row + 1], keys[None], values[None], attn_mask=mask, scale=scaling, enable_gqa=True
                )
            )
        return torch.zeros_like(q).transpose(1, 2) if is_last else torch.cat(outputs).transpose(1, 2)

    def _weights(self, q: torch.Tensor, keys: torch.Tensor, scaling: float, columns: tuple[int, int]) -> torch.Tensor:
        """Mean over heads and scoring tokens of softmax(q k) at `columns`; `[num_columns]` fp32."""
        num_kv_heads, num_keys, head_dim = keys.shape
        mask = _causal(q.shape[1], num_keys, q.device)
        num = self.num_scoring or q.shape[1]
        grouped = q[:, -num:].reshape(num_kv_heads, -1, head_dim)  # the query heads of a key head stand together
        logits = (grouped @ keys.transpose(1, 2)).view(-1, num, num_keys).float() * scaling
        weights = logits.masked_fill(mask[-num:].logical_not(), float("-inf")).softmax(dim=-1)
        return weights[:, :, columns[0] : columns[1]].mean(dim=(0, 1))


def _causal(num_queries: int, num_keys: int, device: torch.device) -> torch.Tensor:
    """Bool `[num_queries, num_keys]`: the last keys are those of the queries."""
    mask = torch.ones(num_queries, num_keys, dtype=torch.bool, device=device)
    return mask.tril(diagonal=num_keys - num_queries)


def _attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    scaling: float | None = None,
    chunk_cache_pass: _Pass | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    if chunk_cache_pass is None:
        raise SelectorModelError("its layers do not hand on what they are called with")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return chunk_cache_pass.attend(int(module.layer_idx), query, key, value, scale), None


AttentionInterface.register(ATTENTION, _attention)
AttentionMaskInterface.register(ATTENTION, lambda *args, **kwargs: None)


class AuxiliaryModel:
    """See the head of this file.

    Args:
        model: without a language-model head, with our attention.
        tokenizer: a fast one, which knows where its tokens lie in a text.
    """

    def __init__(self, model: Any, tokenizer: Any) -> None:
        self.model = model
        self.tokenizer = tokenizer
        config = model.config
        self.num_layers = int(config.num_hidden_layers)
        self.max_len = int(getattr(config, "max_position_embeddings", 0) or 2**31)

    @classmethod
    def load(cls, path: str, *, device: str = "cpu") -> AuxiliaryModel:
        """The model of a Hugging Face folder or name.

        Raises:
            SelectorModelError: there is none, or it cannot select.
        """
        check_selector_model(path)
        try:
            model = AutoModel.from_pretrained(path, dtype=torch.float32, attn_implementation=ATTENTION)
        except (OSError, ValueError, RuntimeError, SafetensorError) as error:
            raise SelectorModelError(f"its weights cannot be loaded ({one_line(error)[:300]})") from error
        auxiliary = cls(model.eval().to(device), AutoTokenizer.from_pretrained(path))
        with torch.no_grad():  # a class that does not work like a decoder fails here
            text = auxiliary.read([0, 0], ())
            auxiliary.attend([0], [(text,)])
        return auxiliary

    def encode(self, text: str) -> list[int]:
        """Ids of a text, with the special tokens that the tokenizer adds."""
        return list(self.tokenizer(text)["input_ids"])

    def sink_of(self, text: str) -> list[int]:
        """Ids of the text in front of all chunks; if there is none, of a special token that serves as the sink."""
        special = (self.tokenizer.bos_token_id, self.tokenizer.eos_token_id)
        return self.encode(text) or [one for one in special if one is not None][:1]

    def read(self, ids: Sequence[int], past: Sequence[KeysValues]) -> KeysValues:
        """Keys and values of tokens that stand behind `past`; without a gradient."""
        if not ids:
            return KeysValues()
        one = _Pass([past], self.num_layers)
        with torch.no_grad():
            self._run([ids], [past], one)
        return KeysValues(tuple(one.keys), tuple(one.values), len(ids))

    def attend(self, ids: Sequence[int], pasts: Sequence[Sequence[KeysValues]]) -> list[torch.Tensor]:
        """Last-layer attention of one question, behind each of `pasts`, to the last text of each.

        Returns:
            Per row `[num_tokens of its last text]` fp32: mean over the question's tokens and the heads.
        """
        columns = []
        for past in pasts:
            end = sum(text.num_tokens for text in past)
            columns.append((end - past[-1].num_tokens, end))
        one = _Pass(pasts, self.num_layers, columns)
        with torch.no_grad():
            self._run([ids] * len(pasts), pasts, one)
        return one.scores

    def attend_within(self, ids: Sequence[int], columns: tuple[int, int], num_question: int) -> torch.Tensor:
        """Does what `attend` does, for one text that ends with its question; with a gradient if the model has one.

        Args:
            ids: of the whole text.
            columns: the range of its tokens that are scored.
            num_question: tokens of the question.
        """
        one = _Pass([()], self.num_layers, [columns], num_scoring=num_question)
        self._run([ids], [()], one)
        return one.scores[0]

    def _run(self, ids: Sequence[Sequence[int]], pasts: Sequence[Sequence[KeysValues]], one: _Pass) -> None:
        device = self.model.device
        input_ids = torch.tensor([list(row) for row in ids], device=device)
        starts = torch.tensor([[sum(text.num_tokens for text in past)] for past in pasts], device=device)
        positions = starts + torch.arange(input_ids.shape[1], device=device)
        self.model(input_ids=input_ids, position_ids=positions, use_cache=False, chunk_cache_pass=one)


def check_selector_model(path: str) -> None:
    """Checks what can be seen of a model without its weights.

    Raises:
        SelectorModelError: there is none, its tokenizer does not fit it, or it cannot tell where its tokens lie.
    """
    try:
        config, tokenizer = AutoConfig.from_pretrained(path), AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError, KeyError) as error:
        raise SelectorModelError(
            f"{path!r} is neither a Hugging Face folder nor a name with model and tokenizer ({one_line(error)[:300]})"
        ) from error
    if not getattr(tokenizer, "is_fast", False):
        raise SelectorModelError(f"the tokenizer of {path!r} does not say where its tokens lie (it is not a fast one)")
    vocab_size = getattr(config, "vocab_size", None)
    if not isinstance(vocab_size, int) or not hasattr(config, "num_hidden_layers"):
        raise SelectorModelError(f"{path!r} is not a text model")
    if len(tokenizer) > vocab_size:
        problem = f"the tokenizer of {path!r} has {len(tokenizer)} tokens and its model {vocab_size}"
        raise SelectorModelError(f"{problem}: they do not belong together")
