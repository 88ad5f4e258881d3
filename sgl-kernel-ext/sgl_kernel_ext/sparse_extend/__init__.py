"""Attention of chosen query rows over a paged key-value cache: a prefill that computes only some positions.

    sparse_extend    each row attends to every position of its request up to and including its own
    SparseExtend     the same for the layers of a forward, which share positions and slots
    PrivateKeys      exclude list: positions whose shared slot is not read, and the private slot read in its place
    exclude_shared   applies the list to the slots; call it once per forward, if several layers read the same

    positions of one request   0 1 2 3 4 5 6 7 8      kv_indices: the slot of each position
    rows                           ^     ^   ^ ^      row_positions: 2, 4, 6, 7 (ascending)
    keys the row at 4 sees     x x x x x

The work is proportional to rows x visible keys, and only one block of scores exists at a time. Buffers are read-only:
the K and V of the rows themselves must already lie in their slots. Only `out` is written, every element of it. Slots
that no row can see are never read, so they may hold anything.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sgl_kernel_ext.backend import FP8, Backend, check_sinks, resolve_backend
from sgl_kernel_ext.sparse_extend import flashinfer
from sgl_kernel_ext.sparse_extend.torch_blocked import IndPtr, TorchPlan

__all__ = ["PrivateKeys", "SparseExtend", "exclude_shared", "sparse_extend"]


@dataclass(frozen=True)
class PrivateKeys:
    """Positions of some requests whose K and V lie in slots of the request's own; other positions use shared slots.

    Attributes:
        indptr: [num_requests + 1] from 0; request i owns positions[indptr[i]:indptr[i + 1]]; may be empty.
        positions: [num_private] int64, no position twice within a request, each below its kv_len (not checked: that
            would wait for the GPU).
        slots: [num_private] int64.
    """

    indptr: IndPtr
    positions: torch.Tensor
    slots: torch.Tensor


def exclude_shared(kv_indptr: IndPtr, kv_indices: torch.Tensor, private: PrivateKeys) -> torch.Tensor:
    """[num_keys] int64 slots, with those of `private` in the place of the shared ones; `kv_indices` is not changed.

    An excluded slot is never read, so nothing is masked, and every backend gives bit for bit what it gives if all keys
    lie in slots of one request. Slots, not pages, are replaced: any page size works. No host synchronisation.

    Raises:
        ValueError: shapes or dtypes do not fit together.
    """
    for name, index in (("private.positions", private.positions), ("private.slots", private.slots)):
        if index.ndim != 1 or index.dtype != torch.int64 or index.numel() != private.positions.numel():
            raise ValueError(f"{name}: {index.dtype} {tuple(index.shape)}, need int64 [{private.positions.numel()}]")
    if len(private.indptr) != len(kv_indptr):
        raise ValueError(f"private.indptr: {len(private.indptr)} entries, but kv_indptr has {len(kv_indptr)}")
    begins, indptr = (
        torch.as_tensor(pointer, dtype=torch.int64, device=kv_indices.device) for pointer in (kv_indptr, private.indptr)
    )
    begin = begins[:-1].repeat_interleave(indptr.diff(), output_size=private.positions.numel())
    return kv_indices.index_put((begin + private.positions,), private.slots)


class SparseExtend:
    """The attention of one forward: `sparse_extend` with the index tensors given once, for all layers.

    Args: as in `sparse_extend`; no index tensor may be written to until the last call.

    Raises:
        ValueError: shapes or dtypes do not fit together.
    """

    def __init__(
        self,
        kv_indptr: IndPtr,
        kv_indices: torch.Tensor,
        row_indptr: IndPtr,
        row_positions: torch.Tensor,
        *,
        private: PrivateKeys | None = None,
        backend: Backend = "auto",
    ) -> None:
        for name, index in (("kv_indices", kv_indices), ("row_positions", row_positions)):
            if index.ndim != 1 or index.dtype != torch.int64:
                raise ValueError(f"{name}: {index.dtype} {tuple(index.shape)}, need int64 of one dimension")
        if len(kv_indptr) != len(row_indptr) or len(kv_indptr) < 2:
            raise ValueError(
                f"row_indptr: {len(row_indptr)} entries and kv_indptr {len(kv_indptr)}, need equal, 2 or more"
            )
        if private is not None:
            kv_indices = exclude_shared(kv_indptr, kv_indices, private)
        self._index = (kv_indptr, kv_indices, row_indptr, row_positions)
        self._num_rows = row_positions.numel()
        self._backend = backend
        self._torch_plan: TorchPlan | None = None

    def __call__(
        self,
        q: torch.Tensor,
        k_buffer: torch.Tensor,
        v_buffer: torch.Tensor,
        *,
        sm_scale: float,
        logit_cap: float = 0.0,
        k_scale: float = 1.0,
        v_scale: float = 1.0,
        window: int = -1,
        sinks: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """One layer; arguments, result and errors as in `sparse_extend`."""
        _check(q, k_buffer, v_buffer, sm_scale * k_scale)
        check_sinks(sinks, q.shape[1])
        if self._num_rows != q.shape[0]:
            raise ValueError(f"row_positions: {self._num_rows} entries, but q has {q.shape[0]} rows")
        shape = (q.shape[0], q.shape[1], v_buffer.shape[2])
        if out is None:
            out = q.new_empty(shape)
        elif tuple(out.shape) != shape or out.dtype != q.dtype or out.device != q.device:
            raise ValueError(f"out: {out.dtype} {out.shape} on {out.device}, need {q.dtype} {shape} on {q.device}")
        if not q.shape[0]:
            return out
        options = {"sm_scale": sm_scale, "logit_cap": logit_cap, "k_scale": k_scale, "v_scale": v_scale}
        implementation = resolve_backend(self._backend, q.device, "sparse_extend", has_flashinfer=True)
        if implementation == "flashinfer" and window < 0 and sinks is None:
            flashinfer.sparse_extend_flashinfer(q, k_buffer, v_buffer, self._index, out, **options)
        elif implementation in ("triton", "flashinfer"):
            from sgl_kernel_ext.sparse_extend.triton import sparse_extend_triton

            sparse_extend_triton(q, k_buffer, v_buffer, *self._index, out, window=window, sinks=sinks, **options)
        else:
            self._torch_plan = self._torch_plan or TorchPlan(self._index)
            self._torch_plan.attend(q, k_buffer, v_buffer, out, window=window, sinks=sinks, **options)
        return out

    def forget(self) -> None:
        """Frees what calls have made of the index tensors; the next call makes it anew."""
        self._torch_plan = None
        flashinfer.forget()


def sparse_extend(
    q: torch.Tensor,
    k_buffer: torch.Tensor,
    v_buffer: torch.Tensor,
    kv_indptr: IndPtr,
    kv_indices: torch.Tensor,
    row_indptr: IndPtr,
    row_positions: torch.Tensor,
    *,
    sm_scale: float,
    logit_cap: float = 0.0,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    window: int = -1,
    sinks: torch.Tensor | None = None,
    private: PrivateKeys | None = None,
    backend: Backend = "auto",
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend from the rows of one or more requests to the keys at or before each row's own position.

    Query head h reads key-value head h // (num_q_heads // num_kv_heads). Scores are `sm_scale * q.k`, and with a
    positive `logit_cap` then `cap * tanh(score / cap)`; they and the sums are fp32 whatever the dtype.

    With fp8 buffers, K is `k_scale` and V is `v_scale` times what is stored. q's dtype holds every fp8 number, so the
    only error of fp8 is the rounding when K and V were stored: against a definition that reads the same buffers, the
    error bounds are those of q's dtype.

    Args:
        q: [num_rows, num_q_heads, head_dim], rows grouped by request.
        k_buffer: [num_slots, num_kv_heads, head_dim] fp32, fp16, bf16, float8_e4m3fn or float8_e5m2; cast to q's dtype.
            SGLang keeps pools of fp8 as uint8: pass `buffer.view(torch.float8_e4m3fn)`, which is not a copy.
        v_buffer: [num_slots, num_kv_heads, v_head_dim] of the same dtype.
        kv_indptr: [num_requests + 1] from 0; request i owns kv_indices[kv_indptr[i]:kv_indptr[i + 1]]. A list of ints,
            or int64. The torch and FlashInfer paths read it on the host, so a list is better there; the Triton path
            reads it on the device, so a tensor already there is better.
        kv_indices: int64, the slots of positions 0..kv_len-1 of every request.
        row_indptr: [num_requests + 1] from 0; request i owns q[row_indptr[i]:row_indptr[i + 1]]; may be empty.
        row_positions: [num_rows] int64, ascending within a request, each below its kv_len. The torch path checks it;
            the Triton path does not (no host synchronisation) and then sees the existing keys only.
        window: positions that a row sees in front of its own; -1 = all.
        sinks: [num_q_heads], the score of one more key that every row sees, whose value is 0 (gpt-oss); None = there is
            none. FlashInfer's version has neither windows nor sinks: Triton's is used for them.
        private: keys that are read from other slots than kv_indices says.
        out: [num_rows, num_q_heads, v_head_dim] in q's dtype, to write into; last two dimensions dense.

    Returns:
        `out`, or a new tensor of that shape.

    Raises:
        ValueError: shapes, dtypes or devices do not fit together, or `backend` is unknown.

    Example:
        >>> q = torch.randn(2, 8, 64)                       # rows at positions 3 and 9
        >>> k, v = torch.randn(32, 2, 64), torch.randn(32, 2, 64)
        >>> slots = torch.arange(20, 30)                    # 10 positions
        >>> sparse_extend(q, k, v, [0, 10], slots, [0, 2], torch.tensor([3, 9]), sm_scale=0.125).shape
        torch.Size([2, 8, 64])
    """
    attention = SparseExtend(kv_indptr, kv_indices, row_indptr, row_positions, private=private, backend=backend)
    scales = {"sm_scale": sm_scale, "logit_cap": logit_cap, "k_scale": k_scale, "v_scale": v_scale}
    return attention(q, k_buffer, v_buffer, **scales, window=window, sinks=sinks, out=out)


def _check(q: torch.Tensor, k_buffer: torch.Tensor, v_buffer: torch.Tensor, score_scale: float) -> None:
    for name, tensor in (("q", q), ("k_buffer", k_buffer), ("v_buffer", v_buffer)):
        if tensor.ndim != 3:
            raise ValueError(f"{name}: shape {tuple(tensor.shape)}, need three dimensions")
        if tensor.dtype not in (torch.float32, torch.float16, torch.bfloat16) and (
            name == "q" or tensor.dtype not in FP8
        ):
            fp8 = "" if name == "q" else ", or fp8 (of a pool of uint8: .view of it)"
            raise ValueError(f"{name}: {tensor.dtype}, need float32, float16 or bfloat16{fp8}")
    if k_buffer.shape[:2] != v_buffer.shape[:2] or k_buffer.dtype != v_buffer.dtype:
        raise ValueError(
            f"v_buffer: {v_buffer.dtype} {tuple(v_buffer.shape)} has not the dtype, slots and heads of k_buffer"
        )
    if q.shape[2] != k_buffer.shape[2] or q.shape[1] % k_buffer.shape[1]:
        raise ValueError(f"q: {tuple(q.shape)} does not fit k_buffer {tuple(k_buffer.shape)}: head_dim or head count")
    if not score_scale > 0:
        raise ValueError(f"sm_scale, k_scale: their product is {score_scale}, need a positive number")
