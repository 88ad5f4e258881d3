"""RowsAtLayer: what a scorer sees of one request at one layer; `scorer_of` finds the scorer of a method.

Promises: the tensors are read-only; buffers still hold the reused K and V of the rows, which are written afterwards.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import torch

from chunk_cache.methods import Options
from sgl_kernel_ext.attention_mass import attention_mass
from sgl_kernel_ext.rotary import RotarySpec
from sglang_chunk_cache.kv.layer_kv import LayerKV


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
        rotary: of the keys of this layer; None where they carry no position.
        num_unrotated: dimensions of a key in front of those that `rotary` is about; with latent attention they are V.
        options: of the method, as far as they are given.
        kernel: backend of the operations.
        are_written: whether the K and V of the rows lie in their slots already.
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
    rotary: RotarySpec | None = None
    num_unrotated: int = 0
    options: Options = ()
    kernel: str = "auto"
    are_written: bool = False
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
        if not self.are_written:
            keys[self.positions] = self.k
        return keys

    def question_mass(self, *, squared: bool = False) -> torch.Tensor:
        """`[kv_len]` fp32: column sums of softmax(q k), or of its squares, over the question.

        This rank's part of the mean over heads.
        """
        received, _ = attention_mass(
            self.question_q,
            self.keys(),
            self.question_positions,
            sm_scale=self.sm_scale,
            logit_cap=self.logit_cap,
            squared=squared,
            sinks=self.sinks,
            backend=self.kernel,
        )
        return received if self.tp_size == 1 else received / self.tp_size


Scorer: TypeAlias = Callable[[RowsAtLayer], torch.Tensor]
"""`score(rows)`: fp32, larger = recompute; the part of this rank's heads, the executor sums over ranks.

Of a method of stage LAYER `[num_rows]`, of stage QUESTION `[kv_len]`, by position; entries of tokens that are not
reused are ignored.
"""


def scorer_of(method: str) -> Scorer:
    """The function `score` of the file that is named like the method, `-` as `_`.

    Raises:
        ImportError, AttributeError: there is none.
    """
    return pkgutil.resolve_name(f"{__package__}.{method.replace('-', '_')}:score")
