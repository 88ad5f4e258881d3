"""SGLang's own kernels of layers with states behind fused batches; run by test_states.py in a process of its own.

Backend, pools, layer and kernels are SGLang's, as on a GPU: Triton's interpreter runs them (TRITON_INTERPRET=1), in
fp16, since it multiplies no bf16. Each call is checked against the signature of the kernel's function and against what
the kernel takes for granted. Expected is what plain torch gives, one run after the other.
"""

from __future__ import annotations

import collections
import contextlib
import inspect
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from sglang.kernels.ops.attention.fla import chunk, chunk_delta_h, chunk_o, op
from sglang.kernels.ops.attention.linear.fused_gdn_gating import fused_gdn_gating
from sglang.kernels.ops.attention.triton_gdn_fused_proj import fused_qkv_split_gdn_prefill
from sglang.srt.configs.mamba_utils import Mamba2CacheParams, Mamba2StateDType, Mamba2StateShape
from sglang.srt.layers.attention.hybrid_linear_attn_backend import HybridLinearAttnBackend
from sglang.srt.layers.attention.linear import gdn_backend
from sglang.srt.layers.attention.linear.kernels import gdn_triton
from sglang.srt.layers.attention.linear.utils import LinearAttnBackends, LinearAttnKernelBackend
from sglang.srt.layers.attention.mamba.causal_conv1d import causal_conv1d_fn
from sglang.srt.layers.radix_linear_attention import RadixLinearAttention
from sglang.srt.mem_cache.memory_pool import HybridReqToTokenPool
from sglang.srt.runtime_context import get_context

from chunk_cache.index.transition_store import ChunkTransitions
from sglang_chunk_cache.forward import state_forward
from sglang_chunk_cache.forward.attending import attending
from sglang_chunk_cache.forward.state_forward import StateForward
from sglang_chunk_cache.forward.state_rounds import Gap, RequestRows, Wanted
from sglang_chunk_cache.kv.state_layers import StateLayers, find_state_layers
from sglang_chunk_cache.kv.transition import Transition
from sglang_plain_cpu import delta_rule
from unit.attention.extend_batch import extend_batch
from unit.kernels.state_kernels import make_callable

KEY_HEADS, HEADS, KEY_SIZE, VALUE_SIZE, KERNEL = 1, 2, 16, 8, 4
CHANNELS = 2 * KEY_HEADS * KEY_SIZE + HEADS * VALUE_SIZE
SEAM_LEN, DTYPE = 3, torch.float16
CLOSE = 4e-3  # a few roundings to fp16
_DRAW = torch.Generator().manual_seed(0)
INPUTS = {
    name: torch.randn(5, 200, size, generator=_DRAW).to(DTYPE)
    for name, size in (("mixed_qkv", CHANNELS), ("a", HEADS), ("b", HEADS))
}
"""Of a layer, by row of `req_to_token` and position."""


@triton.jit
def exp(x):
    return tl.exp(x)


@pytest.fixture(scope="module", autouse=True)
def on_a_gpu():
    """SGLang's way on a GPU, as far as the interpreter goes it; kernels are not tuned."""
    make_callable()
    gdn_backend.is_cuda = lambda: True
    for module in (op, chunk_delta_h, chunk_o):
        module.exp = exp  # the interpreter knows `tl.exp` by this name alone
    with get_context().override_server_args(), torch.inference_mode():
        yield


# What the kernels take for granted.


def check_rule(q, k, v, g, beta, initial_state, initial_state_indices, cu_seqlens, **flags):
    """`chunk_gated_delta_rule`: states `[V, K]`, changed in place, one of each sequence; q and k come as they are."""
    num_tokens = q.shape[1]
    assert flags == {"head_first": False, "use_qk_l2norm_in_kernel": True, "inplace_update": True}
    assert q.shape == k.shape == (1, num_tokens, KEY_HEADS, KEY_SIZE)
    assert v.shape[:3] == g.shape == beta.shape == (1, num_tokens, HEADS)
    assert q.dtype == k.dtype == v.dtype == DTYPE
    assert g.dtype == beta.dtype == torch.float32
    assert initial_state.shape[1:] == (HEADS, v.shape[3], KEY_SIZE)
    assert initial_state.is_contiguous(), "the kernel would change a copy"
    check_sequences(num_tokens, initial_state_indices, cu_seqlens)


def check_convolution(x, weight, bias, query_start_loc, cache_indices, has_initial_state, conv_states, **given):
    """`causal_conv1d_fn`: tokens stand behind each other, channels side by side; tails are changed in place."""
    assert x.shape[0] == CHANNELS == conv_states.shape[1]
    assert x.stride(0) == 1, "SGLang would take another kernel"
    assert x.dtype == conv_states.dtype == DTYPE
    assert has_initial_state.dtype == torch.bool
    assert given["seq_lens_cpu"] == query_start_loc.diff().tolist()
    check_sequences(x.shape[1], cache_indices, query_start_loc)


def check_sequences(num_tokens, slots, borders):
    assert slots.dtype == borders.dtype == torch.int32
    assert len(slots) == len(borders) - 1 == len(set(slots.tolist())), "two sequences would write one state"
    assert borders[0] == 0
    assert borders[-1] == num_tokens
    assert (borders.diff() > 0).all()


def no_check(**_):
    """A kernel that takes any strides."""


CHECKS = {
    "rule": (gdn_triton, "chunk_gated_delta_rule", chunk.chunk_gated_delta_rule, delta_rule.extend, check_rule),
    "convolution": (gdn_backend, "causal_conv1d_fn", causal_conv1d_fn, delta_rule.convolve, check_convolution),
    "gates": (gdn_backend, "fused_gdn_gating", fused_gdn_gating, delta_rule.gates, no_check),
    "split": (gdn_backend, "fused_qkv_split_gdn_prefill", fused_qkv_split_gdn_prefill, None, no_check),
}


@contextlib.contextmanager
def kernels():
    """SGLang's, each call checked; yields how often each was called."""
    num_calls: collections.Counter[str] = collections.Counter()

    def checking(name, kernel, check):
        def call(*args, **kwargs):
            num_calls[name] += 1
            bound = inspect.signature(inspect.unwrap(kernel)).bind(*args, **kwargs).arguments
            check(**{key: value for key, value in bound.items() if key != "kwargs"}, **bound.get("kwargs", {}))
            return kernel(*args, **kwargs)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name, (module, attribute, kernel, _, check) in CHECKS.items():
            patch.setattr(module, attribute, checking(name, kernel, check), raising=False)
        yield num_calls


@contextlib.contextmanager
def plain_torch():
    with pytest.MonkeyPatch.context() as patch:
        for module, attribute, kernel, plain, _ in CHECKS.values():
            patch.setattr(module, attribute, plain or kernel, raising=False)
        yield


# A layer of a model.


class Layer:
    """One layer with states, its pools as random requests left them, and SGLang's backend of it."""

    def __init__(self, num_requests: int) -> None:
        draw = torch.Generator().manual_seed(0)
        shape = Mamba2StateShape.create(
            tp_world_size=1,
            intermediate_size=HEADS * VALUE_SIZE,
            n_groups=KEY_HEADS,
            num_heads=HEADS,
            head_dim=VALUE_SIZE,
            state_size=KEY_SIZE,
            conv_kernel=KERNEL,
        )
        dtypes = Mamba2StateDType(conv=DTYPE, temporal=torch.float32)
        self.pool = HybridReqToTokenPool(
            size=num_requests,
            mamba_size=num_requests + 2,
            mamba_spec_state_size=num_requests,
            max_context_len=256,
            device="cpu",
            enable_memory_saver=False,
            cache_params=Mamba2CacheParams(shape=shape, layers=[0], dtype=dtypes),
            mamba_layer_ids=[0],
            enable_mamba_extra_buffer=False,
        )
        rows = torch.arange(num_requests + 1)
        self.pool.req_index_to_mamba_index_mapping[rows] = rows.flip(0).int()
        cache = self.pool.mamba2_layer_cache(0)
        for one in (cache.conv[0], cache.temporal):
            one.copy_(torch.randn(one.shape, generator=draw))
        self.layer = RadixLinearAttention(
            0, KEY_HEADS, KEY_HEADS, HEADS, KEY_SIZE, KEY_SIZE, VALUE_SIZE,
            conv_weights=torch.randn(CHANNELS, KERNEL, generator=draw).to(DTYPE),
            A_log=torch.randn(HEADS, generator=draw) - 2,
            dt_bias=torch.randn(HEADS, generator=draw),
        )  # fmt: skip
        triton_alone = LinearAttnKernelBackend.TRITON
        self.runner = SimpleNamespace(
            device="cpu",
            is_draft_worker=False,
            linear_attn_backends=LinearAttnBackends(triton_alone, triton_alone, triton_alone),
            model=torch.nn.ModuleList([self.layer]),
            model_config=SimpleNamespace(hf_text_config=SimpleNamespace()),
            req_to_token_pool=self.pool,
            server_args=get_context().server_args,
            token_to_kv_pool=None,
        )
        backend = HybridLinearAttnBackend(mock.MagicMock(), gdn_backend.GDNAttnBackend(self.runner), [1])
        self.runner.attn_backend = backend

    @property
    def pools(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.states.pools(0)

    @property
    def states(self) -> StateLayers:
        return find_state_layers(self.runner, SEAM_LEN)

    def forward(self, requests: list[RequestRows]) -> list[torch.Tensor]:
        """`[rows, heads, value size]` of each request of a batch, by our forward."""
        lens = [len(one.positions) for one in requests]
        inputs = {
            name: torch.cat([part[one.pool_row, one.positions] for one in requests]) for name, part in INPUTS.items()
        }
        ends = [int(one.positions[-1]) + 1 for one in requests]
        batch = extend_batch([one.pool_row for one in requests], ends, lens, torch.arange(sum(lens)))
        is_fused = any(one.gaps for one in requests)
        states = StateForward.of(self.states, requests, "cpu", is_fused=is_fused)
        backend = self.runner.attn_backend
        with attending(backend, None, states=states):
            backend.init_forward_metadata(batch)
            out = backend.forward(layer=self.layer, forward_batch=batch, **inputs)
        assert "extend" not in vars(self.states.backend.kernel_dispatcher)
        return list(out[0].split(lens))

    def forward_by_runs(self, requests: list[RequestRows]) -> list[torch.Tensor]:
        """The same, each run in a forward of its own; in front of it what lies there is put into the pools."""
        outs = []
        for one in requests:
            gaps, parts = {gap.end: gap for gap in one.gaps}, []
            for run in np.split(one.positions, np.flatnonzero(np.diff(one.positions) > 1) + 1):
                if run[0] in gaps:
                    self.cross(one.pool_row, gaps[run[0]].transition)
                wanted = [part for part in one.wanted if run[0] <= part.begin <= run[-1]]
                parts += self.forward([RequestRows(one.pool_row, run, int(run[0]), wanted=wanted)])
            outs.append(torch.cat(parts))
        return outs

    def cross(self, pool_row: int, transition: Transition) -> None:
        slot = self.pool.req_index_to_mamba_index_mapping[pool_row]
        (layer,), (tails, states) = transition.layers, self.pools
        for rule in layer.rules:
            states[slot] = states[slot] @ rule.operator + rule.offset
        tails[slot] = layer.tail(KERNEL - 1, torch.device("cpu"))

    def check(self, other: Layer) -> None:
        """The states of all requests are those of another."""
        for pool, wanted in zip(self.pools, other.pools, strict=True):
            assert_close(pool, wanted)


def rows(pool_row, *runs, begin=None, gaps=(), wanted=()):
    positions = np.concatenate([np.arange(*run) for run in runs])
    return RequestRows(pool_row, positions, runs[0][0] if begin is None else begin, gaps, wanted)


def assert_close(found, expected):
    torch.testing.assert_close(found, expected, atol=CLOSE, rtol=CLOSE)


def take(layer):
    """Three chunks that will be remembered are computed, one of them in two steps: their transitions."""
    known = [ChunkTransitions() for _ in range(2)]
    wanted = [Wanted(0, 10, 30, 13, known[0]), Wanted(1, 30, 95, 33, known[0])]
    layer.forward([
        rows(1, (5, 95), wanted=wanted), rows(2, (0, 7)), rows(3, (0, 40), wanted=[Wanted(0, 2, 40, 5, known[1])])
    ])  # fmt: skip
    layer.forward([rows(3, (40, 45), wanted=[Wanted(0, 40, 45, 5, known[1])]), rows(2, (7, 8))])
    return known[0].of(0, 30), known[0].of(1, 95), known[1].of(0, 45)


def test_what_a_chunk_does_is_taken_by_the_kernel_that_computes_it():
    """Computed up to the seam, and then moved on by the transition, states are as if all had been computed."""
    computed, moved = Layer(3), Layer(3)
    with kernels() as num_calls:
        _, _, in_two_parts = take(computed)
    assert num_calls == {"convolution": 2, "split": 2, "gates": 2, "rule": 4}
    with plain_torch():
        moved.forward([rows(1, (5, 95)), rows(2, (0, 8)), rows(3, (0, 5))])
    moved.cross(3, in_two_parts)
    computed.check(moved)


def test_runs_beside_gaps_are_computed_together(monkeypatch):
    """Beside a plain request, and one that computes a chunk that will be remembered; also in several rounds."""
    with plain_torch():
        one, other, in_two_parts = take(Layer(3))

    def requests(known):
        gaps = [Gap(21, one), Gap(86, other), Gap(174, in_two_parts)]
        wanted = [Wanted(2, 100, 130, 103, known)]
        return [
            rows(1, (0, 4), (21, 24), (86, 130), (174, 175), gaps=gaps, wanted=wanted),
            rows(2, (0, 70)),
            rows(3, (50, 59), begin=10, gaps=[Gap(50, in_two_parts)]),  # a step that begins behind a gap
            rows(4, (9, 12), (29, 31), gaps=[Gap(29, one)]),
        ]

    expected, expected_known = Layer(4), ChunkTransitions()
    with plain_torch():
        expected_outs = expected.forward_by_runs(requests(expected_known))
    for most, num_rounds in ((32, 1), (6, 2), (1, 4)):
        monkeypatch.setattr(state_forward, "MOST_RUNS", most)
        layer, known = Layer(4), ChunkTransitions()
        with kernels() as num_calls:
            outs = layer.forward(requests(known))
        assert num_calls["convolution"] == 1 + num_rounds, "of the plain request, and of rounds"
        for found, wanted in zip(outs, expected_outs, strict=True):
            assert_close(found, wanted)
        layer.check(expected)
        for parts in zip(*(one.of(2, 130).layers[0].parts for one in (known, expected_known)), strict=True):
            assert_close(*parts)
