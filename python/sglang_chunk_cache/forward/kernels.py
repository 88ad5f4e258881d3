"""Which of our kernels are used: those that agree with their definitions on the device at hand.

Verb: `choose_kernel` (at the start of a server; on a GPU it compiles everything that serving can need).
"""

from __future__ import annotations

import logging
from typing import Any

import torch

from sgl_kernel_ext.backend import FP8, resolve_backend, without
from sgl_kernel_ext.self_test import Result, check_kernels
from sgl_kernel_ext.self_test_cases import ModelShape
from sgl_kernel_ext.sparse_extend import flashinfer
from sglang_chunk_cache.flags.server_args import refuse
from sglang_chunk_cache.forward.statistics_taker import observed_heads
from sglang_chunk_cache.kv.layer_kv import is_latent
from sglang_chunk_cache.kv.model_layers import ModelLayers

logger = logging.getLogger(__name__)


def choose_kernel(asked: str, model_runner: Any, kv_pool: Any, layers: ModelLayers) -> str:
    """The backend of our operations. With "auto", torch serves each operation whose Triton kernel is wrong.

    Args:
        asked: `kernel` of `--chunk-cache-config`.

    Raises:
        StartRefused: no kernel that may be used agrees with its definition, or the one named reads no FP8.
    """
    if asked == "flashinfer" and kv_pool.dtype in FP8:
        refuse('--chunk-cache-config: kernel: "flashinfer" does not read a KV cache in FP8; use "auto" or "triton".')
    device = torch.device(model_runner.device)
    first = resolve_backend(asked, device, has_flashinfer=True)
    if device.type == "cpu":
        return first
    shape = _shape_of(model_runner, kv_pool, layers)
    candidates = [first] if asked != "auto" else _by_itself(first, shape, model_runner.prefill_attention_backend_str)
    for kernel in candidates:
        failed, operations = _failures(kernel, shape, device)
        if failed and asked == "auto" and all(result.implementation == "triton" for result in failed):
            wrong = sorted({result.kernel for result in failed})
            by_torch, _ = _failures("torch", shape, device)
            if len(wrong) < len(operations) and not any(result.kernel in wrong for result in by_torch):
                kernel, failed = without(kernel, wrong), []
        if failed:
            continue
        if asked == "auto" and kernel.startswith("flashinfer") and flashinfer.variant() == "mask":
            logger.error("Chunk cache: not used: FlashInfer's kernel, whose variant could not be built")
            continue
        break
    else:
        remedy = "" if asked == "auto" else '; use "auto" or "torch"'
        refuse(f'--chunk-cache-config: kernel: "{asked}": on this device {_told(failed[0])}{remedy}.')
    return kernel


def _by_itself(first: str, shape: ModelShape, prefill_backend: str) -> list[str]:
    """Kernels that "auto" tries, in order: FlashInfer's first, if FlashInfer is the prefill backend and it fits."""
    kernels = [*dict.fromkeys((first, "torch"))]
    if prefill_backend != "flashinfer":
        return kernels
    dims = shape.head_dim, shape.v_head_dim
    problem = flashinfer.unserved(shape.dtype, *dims, shape.kv_dtype, shape.sinks is not None)
    if problem is not None:
        logger.info("Chunk cache: not used: FlashInfer's kernel: %s", problem)
        return kernels
    return ["flashinfer", *kernels]


def _failures(kernel: str, shape: ModelShape, device: torch.device) -> tuple[list[Result], set[str]]:
    """Results that do not agree with their definition, which are logged, and the names of all operations checked."""
    # FlashInfer has one operation; Triton serves the others.
    results = check_kernels(shape, device, ("flashinfer", "triton") if kernel == "flashinfer" else (kernel,))
    seconds = sum(result.seconds for result in results)
    logger.info("Chunk cache: %s kernels, %d cases compiled and checked in %.1f s", kernel, len(results), seconds)
    failed = [result for result in results if not result.holds]
    for result in failed:
        logger.error("Chunk cache: not used: %s", _told(result))
    return failed, {result.kernel for result in results}


def _told(result: Result) -> str:
    what = f"{result.kernel} ({result.case}) by {result.implementation}"
    return f"{what} {result.failure or f'is wrong by {result.error:.1f} times what is allowed'}"


def _shape_of(model_runner: Any, kv_pool: Any, layers: ModelLayers) -> ModelShape:
    layer, rotary = layers.attentions[0], layers.rotary
    return ModelShape(
        dtype=model_runner.dtype,
        kv_dtype=kv_pool.dtype,
        num_q_heads=layer.tp_q_head_num,
        num_kv_heads=layer.tp_k_head_num,
        head_dim=layer.qk_head_dim,
        v_head_dim=layer.v_head_dim,
        rotary_dim=rotary.rotary_dim,
        is_neox=rotary.is_neox,
        logit_cap=layer.logit_cap,
        q_stride=(layer.tp_q_head_num + layer.tp_k_head_num) * layer.qk_head_dim
        + layer.tp_v_head_num * layer.v_head_dim,
        window=max(layers.windows),
        latent_dim=layer.v_head_dim if is_latent(kv_pool) else 0,
        has_unrotated=any(one is None for one in layers.rotaries),
        sinks=_sinks_of(layers),
        sampled_heads=len(observed_heads(layer.tp_q_head_num)),
    )


def _sinks_of(layers: ModelLayers) -> torch.dtype | None:
    """The dtype of attention sinks; None = no layer has any."""
    parameters = (named for module in layers.modules for named in module.named_parameters())
    return next((one.dtype for name, one in parameters if "sink" in name), None)
