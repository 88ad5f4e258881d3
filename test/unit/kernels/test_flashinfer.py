"""sparse_extend in FlashInfer, as far as it goes without a GPU.

What FlashInfer is told is carried out in torch and compared with the definition; the variant's text is compiled by the
host's compiler against small stand-ins and asked for its masks; nvcc compiles it with FlashInfer's kernel (slow).
"""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import shutil
import subprocess
import sys
import types
import weakref

import pytest
import torch

from sgl_kernel_ext.sparse_extend import SparseExtend, sparse_extend
from sgl_kernel_ext.sparse_extend import flashinfer as subject
from sgl_kernel_ext.sparse_extend.flashinfer import (
    FlashInferSparseExtend,
    RowGroups,
    group_rows,
    sparse_extend_flashinfer,
    variant,
)
from sgl_kernel_ext.sparse_extend.naive import sparse_extend_reference


class WrapperInTorch:
    """What FlashInfer's paged prefill wrapper computes, by what its documentation says, one request after the other."""

    def __init__(self):
        self.num_plans = 0

    def plan(
        self,
        qo_indptr,
        kv_indptr,
        kv_indices,
        last_page_len,
        num_qo_heads,
        num_kv_heads,
        head_dim,
        page_size,
        **options,
    ):
        assert page_size == 1
        assert last_page_len.tolist() == [1] * (len(qo_indptr) - 1)
        assert all(index.dtype == torch.int32 for index in (qo_indptr, kv_indptr, kv_indices, last_page_len))
        assert kv_indptr[-1] == len(kv_indices)
        self.rows, self.keys, self.slots = qo_indptr.tolist(), kv_indptr.tolist(), kv_indices.long()
        self.options = options
        self.num_plans += 1

    def run(self, q, kv, *extra, out):
        bits = self.options.get("custom_mask")
        positions, scale, cap = extra or (None, self.options["sm_scale"], self.options["logits_soft_cap"])
        k, v = (buffer.squeeze(1).double() for buffer in kv)
        group, at_bit = q.shape[1] // k.shape[1], 0
        for i in range(len(self.rows) - 1):
            begin, end, slots = self.rows[i], self.rows[i + 1], self.slots[self.keys[i] : self.keys[i + 1]]
            if bits is None:
                visible = torch.arange(len(slots)) <= positions[begin:end, None]
            else:
                visible = bits[at_bit : at_bit + (end - begin) * len(slots)].view(end - begin, len(slots))
                at_bit += visible.numel()
            keys, values = (buffer[slots].repeat_interleave(group, 1) for buffer in (k, v))
            scores = torch.einsum("rhd,nhd->rhn", q[begin:end].double(), keys) * scale
            scores = cap * torch.tanh(scores / cap) if cap > 0 else scores
            weights = scores.masked_fill(~visible[:, None], float("-inf")).softmax(-1)
            out[begin:end] = torch.einsum("rhn,nhd->rhd", weights, values).to(out.dtype)
        return out


@pytest.fixture
def wrapper(monkeypatch):
    """CPU tensors of any size pass, and the wrapper in torch takes the place of FlashInfer's."""
    wrapper = WrapperInTorch()
    wrapper.kind = "jit"
    monkeypatch.setattr(subject, "_check_supported", lambda *tensors: None)
    monkeypatch.setattr(subject, "_planned", {})
    monkeypatch.setattr(FlashInferSparseExtend, "_wrapper_for", lambda self, dtype, head_dim: (wrapper, wrapper.kind))
    return wrapper


def call(problem, attention=None, **options):
    options = {"sm_scale": 0.25, "logit_cap": 0.0} | options
    attention = attention or SparseExtend(*problem.inputs[3:], backend="flashinfer")
    attention(*problem.inputs[:3], out=problem.out, **options)
    return problem.out, sparse_extend_reference(*problem.inputs, **options)


@pytest.mark.parametrize("kind", ["jit", "mask"])
@pytest.mark.parametrize("logit_cap", [0.0, 3.0])
@pytest.mark.parametrize("rows_per_group", [1, 3, 128])
def test_what_flashinfer_is_told_gives_the_definition(
    monkeypatch, make_problem, hard_requests, wrapper, rows_per_group, logit_cap, kind
):
    monkeypatch.setattr(group_rows, "__defaults__", (rows_per_group, subject.MAX_INDEX_ENTRIES))
    wrapper.kind = kind
    result, expected = call(make_problem([*hard_requests, (300, list(range(1, 300)))]), logit_cap=logit_cap)
    torch.testing.assert_close(result.double(), expected, atol=1e-5, rtol=1e-5)


def test_out_need_not_be_dense(make_problem, hard_requests, wrapper):
    problem = make_problem(hard_requests)
    wide = torch.full((problem.out.shape[0], 7, 16), -7.0)
    sparse_extend(*problem.inputs, sm_scale=0.25, backend="flashinfer", out=wide[:, :4])
    torch.testing.assert_close(
        wide[:, :4].double(), sparse_extend_reference(*problem.inputs, sm_scale=0.25), atol=1e-5, rtol=1e-5
    )
    assert (wide[:, 4:] == -7.0).all()


@pytest.mark.parametrize("rows_per_group", [1, 2, 7, 128])
@pytest.mark.parametrize("max_index_entries", [10**9, 500, 1])
def test_groups_cover_all_rows_and_end_at_their_last(hard_requests, rows_per_group, max_index_entries):
    requests = [*hard_requests, (300, list(range(0, 300, 2)))]
    kv_indptr, row_indptr = [0], [0]
    for kv_len, rows in requests:
        kv_indptr.append(kv_indptr[-1] + kv_len)
        row_indptr.append(row_indptr[-1] + len(rows))
    positions = torch.tensor([position for _, rows in requests for position in rows])
    groups = group_rows(kv_indptr, row_indptr, positions, rows_per_group, max_index_entries)
    assert groups.row_indptr[0] == 0
    assert groups.row_indptr[-1] == len(positions)
    assert set(row_indptr) <= set(groups.row_indptr)
    for g, (start, kv_len) in enumerate(zip(groups.kv_starts, groups.kv_lens, strict=True)):
        begin, end = groups.row_indptr[g], groups.row_indptr[g + 1]
        assert begin < end
        assert kv_len == positions[end - 1] + 1
        request = max(i for i in range(len(requests)) if row_indptr[i] <= begin)
        assert start == kv_indptr[request]
    longest = max(end - begin for begin, end in zip(groups.row_indptr, groups.row_indptr[1:], strict=False))
    if max_index_entries == 10**9:
        assert longest <= rows_per_group
    if max_index_entries == 1:  # as few keys as can be
        assert len(groups.kv_lens) == sum(bool(rows) for _, rows in requests)
    mask = groups.mask(positions)
    assert mask.numel() == groups.num_mask_bits
    assert mask.sum() == (positions + 1).sum()


@pytest.mark.parametrize("positions", [[3, 3], [2, 10], [-1, 2], [5, 4]])
def test_positions_that_do_not_ascend_are_refused(positions):
    with pytest.raises(ValueError, match=r"row_positions: those of request 0 must ascend within \[0, 10\)"):
        group_rows([0, 10], [0, 2], torch.tensor(positions))


@pytest.mark.parametrize("is_inference", [False, True])
def test_layers_share_a_plan_and_another_forward_makes_a_new_one(make_problem, hard_requests, wrapper, is_inference):
    with torch.inference_mode(is_inference):
        problem = make_problem(hard_requests)
        attention = SparseExtend(*problem.inputs[3:], backend="flashinfer")
        for layer in range(3):
            problem.q.add_(layer)
            result, expected = call(problem, attention)
            torch.testing.assert_close(result.double(), expected, atol=1e-5, rtol=1e-5)
        assert wrapper.num_plans == 1
        call(problem, attention, logit_cap=2.0)
        assert wrapper.num_plans == 2
        other = make_problem(hard_requests, seed=1)
        for one, its_attention, num_plans in ((other, None, 3), (problem, attention, 4)):
            result, expected = call(one, its_attention)
            torch.testing.assert_close(result.double(), expected, atol=1e-5, rtol=1e-5)
            assert wrapper.num_plans == num_plans


def test_after_a_failed_plan_the_one_before_is_made_again(make_problem, wrapper):
    problem, bad = make_problem([(10, [4, 9])]), make_problem([(10, [4, 9])])
    bad.row_positions[0] = 9
    call(problem)
    for _ in range(2):
        with pytest.raises(ValueError, match="row_positions"):
            call(bad)
    result, expected = call(problem)
    torch.testing.assert_close(result.double(), expected, atol=1e-5, rtol=1e-5)


def test_run_refuses_other_heads_than_planned(make_problem, wrapper):
    problem, other = make_problem([(10, [4, 9])]), make_problem([(10, [4, 9])], num_q_heads=8)
    attention = FlashInferSparseExtend(torch.device("cpu"))
    buffers = (problem.k_buffer, problem.v_buffer)
    with pytest.raises(ValueError, match="q: no plan"):
        attention.run(problem.q, *buffers, problem.out)
    indices = problem.inputs[3:]
    heads = {"num_q_heads": 4, "num_kv_heads": 2, "head_dim": 16, "dtype": torch.float32}
    attention.plan(*indices, **heads, sm_scale=0.25)
    attention.run(problem.q, *buffers, problem.out)
    with pytest.raises(ValueError, match=r"q: no plan for .* \(8, 2, 16, torch.float32\)"):
        attention.run(other.q, *buffers, other.out)
    with pytest.raises(ValueError, match="kv_indptr, row_indptr: end at 11 and 2"):
        attention.plan([0, 11], *indices[1:], **heads, sm_scale=0.25)


def test_a_mask_too_large_for_flashinfer_is_refused(make_problem, wrapper, monkeypatch):
    wrapper.kind = "mask"
    monkeypatch.setattr(RowGroups, "num_mask_bits", 2**31)
    with pytest.raises(ValueError, match='row_positions: a mask of 2147483648 bits; use backend "triton"'):
        call(make_problem([(10, [4, 9])]))


@pytest.mark.parametrize(
    ("message", "change"),
    [
        ("q: torch.float32", {"dtype": torch.float32}),
        ("q: head_dim 80", {"head_dim": 80}),
        ("v_buffer: .* need shape and strides", {"v_head_dim": 128}),
        ("k_buffer: torch.float32", {"kv_dtype": torch.float32}),
        ("q: 2 rows", {"row_stride": 2**30}),
        ("q: strides", {"row_stride": 257}),
        ("q: on cpu", {"device": "cpu"}),
    ],
)
def test_what_flashinfer_cannot_do_is_named(message, change):
    """On tensors without memory, as there need not be a GPU."""
    given = {"dtype": torch.bfloat16, "head_dim": 64, "device": "cuda"} | change

    class Fake:
        def __init__(self, *shape, dtype, stride):
            self.shape, self.dtype, self.device = torch.Size(shape), dtype, torch.device(given["device"])
            self._stride = stride

        def stride(self, dim=None):
            return self._stride if dim is None else self._stride[dim]

        def data_ptr(self):
            return 0

    dim, v_dim = given["head_dim"], given.get("v_head_dim", given["head_dim"])
    kv_dtype = given.get("kv_dtype", given["dtype"])
    q = Fake(2, 4, dim, dtype=given["dtype"], stride=(given.get("row_stride", 4 * dim), dim, 1))
    k = Fake(9, 2, dim, dtype=kv_dtype, stride=(2 * dim, dim, 1))
    v = Fake(9, 2, v_dim, dtype=kv_dtype, stride=(2 * v_dim, v_dim, 1))
    with pytest.raises(ValueError, match=f'{message}.*; use backend "triton"'):
        sparse_extend_flashinfer(
            q, k, v, ([0, 9], torch.arange(9), [0, 2], torch.tensor([1, 2])), None, sm_scale=1.0, logit_cap=0.0
        )


@pytest.fixture
def fake_flashinfer(monkeypatch):
    """A FlashInfer whose compiler can be taken away; its wrappers note what they were made with."""
    fake, prefill = types.ModuleType("flashinfer"), types.ModuleType("flashinfer.prefill")
    fake.has_compiler, fake.made = True, []

    def build(*args, **options):
        if not fake.has_compiler:
            raise RuntimeError("Could not find nvcc")

    def make(workspace, layout, **options):
        fake.made.append((workspace, layout, options))
        return object()

    fake.BatchPrefillWithPagedKVCacheWrapper, prefill.get_customize_batch_prefill_module = make, build
    monkeypatch.setitem(sys.modules, "flashinfer", fake)
    monkeypatch.setitem(sys.modules, "flashinfer.prefill", prefill)
    monkeypatch.setattr(subject, "_build_failure", None)
    monkeypatch.setattr(subject, "_workspaces", {})
    return fake


def test_the_variant_owns_the_mask_and_the_workspace_is_shared(fake_flashinfer):
    first, second = (FlashInferSparseExtend(torch.device("cpu")) for _ in range(2))
    wrapper, kind = first._wrapper_for(torch.bfloat16, 128)
    assert kind == variant() == "jit"
    assert first._wrapper_for(torch.bfloat16, 128)[0] is wrapper
    assert second._wrapper_for(torch.float16, 64)[0] is not wrapper
    (workspace, layout, options), (other, _, _) = fake_flashinfer.made
    assert other is workspace
    assert layout == "NHD"
    assert options["variant_owns_mask"]
    assert options["backend"] == "fa2"
    assert options["jit_args"][7:11] == [["row_positions"], ["int32_t"], ["sm_scale", "logit_cap"], ["double"] * 2]


def test_without_a_compiler_it_says_so_once_and_masks_by_bits(fake_flashinfer, caplog):
    fake_flashinfer.has_compiler = False
    attention = FlashInferSparseExtend(torch.device("cpu"))
    with caplog.at_level(logging.WARNING, logger=subject.__name__):
        for dtype in (torch.bfloat16, torch.float16):
            assert attention._wrapper_for(dtype, 128)[1] == "mask"
    assert variant() == "mask"
    assert [record.message.split(": ")[-1] for record in caplog.records] == ["Could not find nvcc"]
    assert [options for _, _, options in fake_flashinfer.made] == [{"backend": "fa2"}] * 2


STAND_INS = """
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#define __device__
#define __host__
#define REGISTER_LOGITS_TRANSFORM(params, logits, batch, row, key, q_head, kv_head, ...) \\
  template <typename P, typename T>                                                      \\
  T LogitsTransform(const P& params, T logits, uint32_t batch, uint32_t row, uint32_t key) { __VA_ARGS__ }
#define REGISTER_LOGITS_MASK(params, batch, row, key, q_head, kv_head, ...) \\
  template <typename P>                                                     \\
  bool LogitsMask(const P& params, uint32_t batch, uint32_t row, uint32_t key) { __VA_ARGS__ }
using std::min;
namespace math {
constexpr float log2e = 1.44269504088896340736f;
float ptx_exp2(float x) { return std::exp2(x); }
float ptx_rcp(float x) { return 1.f / x; }
}
struct AttentionVariantBase {};
int32_t row_positions[] = {POSITIONS};
uint32_t q_indptr[] = {ROW_INDPTR}, kv_lens[] = {KV_LENS};
struct Params {
  double sm_scale, logit_cap;
  int32_t* row_positions = ::row_positions;
  uint32_t* q_indptr = ::q_indptr;
  uint32_t get_qo_len(uint32_t g) const { return q_indptr[g + 1] - q_indptr[g]; }
  uint32_t get_kv_len(uint32_t g) const { return kv_lens[g]; }
};
"""
MAIN = """
int main() {
  for (double cap : {0.0, 30.0}) {
    Params params{0.125, cap};
    for (float score : {-1e5f, -300.f, -1.f, 0.f, 1e-3f, 8.f, 1e5f}) {
      RowPositionAttention attention(params, 0, nullptr);
      std::printf("%.9g ", attention.LogitsTransform(params, score, 0, 0, 0) * attention.sm_scale_log2);
    }
  }
  std::printf("\\n");
  Params params{1.0, 0.0};
  for (uint32_t g = 0; g < NUM_GROUPS; ++g) {
    RowPositionAttention attention(params, g, nullptr);
    if (attention.window_left < attention.kv_len) return 1;
    for (uint32_t row = 0; row < attention.qo_len + 100; ++row)
      for (uint32_t key = 0; key < attention.kv_len; ++key) {
        bool seen = attention.LogitsMask(params, g, row, key);
        if (row < attention.qo_len) std::putchar(seen ? '1' : '0');
      }
  }
}
"""


@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")
def test_the_variant_itself_masks_and_caps(tmp_path):
    positions = torch.tensor([0, 3, 4, 9, 1, 2, 70, 5])
    groups = group_rows([0, 10, 90, 96], [0, 4, 7, 8], positions, 2)
    text = STAND_INS + subject._VARIANT + MAIN
    for name, values in (
        ("POSITIONS", positions.tolist()),
        ("ROW_INDPTR", groups.row_indptr),
        ("KV_LENS", groups.kv_lens),
        ("NUM_GROUPS", [len(groups.kv_lens)]),
    ):
        text = text.replace(name, ", ".join(map(str, values)))
    source, program = tmp_path / "variant.cpp", tmp_path / "variant"
    source.write_text(text)
    # The sanitizer ends the program if a row past the end of a tile reads past the positions.
    build = ["g++", "-std=c++17", "-fsanitize=address", "-static-libasan", str(source), "-o", str(program)]
    subprocess.run(build, check=True, capture_output=True, text=True)
    run = subprocess.run([str(program)], check=False, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    exponents, bits = run.stdout.splitlines()
    scores = torch.tensor([-1e5, -300.0, -1.0, 0.0, 1e-3, 8.0, 1e5], dtype=torch.float64) * 0.125
    expected = (
        torch.cat([scores, 30 * torch.tanh(scores / 30)]) * torch.tensor(2.0, dtype=torch.float64).log().reciprocal()
    )
    result = torch.tensor([float(value) for value in exponents.split()], dtype=torch.float64)
    torch.testing.assert_close(result, expected, atol=1e-5, rtol=1e-5)
    assert bits == "".join("01"[seen] for seen in groups.mask(positions).tolist())


GENERATE = """
import inspect, json, torch
from flashinfer import BatchPrefillWithPagedKVCacheWrapper
from flashinfer.jit.attention.modules import gen_customize_batch_prefill_module
from sgl_kernel_ext.sparse_extend.flashinfer import jit_arguments

def names(method):
    return list(inspect.signature(getattr(BatchPrefillWithPagedKVCacheWrapper, method)).parameters)

assert names("__init__")[1:3] == ["float_workspace_buffer", "kv_layout"]
assert {"backend", "jit_args", "jit_kwargs", "variant_owns_mask"} <= set(names("__init__"))
tables = ["qo_indptr", "paged_kv_indptr", "paged_kv_indices", "paged_kv_last_page_len"]
assert names("plan")[1:9] == [*tables, "num_qo_heads", "num_kv_heads", "head_dim_qk", "page_size"]
assert {"q_data_type", "kv_data_type", "custom_mask", "sm_scale", "logits_soft_cap"} <= set(names("plan"))
assert names("run")[1:4] == ["q", "paged_kv_cache", "args"]
assert "out" in names("run")
args, options = jit_arguments(torch.bfloat16, 128)
spec = gen_customize_batch_prefill_module("fa2", *args, **options)
spec.build_dir.mkdir(parents=True, exist_ok=True)
print("commands:" + json.dumps(spec.get_compile_commands()))
"""


@pytest.mark.slow
@pytest.mark.all
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc")
@pytest.mark.skipif(importlib.util.find_spec("flashinfer") is None, reason="FlashInfer is not installed")
def test_nvcc_compiles_the_variant_with_flashinfers_kernel(tmp_path):
    """bf16, head_dim 128, sm_90a, the custom mask mode alone, and the host code that fills in our parameters."""
    env = os.environ | {"FLASHINFER_WORKSPACE_BASE": str(tmp_path), "FLASHINFER_CUDA_ARCH_LIST": "9.0a"}
    run = subprocess.run([sys.executable, "-c", GENERATE], env=env, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    commands = json.loads(run.stdout.partition("commands:")[2])
    wanted = ("batch_prefill_paged_kernel_mask_2.cu", "batch_prefill.cu")  # 2 is MaskMode::kCustom
    chosen = [command for command in commands if command["file"].endswith(wanted)]
    assert len(chosen) == len(wanted)
    started = [
        subprocess.Popen(
            command["command"], shell=True, cwd=command["directory"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        for command in chosen
    ]
    for process in started:
        output, _ = process.communicate()
        assert process.returncode == 0, output.decode()


def test_a_forward_that_has_ended_keeps_no_index_tensors(monkeypatch):
    monkeypatch.setattr(subject, "_planned", {})
    monkeypatch.setattr(subject, "_attentions", {})
    slots, positions = torch.arange(10), torch.tensor([3, 9])
    attention = SparseExtend([0, 10], slots, [0, 2], positions, backend="flashinfer")
    device = torch.device("cpu")
    subject._planned[device] = attention._index, {}
    subject._attentions[device] = FlashInferSparseExtend(device)
    subject._attentions[device]._extra_args = (positions,)
    kept = weakref.ref(slots), weakref.ref(positions)
    attention.forget()
    del attention, slots, positions
    assert [one() for one in kept] == [None, None]
