"""Kernels of SGLang's attention backends, in torch on the CPU.

Each takes the arguments of the kernel whose name it bears and reads nothing else. Whatever SGLang's call may hold
beyond them (windows, caps) is refused. K and V in FP8 are the scales of the call times what is stored.
"""

from __future__ import annotations

import itertools
import sys
import types

import sglang.srt.utils
import torch


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    causal: bool = True,
    sinks: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`[q_len, q_heads, dim]` of one sequence and its natural log-sum-exp `[q_len, q_heads]`, in fp32.

    Args:
        q: `[q_len, q_heads, dim]`.
        k, v: `[kv_len, kv_heads, dim]`.
        causal: the last query sees every key, the one before it all but the last.
        sinks: `[q_heads]`, a logit that takes part in the softmax and has no value.
    """
    group = q.shape[1] // k.shape[1]
    k, v = (one.float().repeat_interleave(group, dim=1) for one in (k, v))
    scores = torch.einsum("qhd,khd->qhk", q.float(), k) * scale
    if causal:
        hidden = torch.ones(len(q), len(k), dtype=torch.bool).triu(len(k) - len(q) + 1)
        scores.masked_fill_(hidden[:, None], float("-inf"))
    lse = scores.logsumexp(-1)
    if sinks is not None:
        lse = torch.logaddexp(lse, sinks.float())
    weights = (scores - lse[..., None]).exp() if len(k) else scores
    return torch.einsum("qhk,khd->qhd", weights, v), lse


def _spans(indptr: torch.Tensor) -> list[tuple[int, int]]:
    bounds = indptr.tolist()
    assert bounds[0] == 0
    return list(itertools.pairwise(bounds))


def _attend_paged(
    q,
    k_cache,
    v_cache,
    k_table,
    v_table,
    kv_lens,
    q_indptr,
    max_q_len,
    scale,
    out,
    dtype,
    kv_scales=(1.0, 1.0),
    sinks=None,
):
    """Caches `[pages, page_size, heads, dim]`, tables `[batch, pages]`; written to `out` where it is given."""
    spans = _spans(q_indptr)
    assert len(spans) == len(kv_lens) == len(k_table) == len(v_table)
    assert len(q) == spans[-1][1], "a row is of no sequence"
    assert max(end - begin for begin, end in spans) <= max_q_len
    assert k_table.dtype == v_table.dtype == torch.int32
    out = torch.empty_like(q, dtype=dtype) if out is None else out
    for i, (begin, end) in enumerate(spans):
        kv_len = int(kv_lens[i])
        num_pages = -(-kv_len // k_cache.shape[1])
        k, v = (
            cache[table[i, :num_pages].long()].flatten(0, 1)[:kv_len].float() * one
            for cache, table, one in zip((k_cache, v_cache), (k_table, v_table), kv_scales, strict=True)
        )
        out[begin:end] = attend(q[begin:end], k, v, scale, sinks=sinks)[0]
    return out


# --- FlashAttention 3 and 4 -------------------------------------------------------------------------------------------


def flash_attn_with_kvcache(
    *,
    q,
    k_cache,
    v_cache,
    page_table,
    cache_seqlens,
    cu_seqlens_q,
    cu_seqlens_k_new,
    max_seqlen_q,
    softmax_scale,
    causal,
    window_size,
    softcap,
    return_softmax_lse,
    num_splits,
    out,
    ver,
    k_descale=None,
    v_descale=None,
    sinks=None,
):
    assert causal
    assert window_size == (-1, -1)
    assert not softcap
    assert not return_softmax_lse
    assert ver in (3, 4)
    assert cache_seqlens.dtype == cu_seqlens_q.dtype == torch.int32
    tables = (page_table, page_table)
    scales, dtype = (1.0, 1.0), q.dtype
    if k_cache.dtype == torch.float8_e4m3fn:
        assert q.dtype == k_cache.dtype, "FlashAttention multiplies numbers of one type"
        dtype = torch.bfloat16
    if k_descale is not None:
        assert k_descale.shape == v_descale.shape == (len(cache_seqlens), k_cache.shape[2])
        scales = [one.unique().item() for one in (k_descale, v_descale)]
    lens = (cache_seqlens, cu_seqlens_q, max_seqlen_q)
    return _attend_paged(q, k_cache, v_cache, *tables, *lens, softmax_scale, out, dtype, scales, sinks)


# --- FlashInfer -------------------------------------------------------------------------------------------------------


def merge_state(v_a, s_a, v_b, s_b):
    top = torch.maximum(s_a, s_b)
    a, b = (s_a - top).exp(), (s_b - top).exp()
    v = (v_a.float() * a[..., None] + v_b.float() * b[..., None]) / (a + b)[..., None]
    return v.to(v_a.dtype), top + (a + b).log()


class _Wrapper:
    is_cuda_graph_enabled = False

    def __init__(self, workspace, layout, **options):
        assert layout == "NHD"

    def forward(self, *args, **options):
        return self.forward_return_lse(*args, **options)[0]

    def _attend(self, q, keys, values, causal, sm_scale, logits_soft_cap):
        """Of sequence i, `keys(begin, end)` are those between its bounds in `_kv_spans`."""
        assert not logits_soft_cap
        assert len(q) == self._q_spans[-1][1], "a row is of no sequence"
        parts = [
            attend(q[begin:end], keys(*kv), values(*kv), sm_scale, causal)
            for (begin, end), kv in zip(self._q_spans, self._kv_spans, strict=True)
        ]
        out, lse = (torch.cat(one) for one in zip(*parts, strict=True))
        return out.to(q.dtype), lse


class BatchPrefillWithPagedKVCacheWrapper(_Wrapper):
    def begin_forward(
        self,
        qo_indptr,
        paged_kv_indptr,
        paged_kv_indices,
        paged_kv_last_page_len,
        num_qo_heads,
        num_kv_heads,
        head_dim,
        page_size,
        *,
        custom_mask,
        prefix_len_ptr,
        **_options,
    ):
        assert page_size == 1
        assert custom_mask is None
        assert prefix_len_ptr is None
        assert qo_indptr.dtype == paged_kv_indptr.dtype == paged_kv_indices.dtype == torch.int32
        assert paged_kv_last_page_len.tolist() == [1] * (len(qo_indptr) - 1)
        self._q_spans, self._kv_spans = _spans(qo_indptr), _spans(paged_kv_indptr)
        self._slots = paged_kv_indices

    def forward_return_lse(
        self, q, kv_cache, *, causal, sm_scale, window_left, logits_soft_cap, k_scale=None, v_scale=None
    ):
        assert window_left == -1
        k, v = (
            lambda begin, end, cache=cache, scale=scale: cache[self._slots[begin:end].long()].float() * (scale or 1.0)
            for cache, scale in zip(kv_cache, (k_scale, v_scale), strict=True)
        )
        return self._attend(q, k, v, causal, sm_scale, logits_soft_cap)


class BatchPrefillWithRaggedKVCacheWrapper(_Wrapper):
    def begin_forward(self, qo_indptr, kv_indptr, num_qo_heads, num_kv_heads, head_dim, *, q_data_type):
        self._q_spans, self._kv_spans = _spans(qo_indptr), _spans(kv_indptr)

    def forward_return_lse(self, q, k, v, *, causal, sm_scale, logits_soft_cap, window_left=-1):
        assert window_left == -1
        assert len(k) == len(v) == self._kv_spans[-1][1]
        keys, values = (lambda begin, end, one=one: one[begin:end] for one in (k, v))
        return self._attend(q, keys, values, causal, sm_scale, logits_soft_cap)


class BatchDecodeWithPagedKVCacheWrapper(_Wrapper):
    """Made by the backend; no prefill runs it."""


def trtllm_batch_context_with_kv_cache(
    *,
    query,
    kv_cache,
    workspace_buffer,
    block_tables,
    seq_lens,
    max_q_len,
    max_kv_len,
    bmm1_scale,
    bmm2_scale,
    batch_size,
    cum_seq_lens_q,
    cum_seq_lens_kv,
    window_left,
    sinks,
    skip_softmax_threshold_scale_factor,
    out,
    out_dtype,
    kv_cache_sf,
    causal,
):
    """Caches are `[pages, heads, page_size, dim]`."""
    assert causal
    assert window_left == -1
    assert kv_cache_sf is None
    assert batch_size == len(seq_lens)
    assert cum_seq_lens_kv.diff().tolist() == seq_lens.tolist()
    assert int(seq_lens.max()) <= max_kv_len
    caches = (cache.transpose(1, 2) for cache in kv_cache)
    tables = (block_tables, block_tables)
    lens = (seq_lens, cum_seq_lens_q, max_q_len)
    return _attend_paged(query, *caches, *tables, *lens, bmm1_scale, out, out_dtype, (1.0, bmm2_scale), sinks)


def trtllm_batch_decode_with_kv_cache(
    *,
    query,
    kv_cache,
    workspace_buffer,
    block_tables,
    seq_lens,
    max_seq_len,
    bmm1_scale,
    bmm2_scale,
    window_left,
    sinks,
    skip_softmax_threshold_scale_factor,
    out,
    out_dtype,
    kv_cache_sf,
    multi_ctas_kv_counter_buffer,
):
    """One query per sequence."""
    assert window_left == -1
    assert kv_cache_sf is None
    assert int(seq_lens.max()) <= max_seq_len
    caches = (cache.transpose(1, 2) for cache in kv_cache)
    tables = (block_tables, block_tables)
    indptr = torch.arange(len(seq_lens) + 1)
    lens = (seq_lens, indptr, 1)
    return _attend_paged(query, *caches, *tables, *lens, bmm1_scale, out, out_dtype, (1.0, bmm2_scale), sinks)


def trtllm_fmha_v2_prefill(
    qkv,
    *,
    input_layout,
    workspace_buffer,
    seq_lens,
    max_q_len,
    max_kv_len,
    bmm1_scale,
    bmm2_scale,
    batch_size,
    cum_seq_lens_q,
    cum_seq_lens_kv,
    block_tables,
    out,
    out_dtype,
    mask_mode,
    window_left,
    sinks,
    skip_softmax_threshold_scale_factor,
):
    """K and V are one tensor `[pages, 2, page_size, heads, dim]`, or blocks of one allocation that begins with K."""
    assert input_layout == "Q_PAGED_KV_NHD"
    assert mask_mode == "causal"
    assert window_left == -1
    assert batch_size == len(seq_lens)
    assert cum_seq_lens_kv.diff().tolist() == seq_lens.tolist()
    assert int(seq_lens.max()) <= max_kv_len
    query, kv = qkv
    if isinstance(kv, tuple):
        k, v = kv
        k_table, v_table = block_tables.unbind(1)
        v_table = v_table - (v.data_ptr() - k.data_ptr()) // (k.stride(0) * k.element_size())
    else:
        k, v = kv.unbind(1)
        k_table = v_table = block_tables
    lens = (seq_lens, cum_seq_lens_q, max_q_len)
    return _attend_paged(query, k, v, k_table, v_table, *lens, bmm1_scale, out, out_dtype, (1.0, bmm2_scale), sinks)


def backends_on_the_cpu() -> types.SimpleNamespace:
    """Classes of SGLang's backends that import without a GPU and call these kernels; for the rest of the process."""
    no_functions = dict.fromkeys(("flash_attn_varlen_func", "flash_attn_with_kvcache", "get_scheduler_metadata"))
    for name, members in (
        ("sgl_kernel", {"merge_state_v2": None}),
        ("sgl_kernel.flash_attn", no_functions),
        ("sglang.kernels.ops.attention.flash_attention_v4", no_functions),
    ):
        sys.modules[name] = types.ModuleType(name)
        vars(sys.modules[name]).update(members)
    sglang.srt.utils.is_flashinfer_available = lambda: True
    sys.modules.pop("flashinfer", None)  # our CPU platform shuts it out
    from sglang.srt.layers.attention import flashattention_backend, flashinfer_backend, trtllm_mha_backend

    flashattention_backend.get_device_capability = lambda: (9, 0)
    flashattention_backend.flash_attn_with_kvcache = flash_attn_with_kvcache
    flashinfer_backend.BatchDecodeWithPagedKVCacheWrapper = BatchDecodeWithPagedKVCacheWrapper
    flashinfer_backend.BatchPrefillWithPagedKVCacheWrapper = BatchPrefillWithPagedKVCacheWrapper
    flashinfer_backend.BatchPrefillWithRaggedKVCacheWrapper = BatchPrefillWithRaggedKVCacheWrapper
    flashinfer_backend.merge_state = merge_state
    trtllm_mha_backend.make_persistent_multi_ctas_kv_counter_buffer = lambda *args, **options: None
    flashinfer = trtllm_mha_backend.flashinfer
    flashinfer.prefill.trtllm_batch_context_with_kv_cache = trtllm_batch_context_with_kv_cache
    flashinfer.prefill.trtllm_fmha_v2_prefill = trtllm_fmha_v2_prefill
    flashinfer.decode.trtllm_batch_decode_with_kv_cache = trtllm_batch_decode_with_kv_cache
    return types.SimpleNamespace(
        FlashAttention=flashattention_backend.FlashAttentionBackend,
        FlashInfer=flashinfer_backend.FlashInferAttnBackend,
        TRTLLM=trtllm_mha_backend.TRTLLMHAAttnBackend,
    )
