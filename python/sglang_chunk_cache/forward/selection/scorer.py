"""What a scorer sees; `scorer_of` finds the scorer of a method.

`AskedLayers` are questions that were computed in a forward of their own, and their K is written. `RowsAtLayer` are rows
that are about to attend: their K and V are written afterwards, so buffers still hold the reused ones. Promise: the
tensors are read-only.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import Any, TypeAlias

import torch

from chunk_cache.methods import METHODS, Options, Stage
from sgl_kernel_ext.attention_mass import attention_mass
from sgl_kernel_ext.question_mass import Questions, question_mass
from sglang_chunk_cache.kv.layer_kv import LayerKV


@dataclass(frozen=True)
class AskedLayers:
    """Questions of some requests at some layers, whose keys have one layout; heads are those of this rank.

    Attributes:
        q: `[num_layers, questions.num_rows, num_q_heads, head_dim]`, rotated.
        questions: which rows they are, and where the keys of their requests lie.
        stored: of each layer.
        sm_scale, logit_cap: of the layers' attention.
        sinks: `[num_q_heads]` of each layer's attention; None = it has none.
        so_far: `[sum of kv_lens]` fp32, scores of the layers in front of these; None = there are none.
        kernel: backend of the operations.
    """

    q: torch.Tensor
    questions: Questions
    stored: Sequence[LayerKV]
    sm_scale: float
    logit_cap: float
    sinks: Sequence[torch.Tensor] | None
    so_far: torch.Tensor | None
    kernel: str

    def question_mass(self, *, squared: bool = False) -> torch.Tensor:
        """`so_far` plus, for each key, the sum of softmax(q k), or of its squares, over its question and these layers.

        It is the mean over the heads of this rank.
        """
        return question_mass(
            self.q,
            [one.k for one in self.stored],
            self.questions,
            sm_scale=self.sm_scale,
            logit_cap=self.logit_cap,
            k_scales=[one.k_scale for one in self.stored],
            squared=squared,
            sinks=self.sinks,
            added_to=self.so_far,
            backend=self.kernel,
        )


@dataclass(frozen=True)
class RowsAtLayer:
    """One request's rows when the attention of a layer is about to run; heads are those of this rank.

    Attributes:
        q: `[num_rows, num_q_heads, head_dim]`, rotated.
        k, v: `[num_rows, num_kv_heads, head_dim]`, rotated, not yet written.
        positions: `[num_rows]` int64, ascending.
        num_question, num_answer: how many of the last rows are the question's and, behind them, the answer's.
        kv_slots: `[kv_len]` int64, the slot of each position.
        stored: of this layer.
        sm_scale, logit_cap: of the layer's attention.
        tp_size: ranks among which the heads are divided.
        options: those of the method that are given.
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
        """`[num_rows]` int64: slots of the rows, which hold the reused K and V of a reused row, else anything."""
        return self.kv_slots[self.positions]

    def keys(self) -> torch.Tensor:
        """`[kv_len, num_kv_heads, head_dim]`: K of every position, with the newly computed K of the rows."""
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
"""`score(rows)`: fp32, larger = recompute; scores of ranks are summed afterwards.

If rows of the method leave at a layer, it takes `RowsAtLayer` and returns `[num_rows]`, the part of this rank's heads.
If the method asks first, it takes `AskedLayers` and returns `[sum of kv_lens]`, means over this rank's heads, added to
`so_far`; entries of tokens that are not reused are ignored.
"""


@cache
def scorer_of(method: str) -> Scorer:
    """The function `score` of the file that has the method's name, with `_` for `-`.

    Without a file, a method that asks first scores by how much the question attends to a token.

    Raises:
        ImportError, AttributeError: there is none.
    """
    module, how = f"{__package__}.{method.replace('-', '_')}", METHODS[method]
    asks_first = how.stage is Stage.QUESTION or how.last_asked_layer(()) is not None
    if asks_first and find_spec(module) is None:
        return AskedLayers.question_mass
    return pkgutil.resolve_name(f"{module}:score")
