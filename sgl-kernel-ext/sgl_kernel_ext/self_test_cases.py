"""Self-test cases: calls of every kernel that meet every compile key which the requests of a model can meet.

    cases           of one model
    common_shapes   models that the command checks

Inputs are small; slots that nobody may read hold NaN.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from sgl_kernel_ext.add_drift import Drift, add_drift
from sgl_kernel_ext.add_drift.naive import add_drift_reference
from sgl_kernel_ext.attention_mass import attention_mass
from sgl_kernel_ext.attention_mass.naive import attention_mass_reference
from sgl_kernel_ext.backend import FP8, raw
from sgl_kernel_ext.copy_rotate import copy_rotate
from sgl_kernel_ext.copy_rotate.naive import copy_rotate_reference
from sgl_kernel_ext.kv_deviation import kv_deviation
from sgl_kernel_ext.kv_deviation.naive import kv_deviation_reference
from sgl_kernel_ext.question_mass import Questions, question_mass
from sgl_kernel_ext.question_mass.naive import question_mass_reference
from sgl_kernel_ext.rotary import RotarySpec, Turn, default_inv_freq
from sgl_kernel_ext.sparse_extend import sparse_extend
from sgl_kernel_ext.sparse_extend.naive import sparse_extend_reference


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """What kernels see of a model on one rank.

    Attributes:
        dtype: of queries, and of new K and V.
        kv_dtype: of the pool.
        q_stride: elements between the queries of two tokens; 0 = they are dense. SGLang's lie among K and V.
        rotary_dim: leading dimensions of K that are rotated.
        sampled_heads: query heads that statistics look at.
        window: of layers that have one; -1 = none has.
        latent_dim: leading dimensions of K that are V (MLA); only the other dimensions of K are rotated.
        has_unrotated: whether keys of some layers carry no position.
        sinks: dtype of the attention sinks, one per head (gpt-oss); None = the model has none.
    """

    dtype: torch.dtype
    kv_dtype: torch.dtype
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    rotary_dim: int
    is_neox: bool = True
    logit_cap: float = 0.0
    q_stride: int = 0
    sampled_heads: int = 2
    window: int = -1
    latent_dim: int = 0
    has_unrotated: bool = False
    sinks: torch.dtype | None = None

    def __str__(self) -> str:
        names = " ".join(dict.fromkeys(str(dtype).removeprefix("torch.") for dtype in (self.dtype, self.kv_dtype)))
        dims = "/".join(str(dim) for dim in dict.fromkeys((self.head_dim, self.v_head_dim)))
        cap = f", cap {self.logit_cap:g}" if self.logit_cap else ""
        cap += f", window {self.window}" if self.window >= 0 else ""
        cap += ", sinks" if self.sinks else ""
        return f"{self.num_q_heads}/{self.num_kv_heads} heads x {dims}, {names}{cap}"


@dataclass(frozen=True)
class Case:
    """One call.

    Attributes:
        run: from the name of an implementation to its results.
        error: from those results to their error, as in `Result`.
    """

    kernel: str
    case: str
    run: Callable[[str], Sequence[torch.Tensor]]
    error: Callable[[Sequence[torch.Tensor]], float]


# Results of attention are means of V, whose entries are of size 1. This allows the rounding of weights and of results:
# in bf16 2**-9 each, twice that for the largest of thousands of entries, and as much for the sums.
_ATTENTION_ERROR = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}
# Masses are sums of weights in fp32; their scores are products of the same operands as in the definition.
_MASS_ERROR = 1e-4
# (relative, absolute): one step of the dtype; fp32's rounding of a difference of two entries, or fp8's smallest number.
_ROTATION_ERROR = {
    torch.float32: (1e-6, 1e-6),
    torch.float16: (2.0**-10, 1e-6),
    torch.bfloat16: (2.0**-7, 1e-6),
    torch.float8_e4m3fn: (2.0**-3, 2.0**-9),
    torch.float8_e5m2: (2.0**-2, 2.0**-16),
}
_DEVIATION_ERROR = 1e-4
_K_SCALE, _V_SCALE = 0.75, 1.5


def cases(shape: ModelShape, device: torch.device) -> Iterator[Case]:
    """Calls that meet every compile key of the Triton kernels."""
    yield from _sparse_extend_cases(shape, device)
    yield from _copy_rotate_cases(shape, device)
    yield from _attention_mass_cases(shape, device)
    yield from _question_mass_cases(shape, device)
    yield from _kv_deviation_cases(shape, device)
    yield from _add_drift_cases(shape, device)


def _normal(rng: torch.Generator, size: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.randn(*size, generator=rng).to(device).to(dtype)


def _queries(rng: torch.Generator, num_rows: int, shape: ModelShape, device: torch.device) -> torch.Tensor:
    width = shape.num_q_heads * shape.head_dim
    wide = torch.full((num_rows, max(shape.q_stride, width)), float("nan"), dtype=shape.dtype, device=device)
    q = wide[:, :width]
    q.copy_(torch.randn(num_rows, width, generator=rng))
    return q.view(num_rows, shape.num_q_heads, shape.head_dim)


def _fill(buffer: torch.Tensor, slots: torch.Tensor, values: torch.Tensor) -> None:
    raw(buffer)[slots] = raw(values)


def _share(found: torch.Tensor, expected: torch.Tensor, relative: float, absolute: float) -> float:
    """The largest difference, divided by what is allowed; infinite if `found` is not finite."""
    found, expected = found.double(), expected.double()
    share = (found - expected).abs() / (absolute + relative * expected.abs())
    return float(torch.where(found.isfinite(), share, float("inf")).max())


def _scales(shape: ModelShape) -> tuple[float, float]:
    return (_K_SCALE, _V_SCALE) if shape.kv_dtype in FP8 else (1.0, 1.0)


# (kv_len, rows) of each request. Those of _SHORT have too few keys to be split: one key, no row, a whole prompt, runs
# and single rows, over 64 rows, and more requests than are searched at one time. A long request is split on a GPU.
_SHORT = [(1, [0]), (67, [0, 1, 5, 31, 32, 33, 64, 66]), (17, []), (150, list(range(150)))]
_SHORT += [(300, sorted({*range(3, 300, 7), *range(200, 240)}))] + [(5, [i % 5]) for i in range(40)]
_WINDOW = 70  # shorter than the longest of these, and not a whole number of blocks
_LONG = [(4500, [0, 63, 64, 1000, *range(4400, 4460), 4498]), (9, [8])]


def _sparse_extend_cases(shape: ModelShape, device: torch.device) -> Iterator[Case]:
    for name, requests in (("many requests", _SHORT), ("a long request", _LONG)):
        yield Case("sparse_extend", name, *_sparse_extend_case(shape, device, requests))
        if shape.window >= 0:
            yield Case("sparse_extend", f"{name}, a window", *_sparse_extend_case(shape, device, requests, _WINDOW))


def _sparse_extend_case(
    shape: ModelShape, device: torch.device, requests: list[tuple[int, list[int]]], window: int = -1
) -> tuple:
    rng = torch.Generator().manual_seed(0)
    lens = torch.tensor([[kv_len, len(rows)] for kv_len, rows in requests])
    kv_indptr, row_indptr = torch.cat([lens.new_zeros(1, 2), lens.cumsum(0)]).t().contiguous()
    num_keys, num_rows = int(kv_indptr[-1]), int(row_indptr[-1])
    kv_indices = torch.randperm(num_keys + 9, generator=rng)[:num_keys].to(device)
    k, v = (
        torch.full((num_keys + 9, shape.num_kv_heads, dim), float("nan"), device=device).to(shape.kv_dtype)
        for dim in (shape.head_dim, shape.v_head_dim)
    )
    for (_, rows), begin in zip(requests, kv_indptr[:-1].tolist(), strict=True):
        seen = kv_indices[begin : begin + (max(rows) + 1 if rows else 0)]
        for buffer in (k, v):
            _fill(buffer, seen, _normal(rng, (len(seen), *buffer.shape[1:]), shape.kv_dtype, device))
    q = _queries(rng, num_rows, shape, device)
    positions = torch.tensor([row for _, rows in requests for row in rows], device=device)
    k_scale, v_scale = _scales(shape)
    args = q, k, v, kv_indptr.to(device), kv_indices, row_indptr.to(device), positions
    options = {"sm_scale": shape.head_dim**-0.5, "logit_cap": shape.logit_cap, "k_scale": k_scale, "v_scale": v_scale}
    options["window"] = window
    if shape.sinks is not None:
        options["sinks"] = _normal(rng, (shape.num_q_heads,), shape.sinks, device)

    def run(implementation: str) -> Sequence[torch.Tensor]:
        return [sparse_extend(*args, **options, backend=implementation)]

    def error(found: Sequence[torch.Tensor]) -> float:
        allowed = _ATTENTION_ERROR[shape.dtype]
        return _share(found[0], sparse_extend_reference(*args, **options), allowed, allowed)

    return run, error


def _copy_rotate_cases(shape: ModelShape, device: torch.device) -> Iterator[Case]:
    rng = torch.Generator().manual_seed(0)
    num_layers, num_tokens = 2, 300
    slots = torch.randperm(2 * num_tokens + 5, generator=rng).to(device)
    src, dst = slots[:num_tokens], slots[num_tokens : 2 * num_tokens]
    delta = torch.randint(-5000, 5000, (num_tokens,), generator=rng).to(device)
    delta[::7] = 0
    spec = RotarySpec(shape.rotary_dim, shape.is_neox, default_inv_freq(10_000.0, shape.rotary_dim)).to(device)
    pools = [
        [_normal(rng, (len(slots), shape.num_kv_heads, dim), shape.kv_dtype, device) for _ in range(num_layers)]
        for dim in (shape.head_dim, shape.v_head_dim)
    ]

    def run(implementation: str) -> Sequence[torch.Tensor]:
        k, v = ([buffer.clone() for buffer in buffers] for buffers in pools)
        copy_rotate(k, v, src, dst, delta, spec, backend=implementation)
        return [*k, *v]

    def error(found: Sequence[torch.Tensor]) -> float:
        k, v = ([buffer.clone() for buffer in buffers] for buffers in pools)
        copy_rotate_reference(k, v, src, dst, delta, spec)
        relative, absolute = _ROTATION_ERROR[shape.kv_dtype]
        pairs = [*zip(found, [*k, *v], strict=True)]
        shares = [_share(mine, expected, relative, absolute) for mine, expected in pairs[:num_layers]]
        still = dst[::7]
        kept = [(mine[still], expected[still]) for mine, expected in pairs[:num_layers]] + pairs[num_layers:]
        are_equal = all(torch.equal(raw(mine), raw(expected)) for mine, expected in kept)
        return max(shares) if are_equal else float("inf")

    yield Case("copy_rotate", "two layers", run, error)


def _attention_mass_cases(shape: ModelShape, device: torch.device) -> Iterator[Case]:
    # Statistics use some heads, each with a K of its own, and segments; a question's rows use all heads.
    yield Case("attention_mass", "of a question", *_attention_mass_case(shape, device))
    yield Case("attention_mass", "of chunks", *_attention_mass_case(shape, device, of_chunks=True))


def _attention_mass_case(shape: ModelShape, device: torch.device, *, of_chunks: bool = False) -> tuple:
    rng = torch.Generator().manual_seed(0)
    kv_len, num_rows = 333, 37
    heads = shape.sampled_heads if of_chunks else shape.num_q_heads
    kv_heads = heads if of_chunks else shape.num_kv_heads
    q = _queries(rng, num_rows, shape, device)
    q = q[:, :heads].contiguous() if of_chunks else q
    k = _normal(rng, (kv_len, kv_heads, shape.head_dim), shape.kv_dtype, device)
    rows = torch.randperm(kv_len, generator=rng)[:num_rows].sort().values
    raw(k)[int(rows[-1]) + 1 :] = raw(torch.full((1,), float("nan"), device=device).to(shape.kv_dtype))
    options: dict[str, Any] = {"sm_scale": shape.head_dim**-0.5, "logit_cap": shape.logit_cap}
    options |= {"k_scale": _scales(shape)[0], "skip_self": of_chunks}
    options |= {"segment_starts": [0, 1, 64, 100, 300]} if of_chunks else {}
    options |= {"sinks": _normal(rng, (heads,), shape.sinks, device)} if shape.sinks is not None else {}
    args = q, k, rows.to(device)

    def run(implementation: str) -> Sequence[torch.Tensor]:
        return [part for part in attention_mass(*args, **options, backend=implementation) if part is not None]

    def error(found: Sequence[torch.Tensor]) -> float:
        expected = [part for part in attention_mass_reference(*args, **options) if part is not None]
        return max(_share(mine, its, _MASS_ERROR, _MASS_ERROR) for mine, its in zip(found, expected, strict=True))

    return run, error


def _question_mass_cases(shape: ModelShape, device: torch.device) -> Iterator[Case]:
    for squared in (False, True):
        case = _question_mass_case(shape, device, squared)
        yield Case("question_mass", f"of two requests{', squared' * squared}", *case)


def _question_mass_case(shape: ModelShape, device: torch.device, squared: bool) -> tuple:
    """A case of two layers: keys of several pieces, questions of several tiles, an answer behind one question."""
    rng = torch.Generator().manual_seed(0)
    kv_lens, starts, row_lens, num_layers = [700, 90], [640, 70], [50, 20], 2
    slots = torch.randperm(sum(kv_lens) + 9, generator=rng)[: sum(kv_lens)].to(device)
    size = len(slots) + 9, shape.num_kv_heads, shape.head_dim
    buffers = [torch.full(size, float("nan"), device=device).to(shape.kv_dtype) for _ in range(num_layers)]
    for buffer in buffers:
        for own, start, row_len in zip(slots.split(kv_lens), starts, row_lens, strict=True):
            seen = own[: start + row_len]
            _fill(buffer, seen, _normal(rng, (len(seen), *size[1:]), shape.kv_dtype, device))
    q = _normal(rng, (num_layers, sum(row_lens), shape.num_q_heads, shape.head_dim), shape.dtype, device)
    options: dict[str, Any] = {"sm_scale": shape.head_dim**-0.5, "logit_cap": shape.logit_cap, "squared": squared}
    options["k_scales"] = [_scales(shape)[0], 2 * _scales(shape)[0]]
    if shape.sinks is not None:
        options["sinks"] = [_normal(rng, (shape.num_q_heads,), shape.sinks, device) for _ in buffers]
    args = q, buffers, Questions([0, row_lens[0]], row_lens, starts, kv_lens, slots)

    def run(implementation: str) -> Sequence[torch.Tensor]:
        return [question_mass(*args, **options, backend=implementation)]

    def error(found: Sequence[torch.Tensor]) -> float:
        return _share(found[0], question_mass_reference(*args, **options), _MASS_ERROR, _MASS_ERROR)

    return run, error


def _kv_deviation_cases(shape: ModelShape, device: torch.device) -> Iterator[Case]:
    rng = torch.Generator().manual_seed(0)
    num_tokens = 65
    slots = torch.randperm(2 * num_tokens, generator=rng)[:num_tokens].to(device)
    dims = shape.head_dim, shape.v_head_dim
    k, v = (_normal(rng, (num_tokens, shape.num_kv_heads, dim), shape.dtype, device) for dim in dims)
    old = [_normal(rng, (2 * num_tokens, shape.num_kv_heads, dim), shape.kv_dtype, device) for dim in dims]
    k_scale, v_scale = _scales(shape)

    options = {"slots": slots, "k_scale": k_scale, "v_scale": v_scale}

    def run(implementation: str) -> Sequence[torch.Tensor]:
        return [kv_deviation(k, v, *old, **options, backend=implementation)]

    def run_of_v(implementation: str) -> Sequence[torch.Tensor]:
        return [kv_deviation(k, v, *old, **options, only_v=True, backend=implementation)]

    def error(found: Sequence[torch.Tensor]) -> float:
        expected = kv_deviation_reference(k, v, *old, **options)
        return _share(found[0], expected, _DEVIATION_ERROR, _DEVIATION_ERROR)

    def error_of_v(found: Sequence[torch.Tensor]) -> float:
        expected = kv_deviation_reference(k[..., :0], v, old[0][..., :0], old[1], **options)
        return _share(found[0], expected, _DEVIATION_ERROR, _DEVIATION_ERROR)

    yield Case("kv_deviation", "of slots", run, error)
    yield Case("kv_deviation", "of V in slots", run_of_v, error_of_v)


def _add_drift_cases(shape: ModelShape, device: torch.device) -> Iterator[Case]:
    spec = RotarySpec(shape.rotary_dim, shape.is_neox, default_inv_freq(10_000.0, shape.rotary_dim)).to(device)
    yield Case("add_drift", "of two requests", *_add_drift_case(shape, device, spec))
    if shape.has_unrotated:
        yield Case("add_drift", "of keys without a position", *_add_drift_case(shape, device, None))


def _add_drift_case(shape: ModelShape, device: torch.device, spec: RotarySpec | None) -> tuple:
    rng = torch.Generator().manual_seed(0)
    lens, shown = (150, 33, 80), (40, 0, 7)  # tokens and rows of each chunk
    num_tokens, num_rows = sum(lens), sum(shown)
    starts = [sum(lens[:i]) for i in range(len(lens))]
    at = torch.cat(
        [
            start + torch.randperm(n, generator=rng)[:m].sort().values
            for start, n, m in zip(starts, lens, shown, strict=True)
        ]
    )
    slots = torch.randperm(num_tokens + 9, generator=rng)[:num_tokens]
    positions = 3000 + torch.arange(num_tokens)
    rows = torch.randperm(num_rows + 5, generator=rng)[:num_rows].sort().values
    chunk = torch.repeat_interleave(torch.tensor(lens))
    bounds = torch.tensor([0, *shown]).cumsum(0)
    peers = torch.tensor([[0, 0, 2], [2, 2, 3]])
    drift = Drift(
        *(one.to(device) for one in (rows, slots[at], bounds, peers)),
        Turn(-positions[at].to(device)),
        *(one.to(device) for one in (slots, chunk)),
        Turn(positions.to(device)),
        strength=0.5,
        prior=8.0,
    )
    dims = shape.head_dim - shape.latent_dim, shape.v_head_dim
    new = [_normal(rng, (num_rows + 5, shape.num_kv_heads, dim), shape.dtype, device) for dim in dims]
    pools = [_normal(rng, (num_tokens + 9, shape.num_kv_heads, dim), shape.kv_dtype, device) for dim in dims]
    k_scale, v_scale = _scales(shape)

    def run(implementation: str) -> Sequence[torch.Tensor]:
        buffers = [pool.clone() for pool in pools]
        add_drift(*new, *buffers, drift, spec, k_scale=k_scale, v_scale=v_scale, backend=implementation)
        return buffers

    def error(found: Sequence[torch.Tensor]) -> float:
        given = {"row_positions": positions[at], "positions": positions, "k_scale": k_scale, "v_scale": v_scale}
        expected = add_drift_reference(*new, *pools, drift, spec, **given)
        relative, absolute = _ROTATION_ERROR[shape.kv_dtype]
        share = max(
            _share(raw(one)[drift.slots].view(one.dtype), its, relative, 10 * absolute)
            for one, its in zip(found, expected, strict=True)
        )
        spared = torch.ones(num_tokens + 9, dtype=torch.bool, device=device).index_fill_(0, drift.slots, False)
        is_kept = all(torch.equal(raw(one)[spared], raw(pool)[spared]) for one, pool in zip(found, pools, strict=True))
        return share if is_kept else float("inf")

    return run, error


def shape_of(num_q_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype, **others: Any) -> ModelShape:
    """The shape of a common model: heads of one size, all dimensions rotated, queries that lie among K and V."""
    fields = {"kv_dtype": dtype, "v_head_dim": head_dim, "rotary_dim": head_dim}
    fields |= {"q_stride": (num_q_heads + 2 * num_kv_heads) * head_dim} | others
    return ModelShape(dtype=dtype, num_q_heads=num_q_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, **fields)


def common_shapes() -> list[ModelShape]:
    """Llama, Qwen2.5, Gemma 2, gpt-oss, a small one in fp32, a partial rotation; fp16 and both kinds of fp8."""
    bf16 = torch.bfloat16
    return [
        shape_of(32, 8, 128, bf16),
        shape_of(32, 8, 128, torch.float16),
        *(shape_of(32, 8, 128, bf16, kv_dtype=fp8) for fp8 in FP8),
        shape_of(28, 4, 128, bf16),
        shape_of(14, 2, 64, bf16),
        shape_of(8, 4, 256, bf16, logit_cap=50.0, window=4095),
        shape_of(64, 8, 64, bf16, window=127, sinks=bf16),
        shape_of(32, 32, 80, bf16, rotary_dim=32, is_neox=False),
        shape_of(12, 12, 64, torch.float32),
    ]
