"""Which kernels serve once they were compared with their definitions."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch
from sglang.srt.layers.radix_attention import RadixAttention

from sgl_kernel_ext.backend import resolve_backend, without
from sgl_kernel_ext.rotary import RotarySpec
from sgl_kernel_ext.self_test import Result, check_kernels
from sgl_kernel_ext.self_test_cases import shape_of
from sglang_chunk_cache.flags.server_args import StartRefused
from sglang_chunk_cache.forward import kernels
from sglang_chunk_cache.kv.model_layers import ModelLayers


@pytest.fixture
def choose(monkeypatch):
    """`choose_kernel` on a GPU on which the named implementations are wrong, without the GPU."""

    def made(
        asked: str,
        wrong: set[str],
        backend: str = "fa3",
        kv_dtype=torch.bfloat16,
        variant: str = "jit",
        has_sinks: bool = False,
    ) -> str:
        def check(shape, device, implementations):
            assert (shape.num_q_heads, shape.num_kv_heads, shape.head_dim) == (4, 2, 64)
            return [
                Result(kernel=operation, case="a case", implementation=one, seconds=0.0, failure="",
                       error=7.0 if one in wrong or f"{operation} by {one}" in wrong else 0.5)
                for operation in ("sparse_extend", "add_drift", "kv_deviation")
                for one in implementations
                if one != "flashinfer" or operation == "sparse_extend"
            ]  # fmt: skip

        monkeypatch.setattr(kernels, "check_kernels", check)
        monkeypatch.delitem(sys.modules, "flashinfer", raising=False)  # our CPU platform shuts it out
        monkeypatch.setattr(kernels.flashinfer, "variant", lambda: variant)
        runner = SimpleNamespace(device="cuda", dtype=torch.bfloat16, prefill_attention_backend_str=backend)
        pool = SimpleNamespace(dtype=kv_dtype)
        attention, rotary = RadixAttention(4, 64, 1.0, 2, 0), RotarySpec(64, True, torch.ones(32))
        layer = torch.nn.Module()
        if has_sinks:
            layer.sinks = torch.nn.Parameter(torch.zeros(4, dtype=torch.bfloat16))
        layers = ModelLayers(torch.nn.Module(), (layer,), (attention,), (rotary,))
        return kernels.choose_kernel(asked, runner, pool, layers)

    return made


@pytest.mark.parametrize(
    ("asked", "wrong", "chosen"),
    [("auto", set(), "triton"), ("auto", {"triton"}, "torch"), ("torch", {"triton"}, "torch"),
     ("flashinfer", set(), "flashinfer"),
     ("auto", {"add_drift by triton"}, "triton without add_drift"),
     ("auto", {"add_drift by triton", "sparse_extend by triton"}, "triton without add_drift, sparse_extend")],
)  # fmt: skip
def test_the_first_that_agrees_with_its_definition_serves(choose, asked, wrong, chosen):
    assert choose(asked, wrong) == chosen


@pytest.mark.parametrize(
    ("how", "chosen", "told"),
    [
        ({}, "flashinfer", ""),
        ({"backend": "fa3"}, "triton", ""),
        ({"wrong": {"flashinfer"}}, "triton", "not used: sparse_extend (a case) by flashinfer is wrong by 7.0 times"),
        ({"wrong": {"flashinfer", "triton"}}, "torch", "by triton is wrong by 7.0"),
        ({"variant": "mask"}, "triton", "not used: FlashInfer's kernel, whose variant could not be built"),
        ({"kv_dtype": torch.float8_e4m3fn}, "triton", "not used: FlashInfer's kernel: it reads K and V of the model's"),
        ({"has_sinks": True}, "triton", "not used: FlashInfer's kernel: it knows no attention sinks"),
    ],
)
def test_beside_flashinfers_backend_its_kernel_serves_where_it_fits(choose, caplog, how, chosen, told):
    with caplog.at_level("INFO"):
        assert choose("auto", **{"wrong": set(), "backend": "flashinfer"} | how) == chosen
    assert told in caplog.text


@pytest.mark.parametrize(
    ("asked", "wrong"), [("triton", {"triton"}), ("flashinfer", {"flashinfer"}), ("auto", {"triton", "torch"})]
)
def test_a_kernel_that_was_asked_for_and_is_wrong_stops_the_start(choose, asked, wrong):
    with pytest.raises(StartRefused, match=rf'kernel: "{asked}".*sparse_extend \(a case\).* wrong by 7.0 times'):
        choose(asked, wrong)


@pytest.mark.parametrize("sinks", [None, torch.bfloat16])
def test_what_torch_computes_holds_in_every_case(sinks):
    """What is left where a kernel is wrong."""
    shape = shape_of(8, 2, 64, torch.bfloat16, has_unrotated=True, window=100, sinks=sinks)
    results = check_kernels(shape, "cpu", ["torch"])
    assert {result.kernel for result in results} > {"sparse_extend", "attention_mass", "add_drift"}
    assert [str(result) for result in results if not result.holds] == []


def test_only_the_operation_that_is_wrong_is_torchs():
    device, others = torch.device("cuda"), ("sparse_extend", "kv_deviation")
    for backend in ("triton", "flashinfer"):
        chosen = without(backend, ["add_drift", "attention_mass"])
        assert {resolve_backend(chosen, device, one) for one in ("add_drift", "attention_mass")} == {"torch"}
        assert {resolve_backend(chosen, device, one) for one in others} == {"triton"}
        assert resolve_backend(chosen, device, "sparse_extend", has_flashinfer=True) == backend


def test_an_operation_that_nobody_does_right_stops_the_start(choose):
    with pytest.raises(StartRefused, match="add_drift"):
        choose("auto", {"add_drift by triton", "add_drift by torch"})


def test_flashinfer_reads_no_fp8(choose):
    assert choose("auto", set(), kv_dtype=torch.float8_e4m3fn) == "triton"
    with pytest.raises(StartRefused, match=r'"flashinfer" does not read a KV cache in FP8; use "auto" or "triton"'):
        choose("flashinfer", set(), kv_dtype=torch.float8_e4m3fn)
