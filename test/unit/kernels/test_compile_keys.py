"""Nothing compiles while serving: what the self-test runs at the start meets every compile key of later traffic."""

from __future__ import annotations

import importlib.util
import random
from collections import Counter

import pytest
import torch

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")

from sgl_kernel_ext.add_drift import Drift, add_drift  # noqa: E402
from sgl_kernel_ext.attention_mass import attention_mass  # noqa: E402
from sgl_kernel_ext.copy_rotate import copy_rotate  # noqa: E402
from sgl_kernel_ext.kv_deviation import kv_deviation  # noqa: E402
from sgl_kernel_ext.question_mass import Questions, question_mass  # noqa: E402
from sgl_kernel_ext.rotary import RotarySpec, Turn, default_inv_freq  # noqa: E402
from sgl_kernel_ext.self_test_cases import ModelShape, cases, common_shapes, shape_of  # noqa: E402
from sgl_kernel_ext.sparse_extend import sparse_extend  # noqa: E402

LATENT = shape_of(16, 1, 576, torch.bfloat16, v_head_dim=512, rotary_dim=64, is_neox=False, latent_dim=512)
SHAPES = [*common_shapes(), LATENT, shape_of(32, 8, 128, torch.bfloat16, has_unrotated=True)]


def odd_view(values: torch.Tensor) -> torch.Tensor:
    """The same values at an address that is aligned to one element only, as a part of a packed upload is."""
    return torch.cat([values.new_zeros(1), values])[1:]


def serve(shape: ModelShape, rng: random.Random) -> None:
    """Calls of one forward: sizes are small, but odd and even, 1, and multiples of 16."""
    num_requests = rng.choice([1, 2, 3, 16, 33, 64])
    kv_lens = [rng.choice([1, 16, 17, 2000]) for _ in range(num_requests)]
    row_lens = [rng.randint(1, min(kv_len, 20)) for kv_len in kv_lens]
    kv_indptr, row_indptr = (
        odd_view(torch.tensor([0, *lens]).cumsum(0)) if rng.random() < 0.5 else torch.tensor([0, *lens]).cumsum(0)
        for lens in (kv_lens, row_lens)
    )
    num_rows, width = sum(row_lens), shape.num_q_heads * shape.head_dim
    stride = rng.choice([width, max(width, shape.q_stride)])
    q = torch.zeros(num_rows, stride, dtype=shape.dtype)[:, :width].view(num_rows, shape.num_q_heads, -1)
    k, v = (
        torch.zeros(64, shape.num_kv_heads, dim, dtype=shape.kv_dtype) for dim in (shape.head_dim, shape.v_head_dim)
    )
    index = torch.zeros(sum(kv_lens), dtype=torch.int64), torch.zeros(num_rows, dtype=torch.int64)
    kv_indices, positions = (odd_view(one) if rng.random() < 0.5 else one for one in index)
    options = {"sm_scale": 0.1, "logit_cap": shape.logit_cap, "backend": "triton"}
    sinks = None if shape.sinks is None else odd_view(torch.zeros(shape.num_q_heads, dtype=shape.sinks))
    window = rng.choice([-1, shape.window])
    sparse_extend(q, k, v, kv_indptr, kv_indices, row_indptr, positions, **options, window=window, sinks=sinks)

    num_tokens = rng.choice([1, 3, 16, 40])
    locs = [odd_view(torch.arange(num_tokens)), torch.arange(num_tokens), torch.arange(num_tokens)]
    spec = RotarySpec(shape.rotary_dim, shape.is_neox, default_inv_freq(1e4, shape.rotary_dim))
    num_layers = rng.choice([1, 2, 5])
    copy_rotate([k] * num_layers, [v] * num_layers, *locs, spec, backend="triton")

    new = [torch.zeros(num_tokens, *buffer.shape[1:], dtype=shape.dtype) for buffer in (k, v)]
    kv_deviation(*new, k, v, slots=locs[0], only_v=rng.random() < 0.5, backend="triton")

    num_chunks = rng.choice([1, 2, 16])
    turn, bounds = Turn(locs[1]), odd_view(torch.arange(num_chunks + 1).clamp(max=num_tokens))
    peers = torch.tensor([[0], [num_chunks]]).expand(2, num_chunks)
    drift = Drift(locs[0], locs[1], bounds, peers, turn, locs[0], locs[1].clamp(max=num_chunks - 1), turn, 0.5, 8.0)
    rotated = slice(shape.latent_dim, None)
    of_layer = None if shape.has_unrotated and rng.random() < 0.5 else spec
    add_drift(new[0][..., rotated], new[1], k[..., rotated], v, drift, of_layer, backend="triton")

    kv_len = rng.choice([16, 33, 50])
    keys = torch.zeros(kv_len, shape.num_kv_heads, shape.head_dim, dtype=shape.kv_dtype)
    attention_mass(q[:kv_len], keys, positions[:kv_len], **options)
    num_asking = rng.choice([1, 2, 16])
    starts = [rng.choice([0, 1, 15, 16, 2000]) for _ in range(num_asking)]
    row_lens = [rng.choice([1, 3, 16]) for _ in range(num_asking)]
    kv_lens = [start + n for start, n in zip(starts, row_lens, strict=True)]
    slots = odd_view(torch.zeros(sum(kv_lens), dtype=torch.int64))
    rows = torch.zeros(num_layers, sum(row_lens), shape.num_q_heads, shape.head_dim, dtype=shape.dtype)
    question_mass(
        *(rows, [k] * num_layers, Questions(row_lens, row_lens, starts, kv_lens, slots)),
        **options,
        k_scales=[rng.choice([1.0, 0.5])] * num_layers,
        squared=rng.random() < 0.5,
        sinks=None if sinks is None else [sinks] * num_layers,
        added_to=rng.choice([None, odd_view(torch.zeros(sum(kv_lens)))]),
    )
    heads = shape.sampled_heads
    keys = torch.zeros(kv_len, heads, shape.head_dim, dtype=shape.kv_dtype)
    starts = list(range(0, kv_len, rng.choice([1, 7, 16])))
    rows = torch.zeros(min(num_rows, kv_len), heads, shape.head_dim, dtype=shape.dtype)
    attention_mass(rows, keys, positions[:kv_len], **options, segment_starts=starts, skip_self=True)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_traffic_meets_no_key_that_the_self_test_did_not(shape):
    from test.unit.kernels.absent_gpu import launches_for

    rng = random.Random(0)
    with torch.inference_mode(), launches_for(90, compiles=False) as launches:
        for case in cases(shape, torch.device("cpu")):
            case.run("triton")
        at_start = {(launch.kernel, launch.key) for launch in launches}
        launches.clear()
        for _ in range(30):
            serve(shape, rng)
    assert {(launch.kernel, launch.key) for launch in launches} <= at_start
    assert Counter(kernel for kernel, _ in at_start) == {
        # With and without a split, and with and without a window where a layer has one.
        "_sparse_extend_kernel": 4 if shape.window >= 0 else 2,
        "_combine_splits_kernel": 1,
        "_copy_rotate_kernel": 1,
        # Of all heads, and of those that statistics look at.
        "_lse_kernel": 2 if shape.num_q_heads != shape.num_kv_heads else 1,
        "_join_kernel": 1,
        "_received_kernel": 2,
        "_question_lse_kernel": 1,
        "_question_received_kernel": 2,  # squared, too
        "_sum_layers_kernel": 1,
        "_kv_deviation_kernel": 2,  # of K and V, and of V alone
        "_totals_kernel": 1,
        "_drift_sums_kernel": 2 if shape.has_unrotated else 1,
        "_add_drift_kernel": 2 if shape.has_unrotated else 1,
    }
