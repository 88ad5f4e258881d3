"""What a scorer sees at one layer; `scorer_of` finds the scorer of a method.

`QuestionAtLayer` are questions that are computed in a forward of their own, whose K is written; `RowsAtLayer` are rows
that are about to attend, where buffers still hold the reused K and V, which are written afterwards. Promise: the
tensors are read-only.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import torch

from chunk_cache.methods import Options
from sgl_kernel_ext.attention_mass import attention_mass
from sgl_kernel_ext.backend import resolve_backend
from sglang_chunk_cache.kv.layer_kv import LayerKV


@dataclass(frozen=True)
class QuestionAtLayer:
    """Questions of some requests at one layer, whose keys stand one behind the other; heads are those of this rank.

    Attributes:
        q: `[num_rows, num_q_heads, head_dim]`, rotated.
        positions: `[num_rows]` int64, ascending, among the keys of all.
        firsts: `[num_rows]` int64, where the keys of the row's request begin.
        row_lens, kv_lens: rows and keys of each request.
        kv_slots: `[sum of kv_lens]` int64, the slot of each key.
        stored: of this layer.
        sm_scale, logit_cap: of the layer's attention.
        tp_size: ranks among which the heads are divided.
        sinks: `[num_q_heads]` of the layer's attention; None = it has none.
        kernel: backend of the operations.
    """

    q: torch.Tensor
    positions: torch.Tensor
    firsts: torch.Tensor
    row_lens: Sequence[int]
    kv_lens: Sequence[int]
    kv_slots: torch.Tensor
    stored: LayerKV
    sm_scale: float
    logit_cap: float
    tp_size: int
    sinks: torch.Tensor | None
    kernel: str

    def question_mass(self, *, squared: bool = False) -> torch.Tensor:
        """`[sum of kv_lens]` fp32: column sums of softmax(q k), or of its squares, over each key's question.

        This rank's part of the mean over heads.
        """
        mass = partial(
            attention_mass,
            sm_scale=self.sm_scale,
            logit_cap=self.logit_cap,
            squared=squared,
            sinks=self.sinks,
            backend=self.kernel,
        )
        keys = self.stored.keys(self.kv_slots, self.q.dtype)
        if resolve_backend(self.kernel, keys.device, "attention_mass") == "triton":
            received, _ = mass(self.q, keys, self.positions, row_firsts=self.firsts)
        else:
            rows = zip(
                *(self.q.split(self.row_lens), keys.split(self.kv_lens)),
                (self.positions - self.firsts).split(self.row_lens),
                strict=True,
            )
            received = torch.cat([mass(*own)[0] for own in rows])
        return received if self.tp_size == 1 else received / self.tp_size


@dataclass(frozen=True)
class RowsAtLayer:
    """One request's rows when the attention of a layer is about to run; heads are those of this rank.

    Attributes:
        q: `[num_rows, num_q_heads, head_dim]`, rotated.
        k, v: `[num_rows, num_kv_heads, head_dim]`, rotated, not yet written.
        positions: `[num_rows]` int64, ascending.
        num_question, num_answer: of the last rows; those of the answer stand behind those of the question.
        kv_slots: `[kv_len]` int64, the slot of each position.
        stored: of this layer.
        sm_scale, logit_cap: of the layer's attention.
        tp_size: ranks among which the heads are divided.
        options: of the method, as far as they are given.
        kernel: backend of the operations.
        sinks: `[num_q_heads]` of the layer's attention; None = it has none.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    positions: torch.Tensor
    num_question: int
    num_answer: int
    kv_slots: torch.Tensor
    stored: LayerKV
    sm_scale: float
    logit_cap: float
    tp_size: int
    options: Options = ()
    kernel: str = "auto"
    sinks: torch.Tensor | None = None

    @property
    def question_q(self) -> torch.Tensor:
        """`[num_question, num_q_heads, head_dim]`."""
        return self.q[self._question]

    @property
    def question_positions(self) -> torch.Tensor:
        """`[num_question]` int64."""
        return self.positions[self._question]

    @property
    def _question(self) -> slice:
        end = len(self.positions) - self.num_answer
        return slice(end - self.num_question, end)

    def slots(self) -> torch.Tensor:
        """`[num_rows]` int64: where the K and V of the rows lie, reused where the row is, undefined where it is not."""
        return self.kv_slots[self.positions]

    def keys(self) -> torch.Tensor:
        """`[kv_len, num_kv_heads, head_dim]`: K of every position, of the rows as just computed; to be read only."""
        keys = self.stored.keys(self.kv_slots, self.k.dtype)
        keys[self.positions] = self.k
        return keys

    def question_mass(self) -> torch.Tensor:
        """`[kv_len]` fp32: column sums of softmax(q k) over the question; this rank's part of the mean over heads."""
        received, _ = attention_mass(
            self.question_q,
            self.keys(),
            self.question_positions,
            sm_scale=self.sm_scale,
            logit_cap=self.logit_cap,
            sinks=self.sinks,
            backend=self.kernel,
        )
        return received if self.tp_size == 1 else received / self.tp_size


Scorer: TypeAlias = Callable[[Any], torch.Tensor]
"""`score(rows)`: fp32, larger = recompute; the part of this rank's heads, which are summed over ranks afterwards.

Of a method of stage LAYER it is given `RowsAtLayer` and returns `[num_rows]`; of stage QUESTION `QuestionAtLayer` and
`[sum of kv_lens]`, where entries of tokens that are not reused are ignored.
"""


def scorer_of(method: str) -> Scorer:
    """The function `score` of the file that is named like the method, `-` as `_`.

    Raises:
        ImportError, AttributeError: there is none.
    """
    return pkgutil.resolve_name(f"{__package__}.{method.replace('-', '_')}:score")
