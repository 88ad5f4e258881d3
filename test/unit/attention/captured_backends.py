"""SGLang's attention backends behind fused batches; run by test_backends.py in a process of its own.

Backends, pools and layer are SGLang's own. So is whatever they hand to their kernels: Triton's interpreter runs the
kernels that build it (TRITON_INTERPRET=1), and SGLang's attention in Triton. The other attention kernels cannot run
here; `reference_kernels` stands in for them. A slot holds NaN until a row is written to it, so that a kernel that reads
too early, too far or elsewhere shows it.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.environ import envs
from sglang.srt.layers.attention.hybrid_attn_backend import HybridAttnBackend
from sglang.srt.layers.attention.triton_backend import TritonAttnBackend
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.mem_cache.kv_index_translator import KVIndexTranslator
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool
from sglang.srt.model_executor.forward_batch_info import ForwardBatch
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context
from sglang.srt.runtime_context import get_context, get_exec, get_parallel, override_platform
from transformers import LlamaConfig

from sgl_kernel_ext.backend import raw
from sgl_kernel_ext.transfer import upload
from sglang_chunk_cache.forward.attending import Attention, attending
from sglang_chunk_cache.forward.rows import FusedRows
from sglang_chunk_cache.forward.runs import BackendRuns, Runs, StockServedRequests
from sglang_chunk_cache.start.pool_check import NOT_READ
from unit.attention.extend_batch import extend_batch

sys.path.insert(0, str(Path(__file__).parent))  # the folder is not a package
import reference_kernels

STOCK = reference_kernels.backends_on_the_cpu()
Q_HEADS, KV_HEADS, DIM, CONTEXT_LEN = 4, 2, 16, 128
FP8_NAMES = {torch.float8_e4m3fn: "fp8_e4m3", torch.float8_e5m2: "fp8_e5m2"}


@dataclass(frozen=True)
class Request:
    """Rows of a request, `(start, end)` per run; the last is its extend, and where it is the only one, it is plain."""

    runs: tuple[tuple[int, int], ...]

    @property
    def kv_len(self) -> int:
        return self.runs[-1][1]

    @property
    def positions(self) -> np.ndarray:
        return np.concatenate([np.arange(*run) for run in self.runs])

    @property
    def is_plain(self) -> bool:
        return len(self.runs) == 1


def requests(*runs: list[tuple[int, int]]) -> list[Request]:
    return [Request(tuple(one)) for one in runs]


BATCHES = {
    "fused and plain": requests(
        [(0, 3), (8, 20), (33, 34), (48, 70)],
        [(0, 21)],
        [(48, 52)],
        [(16, 19), (21, 40)],
        [(1, 9), (49, 50)],  # rows that stand alone at the end of a batch are decoded by some backends
        [(32, 33)],
    ),
    "no prefix": requests([(0, 9)], [(0, 30)]),  # where what was to be loaded did not arrive, all is computed
    "one request": requests([(5, 30), (32, 64)]),
}


@pytest.fixture(scope="module", autouse=True)
def published(tmp_path_factory):
    """SGLang's configuration, as if a server of a small model ran; yields its `ModelConfig`."""
    folder = tmp_path_factory.mktemp("model")
    config = LlamaConfig(
        hidden_size=Q_HEADS * DIM,
        num_attention_heads=Q_HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=DIM,
        max_position_embeddings=CONTEXT_LEN,
        architectures=["LlamaForCausalLM"],
    )
    config.save_pretrained(folder)
    with (
        envs.SGLANG_FLASHINFER_WORKSPACE_SIZE.override(1024),  # nobody works there
        get_context().override_server_args(),
        get_parallel().override(attn_dcp_rank=0),
        torch.inference_mode(),
    ):
        yield ModelConfig(str(folder))


def make_kv_pool(num_slots: int, page_size: int, dtype: torch.dtype, gap: int) -> MHATokenToKVPool:
    """Of one layer, full of NaN; `gap` elements stand between K and V."""
    pool = MHATokenToKVPool(
        size=num_slots,
        page_size=page_size,
        dtype=dtype,
        head_num=KV_HEADS,
        head_dim=DIM,
        layer_num=1,
        device="cpu",
        enable_memory_saver=False,
    )
    shape = pool.k_buffer[0].shape
    both = torch.full((2 * shape.numel() + gap,), float("nan")).to(dtype).view(pool.store_dtype)
    pool.k_buffer, pool.v_buffer = ([part.view(shape)] for part in (both[: shape.numel()], both[-shape.numel() :]))
    return pool


def make_runner(
    model_config: ModelConfig, kv_pool: MHATokenToKVPool, dtype: torch.dtype, max_reqs: int
) -> SimpleNamespace:
    """What backends ask of a `ModelRunner`."""
    req_pool = ReqToTokenPool(max_reqs, CONTEXT_LEN, "cpu", enable_memory_saver=False)
    allocator = SimpleNamespace(get_kvcache=lambda: kv_pool)
    translator = KVIndexTranslator(
        req_to_token=req_pool.req_to_token,
        token_to_kv_pool_allocator=allocator,
        token_to_kv_pool=kv_pool,
        page_size=kv_pool.page_size,
        device="cpu",
    )
    return SimpleNamespace(
        decode_attention_backend_str="none",
        decode_num_tokens_per_req=lambda: 1,
        device="cpu",
        dtype=dtype,
        gpu_id=0,
        is_draft_worker=False,
        kv_cache_dtype=kv_pool.dtype,
        kv_cache_dtype_str=FP8_NAMES.get(kv_pool.dtype, "auto"),
        kv_index_translator=translator,
        max_running_requests=max_reqs,
        model=torch.nn.Module(),
        model_config=model_config,
        page_size=kv_pool.page_size,
        prefill_attention_backend_str="none",
        req_to_token_pool=req_pool,
        server_args=get_context().server_args,
        sliding_window_size=None,
        spec_algorithm=None,
        token_to_kv_pool=kv_pool,
        token_to_kv_pool_allocator=allocator,
    )


def flashinfer_paged(runner: SimpleNamespace) -> Any:
    with envs.SGLANG_FLASHINFER_USE_PAGED.override(True):
        return STOCK.FlashInfer(runner)


def triton_deterministic(runner: SimpleNamespace) -> Any:
    with get_exec().deterministic.override(enable_deterministic_inference=True):
        return TritonAttnBackend(runner)


def trtllm_mha(platform: str) -> Callable[[SimpleNamespace], Any]:
    def make(runner: SimpleNamespace) -> Any:
        with override_platform(**{name: name == platform for name in ("is_sm90", "is_sm100", "is_sm120")}):
            return STOCK.TRTLLM(runner)

    return make


def hybrid(runner: SimpleNamespace) -> Any:
    return HybridAttnBackend(runner, STOCK.FlashAttention(runner), TritonAttnBackend(runner))


@dataclass(frozen=True)
class Case:
    """A backend, and what its way through SGLang depends on.

    Attributes:
        make: of a `ModelRunner`.
        dtype: of the model.
        gap: elements between the pool's K and V, which lie in one allocation.
    """

    make: Callable[[SimpleNamespace], Any]
    dtype: torch.dtype = torch.float32
    gap: int = 0


BACKENDS = {
    "fa3": Case(STOCK.FlashAttention),
    "fa4": Case(partial(STOCK.FlashAttention, fa_impl_ver=4)),
    "fa3, and triton decodes": Case(hybrid),
    "flashinfer": Case(STOCK.FlashInfer),
    "flashinfer, paged": Case(flashinfer_paged),
    "triton": Case(TritonAttnBackend),
    "triton, deterministic": Case(triton_deterministic),
    "trtllm_mha, sm90": Case(trtllm_mha("is_sm90")),
    "trtllm_mha, sm90, pages copied": Case(trtllm_mha("is_sm90"), gap=1),
    "trtllm_mha, sm100": Case(trtllm_mha("is_sm100")),
    "trtllm_mha, sm100, last rows decoded": Case(trtllm_mha("is_sm100"), torch.float16),
}


class Forward:
    """One layer of an extend of `batch`, on a pool that holds what is not computed."""

    def __init__(
        self,
        model_config: ModelConfig,
        backend: str,
        batch: list[Request],
        page_size: int,
        *,
        max_reqs: int | None = None,
        kv_dtype: torch.dtype | None = None,
        scales: tuple[float, float] = (1.0, 1.0),
        sinks: torch.Tensor | None = None,
    ) -> None:
        self.batch = batch
        self.parts = {} if sinks is None else {"sinks": sinks}  # as a model hands them over
        case = BACKENDS[backend]
        num_pages = sum(-(-one.kv_len // page_size) for one in batch) + 1
        max_reqs = max_reqs or sum(len(one.runs) for one in batch)
        kv_pool = make_kv_pool(num_pages * page_size, page_size, kv_dtype or case.dtype, case.gap)
        self.runner = make_runner(model_config, kv_pool, case.dtype, max_reqs)
        self.layer = RadixAttention(Q_HEADS, DIM, DIM**-0.5, KV_HEADS, layer_id=0)
        if scales != (1.0, 1.0):
            self.layer.k_scale, self.layer.v_scale = (torch.tensor(one) for one in scales)
            self.layer.k_scale_float, self.layer.v_scale_float = scales
        rng = torch.Generator().manual_seed(0)
        self.pool_rows = (1 + torch.randperm(max_reqs, generator=rng)[: len(batch)]).tolist()
        self.slots, self.k, self.v = [], [], []
        pages = 1 + torch.randperm(num_pages - 1, generator=rng)
        for one, row in zip(batch, self.pool_rows, strict=True):
            own, pages = pages.split([-(-one.kv_len // page_size), len(pages) - -(-one.kv_len // page_size)])
            slots = (own[:, None] * page_size + torch.arange(page_size)).flatten()[: one.kv_len]
            self.slots.append(slots)
            table = self.runner.req_to_token_pool.req_to_token[row]
            table.fill_(num_pages * page_size)  # never written, as the rest of a prompt that is prefilled in parts
            table[: one.kv_len] = slots
            loaded = np.setdiff1d(np.arange(one.kv_len), one.positions)
            for all_of_it, buffer, scale in zip((self.k, self.v), self.buffers, scales, strict=True):
                all_of_it.append(torch.randn(one.kv_len, KV_HEADS, DIM, generator=rng).to(case.dtype))
                raw(buffer)[slots[loaded]] = raw((all_of_it[-1][loaded] / scale).to(buffer.dtype))
        self.q = [torch.randn(len(one.positions), Q_HEADS, DIM, generator=rng).to(case.dtype) for one in batch]
        self.backend = case.make(self.runner)

    @property
    def buffers(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.runner.token_to_kv_pool.get_kv_buffer(0)

    def _forward_batch(self, chosen: list[int]) -> ForwardBatch:
        """As `host.forward_batch` has it made: rows that are due count as more tokens to extend by."""
        batch = [self.batch[i] for i in chosen]
        row_lens = [len(one.positions) for one in batch]
        forward_batch = extend_batch(
            [self.pool_rows[i] for i in chosen],
            [one.kv_len for one in batch],
            row_lens,
            torch.cat([self.slots[i][self.batch[i].positions] for i in chosen]),
            positions=torch.from_numpy(np.concatenate([one.positions for one in batch])),
            global_num_token_non_padded_cpu=sum(row_lens),
        )
        self.runner.kv_index_translator.bind_own_plan(forward_batch)
        return forward_batch

    def _rows(self, chosen: list[int]) -> list[torch.Tensor]:
        of_rows = [[whole[i][self.batch[i].positions] for i in chosen] for whole in (self.k, self.v)]
        return [torch.cat(one).flatten(1) for one in ([self.q[i] for i in chosen], *of_rows)]

    def stock(self, chosen: list[int]) -> torch.Tensor:
        """`[num_rows, q_heads, dim]` of these requests, all plain, by stock SGLang."""
        forward_batch = self._forward_batch(chosen)
        with forward_context(ForwardContext(self.backend)):
            self.backend.init_forward_metadata(forward_batch)
            return self.layer(*self._rows(chosen), forward_batch, **self.parts).view(-1, Q_HEADS, DIM)

    def fused(self, num_padded: int = 0, chosen: list[int] | None = None) -> list[torch.Tensor]:
        """`[num_rows, q_heads, dim]` per request; `num_padded` rows more are of no request.

        The backend serves the `chosen` requests (None = all), our kernel the others beside it.
        """
        everything = list(range(len(self.batch)))
        forward_batch = self._forward_batch(everything)
        positions, row_lens = forward_batch.positions, forward_batch.extend_seq_lens_cpu
        attention: Attention = self._by_runs(everything if chosen is None else chosen)
        if chosen is not None:
            are_served = [i in chosen for i in everything]
            slots = torch.cat([forward_batch.out_cache_loc.split(row_lens)[i] for i in chosen])
            attention = dataclasses.replace(self.rows, beside=StockServedRequests(are_served, attention, slots))
        rows = self._rows(everything)
        if num_padded:
            rows = [torch.cat((one, one.new_full((num_padded, one.shape[1]), float("nan")))) for one in rows]
            pad = (0, num_padded)
            forward_batch.out_cache_loc = torch.nn.functional.pad(forward_batch.out_cache_loc, pad)
            forward_batch.positions = torch.nn.functional.pad(forward_batch.positions, pad)
        given = [one.clone() for one in rows]
        with forward_context(ForwardContext(self.backend)), attending(self.backend, attention):
            self.backend.init_forward_metadata(forward_batch)
            out = self.layer(*rows, forward_batch, **self.parts).view(-1, Q_HEADS, DIM)
        assert vars(self.backend).keys().isdisjoint({"forward", "init_forward_metadata"})
        for one, before in zip(rows, given, strict=True):
            torch.testing.assert_close(one, before, rtol=0, atol=0, equal_nan=True)
        assert (out[len(positions) :] == 0).all()
        return list(out[: len(positions)].split(row_lens))

    def _by_runs(self, chosen: list[int]) -> BackendRuns:
        batch = [self.batch[i] for i in chosen]
        runs = Runs.of([one.positions for one in batch], [self.pool_rows[i] for i in chosen])
        positions = torch.from_numpy(np.concatenate([one.positions for one in batch]))
        lens, pool = [len(one.positions) for one in batch], self.runner.token_to_kv_pool
        return BackendRuns(runs, upload(runs.arrays(), "cpu"), positions, lens, pool, self.backend.forward)

    def expected(self, i: int) -> torch.Tensor:
        """`[num_rows, q_heads, dim]` of request i: each row sees every position up to its own."""
        rows = zip(self.batch[i].positions, self.q[i].split(1), strict=True)
        k, v, scale = self.k[i], self.v[i], self.layer.scaling
        return torch.cat(
            [reference_kernels.attend(q, k[: at + 1], v[: at + 1], scale, **self.parts)[0] for at, q in rows]
        )

    @property
    def rows(self) -> FusedRows:
        """All rows, by our kernel; K and V of them are written when it attends."""
        return FusedRows.build(
            req_to_token=self.runner.req_to_token_pool.req_to_token,
            req_pool_indices=self.pool_rows,
            kv_lens=[one.kv_len for one in self.batch],
            row_lens=[len(one.positions) for one in self.batch],
            row_positions=torch.from_numpy(np.concatenate([one.positions for one in self.batch])),
            kv_pool=self.runner.token_to_kv_pool,
            kernel="torch",
        )

    def by_our_kernel(self) -> list[torch.Tensor]:
        """As `fused`, whatever the backend."""
        everything = list(range(len(self.batch)))
        forward_batch = self._forward_batch(everything)
        q, k, v = self._rows(everything)
        k, v = (one.view(-1, KV_HEADS, DIM) for one in (k, v))
        out = self.rows.attend(q, k, v, self.layer, forward_batch, save_kv_cache=True)
        return list(out.view(-1, Q_HEADS, DIM).split(forward_batch.extend_seq_lens_cpu))

    def check(self, out: list[torch.Tensor], tolerance: float | None = None) -> None:
        tolerance = tolerance or (2e-3 if out[0].dtype == torch.float16 else 1e-5)
        for i, one in enumerate(out):
            torch.testing.assert_close(one.float(), self.expected(i), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_each_row_sees_every_position_up_to_its_own(published, backend, batch, page_size):
    forward = Forward(published, backend, BATCHES[batch], page_size)
    forward.check(forward.fused())


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_plain_request_is_served_exactly_as_in_stock(published, backend):
    """Whoever shares its batch."""
    batch = BATCHES["fused and plain"]
    plain = [i for i, one in enumerate(batch) if one.is_plain]
    beside_fused = Forward(published, backend, batch, 16).fused()
    by_stock = Forward(published, backend, batch, 16).stock(plain)
    assert torch.equal(torch.cat([beside_fused[i] for i in plain]), by_stock)
    forward = Forward(published, backend, batch, 16)
    beside_our_kernel = forward.fused(chosen=plain)
    assert torch.equal(torch.cat([beside_our_kernel[i] for i in plain]), by_stock)
    forward.check(beside_our_kernel)


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_of_padding_are_left_alone(published, backend):
    """SGLang pads batches for its graphs and gives the backend a place for its output."""
    forward = Forward(published, backend, BATCHES["fused and plain"], 16)
    forward.check(forward.fused(num_padded=3))
    forward.check(forward.fused(num_padded=3, chosen=[1, 2]))


@pytest.mark.parametrize("backend", BACKENDS)
def test_there_may_be_as_many_runs_as_requests_can_run(published, backend):
    """Some backends hold buffers of that size."""
    pairs, single_rows = [(start, start + 2) for start in range(0, 40, 3)], [(start, start + 1) for start in range(9)]
    batch = requests(pairs, single_rows[::2], [(0, 5)])
    forward = Forward(published, backend, batch, 1, max_reqs=sum(len(one.runs) for one in batch))
    forward.check(forward.fused())


SINKS = torch.tensor([-1.0, 0.5, 2.0, 4.0])


@pytest.mark.parametrize("backend", [name for name in BACKENDS if not name.startswith("flashinfer")])
def test_sinks_arrive_at_the_backend_and_at_our_kernel_beside_it(published, backend):
    """FlashInfer's backend has none, and SGLang starts no model that has them with it."""
    batch = BATCHES["fused and plain"]
    plain = [i for i, one in enumerate(batch) if one.is_plain]
    forward = Forward(published, backend, batch, 16, sinks=SINKS)
    forward.check(forward.fused())
    forward = Forward(published, backend, batch, 16, sinks=SINKS)
    beside_our_kernel = forward.fused(chosen=plain)
    forward.check(beside_our_kernel)
    by_stock = Forward(published, backend, batch, 16, sinks=SINKS).stock(plain)
    assert torch.equal(torch.cat([beside_our_kernel[i] for i in plain]), by_stock)


SCALES = (0.5, 0.125)
FP8_STEP = {torch.float8_e4m3fn: 2.0**-4, torch.float8_e5m2: 2.0**-3}
"""By how much of its size rounding changes a number at most."""
READS_FP8 = [
    (name, dtype)
    for name in ("fa3", "flashinfer", "flashinfer, paged", "triton", "triton, deterministic", "trtllm_mha, sm100")
    for dtype in FP8_NAMES
    if str(dtype).removeprefix("torch.") not in NOT_READ.get(name.partition(",")[0], ())
]


@pytest.mark.parametrize(("backend", "dtype"), READS_FP8)
def test_runs_carry_the_scales_of_fp8(published, backend, dtype):
    """SGLang's kernel in Triton rounds Q and P too. `fused` sees that the layer's K and V stay as they are."""
    forward = Forward(published, backend, BATCHES["fused and plain"], 16, kv_dtype=dtype, scales=SCALES)
    roundings = 3 if backend.startswith("triton") else 1
    for out, steps in ((forward.fused(), roundings), (forward.by_our_kernel(), 1)):
        for i, one in enumerate(out):
            expected = forward.expected(i)
            assert (one.float() - expected).norm() < steps * FP8_STEP[dtype] * expected.norm()


@pytest.mark.parametrize(("backend", "dtype"), READS_FP8[:-1])  # TRT-LLM's own kernel writes K and V in stock
def test_a_plain_request_is_served_exactly_as_in_stock_in_fp8(published, backend, dtype):
    batch = BATCHES["fused and plain"]
    plain = [i for i, one in enumerate(batch) if one.is_plain]
    beside_fused = Forward(published, backend, batch, 16, kv_dtype=dtype, scales=SCALES).fused()
    by_stock = Forward(published, backend, batch, 16, kv_dtype=dtype, scales=SCALES).stock(plain)
    assert torch.equal(torch.cat([beside_fused[i] for i in plain]), by_stock)


@pytest.mark.parametrize("dtype", FP8_NAMES)
def test_our_kernel_reads_fp8_as_it_is_stored(published, dtype):
    forward = Forward(published, "triton", BATCHES["fused and plain"], 16, kv_dtype=dtype, scales=SCALES)
    out = forward.by_our_kernel()
    for all_of_it, buffer, scale in zip((forward.k, forward.v), forward.buffers, SCALES, strict=True):
        all_of_it[:] = [buffer[slots].float() * scale for slots in forward.slots]
    forward.check(out)
