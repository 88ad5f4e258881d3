"""sparse_extend in FlashInfer: its paged prefill with an attention variant that knows the position of every row.

    plan   once per forward: reads lengths and positions on the host (this waits for the GPU), builds the index lists
    run    once per layer: nothing waits

FlashInfer walks all keys of what it calls a request, so rows are handed over in groups: each group is a request to
FlashInfer whose keys end at the position of the group's last row. FlashInfer wants the slots of requests one after the
other, so every group has its own copy of them: 4 bytes per key and group, kept to 64 MB by larger groups.

    rows of one request    2 4 6 | 9 12       two groups
    keys of the groups     0..6  | 0..12      a row at p sees those up to p

nvcc compiles the variant when it is first used (minutes; FlashInfer keeps it on disk). If that fails, a warning says so
and `variant()` is "mask": FlashInfer's own kernel then reads a bit per row and key, which takes that much memory.
"""

from __future__ import annotations

import importlib.util
import itertools
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from sgl_kernel_ext.sparse_extend.torch_blocked import Index, as_list

logger = logging.getLogger(__name__)

DTYPES = (torch.float16, torch.bfloat16)
HEAD_DIMS = (64, 128, 256)
WORKSPACE_BYTES = 128 << 20  # FlashInfer's recommendation, for partial results where it splits the keys
ROWS_PER_GROUP = 128  # at least one full tile of FlashInfer's (128 rows x query heads per key-value head); not tuned
MAX_INDEX_ENTRIES = 16 << 20  # of 4 bytes

# The kernel itself reads qo_len, kv_len, window_left and sm_scale_log2. Rows are numbered within their group. Tiles
# have rows past the end of their group: their results are dropped, but they must not read past the positions.
_VARIANT = """
struct RowPositionAttention : AttentionVariantBase {
  uint32_t qo_len, kv_len, window_left, first_row;
  float sm_scale_log2, to_cap;

  template <typename Params>
  __device__ __host__ RowPositionAttention(const Params& params, uint32_t group, uint8_t*) {
    qo_len = params.get_qo_len(group);
    kv_len = params.get_kv_len(group);
    window_left = kv_len;  // none; a shorter one would make the kernel start behind the first key
    first_row = params.q_indptr[group];
    const float sm_scale = params.sm_scale, cap = params.logit_cap;
    to_cap = cap > 0.f ? 2.f * math::log2e * sm_scale / cap : 0.f;
    sm_scale_log2 = math::log2e * (cap > 0.f ? cap : sm_scale);
  }

  // tanh by exp2: the hardware's tanh is off by up to 5e-4, and that times the cap.
  REGISTER_LOGITS_TRANSFORM(params, logits, group, row, key, q_head, kv_head, {
    return to_cap > 0.f ? 1.f - 2.f * math::ptx_rcp(math::ptx_exp2(logits * to_cap) + 1.f) : logits;
  })

  REGISTER_LOGITS_MASK(params, group, row, key, q_head, kv_head, {
    return int32_t(key) <= params.row_positions[first_row + min(row, qo_len - 1)];
  })
};
"""

_workspaces: dict[torch.device, torch.Tensor] = {}
_attentions: dict[torch.device, FlashInferSparseExtend] = {}
_planned: dict[torch.device, tuple[Index, dict[str, Any]]] = {}  # holds the index, so that no other gets its identity
_build_failure: str | None = None


def variant() -> Literal["jit", "mask"]:
    """How new plans mask: "jit" (by row positions), or "mask" if this process has failed to build the variant."""
    return "jit" if _build_failure is None else "mask"


def unserved(
    dtype: torch.dtype, head_dim: int, v_head_dim: int, kv_dtype: torch.dtype, has_sinks: bool = False
) -> str | None:
    """Why FlashInfer has no kernel for a model; None if it has one."""
    if importlib.util.find_spec("flashinfer") is None:
        return "flashinfer is not installed"
    if has_sinks:
        return "it knows no attention sinks, and this model has them"
    if dtype not in DTYPES:
        return f"it computes in float16 and bfloat16, and this model runs in {dtype}"
    if kv_dtype != dtype:
        return f"it reads K and V of the model's dtype, {dtype}, and this pool holds {kv_dtype}"
    if head_dim not in HEAD_DIMS or v_head_dim != head_dim:
        return f"it has heads of {', '.join(map(str, HEAD_DIMS))}, and this model's have {head_dim}, {v_head_dim}"
    return None


@dataclass(frozen=True)
class RowGroups:
    """Rows cut into groups, in order and without gaps.

    Attributes:
        row_indptr: [num_groups + 1], group g has the rows row_indptr[g]:row_indptr[g + 1], at least one.
        kv_starts: [num_groups], where in `kv_indices` the slots of its request begin.
        kv_lens: [num_groups], position of its last row + 1, which is how many slots it needs.
    """

    row_indptr: list[int]
    kv_starts: list[int]
    kv_lens: list[int]

    @property
    def num_mask_bits(self) -> int:
        num_rows = (end - begin for begin, end in itertools.pairwise(self.row_indptr))
        return sum(rows * kv_len for rows, kv_len in zip(num_rows, self.kv_lens, strict=True))

    def slots(self, kv_indices: torch.Tensor) -> torch.Tensor:
        """[sum(kv_lens)] int32, the slots of the keys of every group."""
        slots, spans = kv_indices.to(torch.int32), zip(self.kv_starts, self.kv_lens, strict=True)
        return torch.cat([slots[start : start + kv_len] for start, kv_len in spans])

    def mask(self, row_positions: torch.Tensor) -> torch.Tensor:
        """[num_mask_bits] bool, for every group row by row: which of the group's keys the row sees."""
        keys, rows = torch.arange(max(self.kv_lens), device=row_positions.device), itertools.pairwise(self.row_indptr)
        parts = zip(rows, self.kv_lens, strict=True)
        return torch.cat([(keys[:n] <= row_positions[begin:end, None]).flatten() for (begin, end), n in parts])


def group_rows(
    kv_indptr: Sequence[int],
    row_indptr: Sequence[int],
    row_positions: torch.Tensor,
    rows_per_group: int = ROWS_PER_GROUP,
    max_index_entries: int = MAX_INDEX_ENTRIES,
) -> RowGroups:
    """Cut every request into groups of `rows_per_group` rows, or of 2, 4, ... times as many if the groups would have
    more than `max_index_entries` keys together; at most there is one group per request.

    Args:
        kv_indptr, row_indptr: [num_requests + 1] from 0.
        row_positions: [num_rows], on the host.

    Raises:
        ValueError: the positions of a request do not ascend or leave its keys.
    """
    groups = RowGroups([0], [], [])
    for i, (begin, end) in enumerate(itertools.pairwise(row_indptr)):
        if begin == end:
            continue
        positions, num_keys = row_positions[begin:end], kv_indptr[i + 1] - kv_indptr[i]
        if int(positions[-1]) >= num_keys or int(positions[0]) < 0 or bool((positions.diff() <= 0).any()):
            raise ValueError(f"row_positions: those of request {i} must ascend within [0, {num_keys})")
        ends = [*range(begin + rows_per_group, end, rows_per_group), end]
        groups.row_indptr.extend(ends)
        groups.kv_starts.extend([kv_indptr[i]] * len(ends))
        groups.kv_lens.extend((row_positions[torch.tensor(ends) - 1] + 1).tolist())
    if sum(groups.kv_lens) > max_index_entries and rows_per_group < row_indptr[-1]:
        return group_rows(kv_indptr, row_indptr, row_positions, 2 * rows_per_group, max_index_entries)
    return groups


class FlashInferSparseExtend:
    """The attention of one forward: plan, then run for every layer. All of a device share a workspace and a stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._wrappers: dict[tuple[torch.dtype, int, str], Any] = {}
        self._wrapper: Any = None

    def plan(
        self,
        kv_indptr: Sequence[int],
        kv_indices: torch.Tensor,
        row_indptr: Sequence[int],
        row_positions: torch.Tensor,
        *,
        num_q_heads: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        sm_scale: float,
        logit_cap: float = 0.0,
    ) -> None:
        """Prepare `run` for at least one row; tensors as in `sparse_extend`, `dtype` is that of q, K and V.

        Raises:
            ValueError: indptr or positions do not fit, or a bit mask is needed and would have 2**31 bits or more.
            RuntimeError: FlashInfer can build neither the variant nor its own kernel.
        """
        self._wrapper = None  # a plan that fails leaves none behind
        if kv_indptr[-1] > kv_indices.numel() or row_indptr[-1] != row_positions.numel():
            raise ValueError(
                f"kv_indptr, row_indptr: end at {kv_indptr[-1]} and {row_indptr[-1]}, "
                f"but there are {kv_indices.numel()} slots and {row_positions.numel()} rows"
            )
        # Waiting for this copy also waits for FlashInfer's previous one from the pinned buffer that it writes below.
        groups = group_rows(kv_indptr, row_indptr, row_positions.cpu())
        wrapper, kind = self._wrapper_for(dtype, head_dim)
        options: dict[str, Any] = {}
        if kind == "mask":
            if groups.num_mask_bits >= 2**31:  # counted in int32
                raise ValueError(f'row_positions: a mask of {groups.num_mask_bits} bits; use backend "triton"')
            mask = groups.mask(row_positions)
            options = {"custom_mask": mask, "sm_scale": sm_scale, "logits_soft_cap": max(logit_cap, 0.0)}
        kv_ends = list(itertools.accumulate(groups.kv_lens, initial=0))
        wrapper.plan(
            torch.tensor(groups.row_indptr, dtype=torch.int32),
            torch.tensor(kv_ends, dtype=torch.int32),
            groups.slots(kv_indices),
            torch.ones(len(groups.kv_lens), dtype=torch.int32),  # pages of one slot, for pools of any page size
            num_q_heads,
            num_kv_heads,
            head_dim,
            1,
            q_data_type=dtype,
            kv_data_type=dtype,
            **options,
        )
        positions = row_positions.to(torch.int32)
        self._extra_args = (positions, float(sm_scale), float(logit_cap)) if kind == "jit" else ()
        self._planned, self._wrapper = (num_q_heads, num_kv_heads, head_dim, dtype), wrapper

    def run(self, q: torch.Tensor, k_buffer: torch.Tensor, v_buffer: torch.Tensor, out: torch.Tensor) -> None:
        """Write `out` for the planned rows; shapes as in `sparse_extend`.

        Raises:
            ValueError: there is no plan, or none for such tensors, or FlashInfer has no kernel for them.
        """
        _check_supported(q, k_buffer, v_buffer)
        given = (q.shape[1], k_buffer.shape[1], q.shape[2], q.dtype)
        if self._wrapper is None or given != self._planned:
            raise ValueError(f"q: no plan for (q heads, key-value heads, head_dim, dtype) = {given}")
        # FlashInfer writes `out` as if it were dense.
        dense = out if out.is_contiguous() else torch.empty_like(out, memory_format=torch.contiguous_format)
        self._wrapper.run(q, (k_buffer.unsqueeze(1), v_buffer.unsqueeze(1)), *self._extra_args, out=dense)
        if dense is not out:
            out.copy_(dense)

    def forget(self) -> None:
        """Drops the plan."""
        self._wrapper, self._extra_args = None, ()

    def _wrapper_for(self, dtype: torch.dtype, head_dim: int) -> tuple[Any, str]:
        """FlashInfer's wrapper and how it masks. The first call builds the variant, or notes that this failed."""
        from flashinfer import BatchPrefillWithPagedKVCacheWrapper
        from flashinfer.prefill import get_customize_batch_prefill_module

        global _build_failure
        args, options = jit_arguments(dtype, head_dim)
        if _build_failure is None:
            try:
                get_customize_batch_prefill_module("fa2", *args, **options)  # kept: the wrapper asks for the same
            except (RuntimeError, OSError) as error:
                _build_failure = str(error)
                logger.warning("sparse_extend masks bit by bit: FlashInfer could not build the variant: %s", error)
        key = (dtype, head_dim, variant())
        if key not in self._wrappers:
            jit = {"jit_args": args, "jit_kwargs": options, "variant_owns_mask": True} if variant() == "jit" else {}
            with torch.inference_mode(False):  # its buffers are written in whatever mode `plan` is called later
                if self._device not in _workspaces:
                    _workspaces[self._device] = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=self._device)
                workspace = _workspaces[self._device]
                self._wrappers[key] = BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend="fa2", **jit)
        return self._wrappers[key], key[2]


def jit_arguments(dtype: torch.dtype, head_dim: int) -> tuple[list[Any], dict[str, Any]]:
    """Arguments of FlashInfer's `gen_customize_batch_prefill_module` after the backend: positional and by keyword."""
    name = f"chunk_cache_sparse_extend_{str(dtype).removeprefix('torch.')}_{head_dim}"
    extra = [["row_positions"], ["int32_t"], ["sm_scale", "logit_cap"], ["double", "double"]]
    args = [name, dtype, dtype, dtype, torch.int32, head_dim, head_dim, *extra, "RowPositionAttention", _VARIANT]
    return args, {"paged_kv_stride_mode": "equal"}  # K and V alike: half the paged kernels to compile


def sparse_extend_flashinfer(
    q: torch.Tensor,
    k_buffer: torch.Tensor,
    v_buffer: torch.Tensor,
    index: Index,
    out: torch.Tensor,
    *,
    sm_scale: float,
    logit_cap: float = 0.0,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> None:
    """Write `out`; arguments as in `sparse_extend`, `index` is the index tensors of a `SparseExtend`.

    Plans unless the last call on this device had the same `index`, heads and scales, as the layers of a forward have.

    Raises:
        ValueError: FlashInfer has no kernel for such tensors; and as `FlashInferSparseExtend.plan`.
    """
    _check_supported(q, k_buffer, v_buffer)
    attention = _attentions.setdefault(q.device, FlashInferSparseExtend(q.device))
    heads: dict[str, Any] = {"num_q_heads": q.shape[1], "num_kv_heads": k_buffer.shape[1], "head_dim": q.shape[2]}
    options = heads | {"dtype": q.dtype, "sm_scale": sm_scale * k_scale, "logit_cap": logit_cap}
    planned, last_options = _planned.get(q.device, (None, None))
    if planned is not index or last_options != options:
        _planned.pop(q.device, None)
        kv_indptr, kv_indices, row_indptr, row_positions = index
        attention.plan(as_list(kv_indptr), kv_indices, as_list(row_indptr), row_positions, **options)
        _planned[q.device] = index, options
    attention.run(q, k_buffer, v_buffer, out)
    if v_scale != 1.0:
        out *= v_scale


def forget() -> None:
    """Frees the index tensors of the last plan; the next call plans anew."""
    _planned.clear()
    for attention in _attentions.values():
        attention.forget()


def _check_supported(q: torch.Tensor, k_buffer: torch.Tensor, v_buffer: torch.Tensor) -> None:
    problem = None
    if q.device.type != "cuda":
        problem = f"q: on {q.device}, need CUDA"
    elif q.dtype not in DTYPES:
        problem = f"q: {q.dtype}, need float16 or bfloat16"
    elif q.shape[2] not in HEAD_DIMS:
        problem = f"q: head_dim {q.shape[2]}, need one of {HEAD_DIMS}"
    elif q.shape[0] * q.stride(0) >= 2**31:  # int32 offsets
        problem = f"q: {q.shape[0]} rows {q.stride(0)} elements apart, need less than 2**31"
    elif (k_buffer.shape, k_buffer.stride()) != (v_buffer.shape, v_buffer.stride()):
        problem = f"v_buffer: {tuple(v_buffer.shape)} by {v_buffer.stride()}, need shape and strides of k_buffer"
    else:
        for name, tensor in (("q", q), ("k_buffer", k_buffer), ("v_buffer", v_buffer)):
            if tensor.dtype != q.dtype or tensor.device != q.device:
                problem = problem or f"{name}: {tensor.dtype} on {tensor.device}, need those of q"
            elif tensor.stride(2) != 1 or tensor.data_ptr() % 16 or any(step % 8 for step in tensor.stride()[:2]):
                problem = problem or f"{name}: strides {tensor.stride()}, need dense heads aligned to 16 bytes"
    if problem is not None:
        raise ValueError(f'{problem}; use backend "triton"')
