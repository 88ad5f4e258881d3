"""Time copy_rotate for all layers of a model, against a plain copy of the same slots by index.

    python benchmark/kernel/bench_copy_rotate.py
    python benchmark/kernel/bench_copy_rotate.py --num-layers 32 --kv-heads 8 --head-dim 128 --num-tokens 32768
    python benchmark/kernel/bench_copy_rotate.py --dtype float8_e4m3fn

`--num-tokens` tokens in eight chunks, each moved by another distance. `runs`: a chunk lies in consecutive slots;
`pages`: in scattered pages of 16; `scattered`: every slot by itself. The op's tests run first; nothing is timed if one
fails.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch
from harness import bandwidth, finish, flop_rate, measure, parser, prepare

from sgl_kernel_ext import RotarySpec, copy_rotate
from sgl_kernel_ext.copy_rotate.naive import copy_rotate_reference
from sgl_kernel_ext.rotary import default_inv_freq

NUM_CHUNKS = 8
UNIT_LEN = {"runs": None, "pages": 16, "scattered": 1}
# fp8: one step of the format, and its smallest number.
TOLERANCE = {
    torch.float32: (1e-6, 1e-6),
    torch.float16: (2e-3, 2e-3),
    torch.bfloat16: (2e-2, 2e-2),
    torch.float8_e4m3fn: (2.0**-3, 2.0**-9),
    torch.float8_e5m2: (2.0**-2, 2.0**-16),
}
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
NOTES = (
    "Milliseconds of all layers, median. *plain*: the same slots copied by index, K not turned. *floor*: K and V read",
    "once and written once at the measured bandwidth; *share of it*: the floor over the best time.",
)


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    fp8 = [str(dtype).removeprefix("torch.") for dtype in FP8]
    made = parser(__doc__.splitlines()[0], more_dtypes=fp8, num_layers=12, kv_heads=12, head_dim=64, num_tokens=4096)
    args = made.parse_args(argv)
    if args.num_tokens % (16 * NUM_CHUNKS):
        made.error(f"--num-tokens: {args.num_tokens} must be a multiple of {16 * NUM_CHUNKS}")
    return args


def choose_slots(kind: str, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Disjoint source and destination slots below 2 * num_tokens, which must be a multiple of 16 * NUM_CHUNKS."""
    unit_len = UNIT_LEN[kind] or num_tokens // NUM_CHUNKS
    units = torch.randperm(2 * num_tokens // unit_len, generator=torch.Generator().manual_seed(0))
    slots = (units[:, None] * unit_len + torch.arange(unit_len)).flatten()
    return slots[:num_tokens], slots[num_tokens:]


def make_pools(args: argparse.Namespace, device: torch.device, dtype: torch.dtype) -> list[list[torch.Tensor]]:
    rng = torch.Generator().manual_seed(0)
    shape = 2 * args.num_tokens, args.kv_heads, args.head_dim
    return [[torch.randn(shape, generator=rng).to(device, dtype) for _ in range(args.num_layers)] for _ in "kv"]


def as_bytes(buffer: torch.Tensor) -> torch.Tensor:
    """fp8 as bytes: torch does not compare or index it everywhere."""
    return buffer.view(torch.uint8) if buffer.dtype in FP8 else buffer


def plain_copy(pools: list[list[torch.Tensor]], src: torch.Tensor, dst: torch.Tensor) -> None:
    for buffers in pools:
        for buffer in buffers:
            as_bytes(buffer)[dst] = as_bytes(buffer)[src]


def self_check(
    pools: list[list[torch.Tensor]],
    slots: tuple[torch.Tensor, torch.Tensor],
    delta: torch.Tensor,
    spec: RotarySpec,
    backend: str,
) -> None:
    one_layer = [[buffers[0].clone()] for buffers in pools]
    expected = [[buffers[0].clone()] for buffers in pools]
    copy_rotate(*one_layer, *slots, delta, spec, backend=backend)
    copy_rotate_reference(*expected, *slots, delta, spec)
    relative, absolute = TOLERANCE[pools[0][0].dtype]
    (k,), (v,) = one_layer
    (expected_k,), (expected_v,) = expected
    torch.testing.assert_close(k.float(), expected_k.float(), rtol=relative, atol=absolute)
    assert torch.equal(as_bytes(v), as_bytes(expected_v)), "values must be exact copies"


@torch.inference_mode()
def main(argv: Sequence[str] | None = None) -> None:
    args = parse_args(argv)
    device, dtype, about = prepare(args, "copy_rotate")
    pools = make_pools(args, device, dtype)
    spec = RotarySpec(args.head_dim, True, default_inv_freq(10_000.0, args.head_dim)).to(device)
    delta = (torch.arange(NUM_CHUNKS, device=device) * 97 - 300).repeat_interleave(args.num_tokens // NUM_CHUNKS)
    copied = bandwidth(device)
    num_bytes = 4 * args.num_layers * args.num_tokens * args.kv_heads * args.head_dim * dtype.itemsize
    floor = 1e3 * num_bytes / copied
    results = []
    for kind in UNIT_LEN:
        slots = tuple(part.to(device) for part in choose_slots(kind, args.num_tokens))
        self_check(pools, slots, delta, spec, args.backend)
        candidates = {
            "copy_rotate": lambda slots=slots: copy_rotate(*pools, *slots, delta, spec, backend=args.backend),
            "plain": lambda slots=slots: plain_copy(pools, *slots),
        }
        ms = measure(candidates, repeat=args.repeat, device=device)
        results.append(
            {
                "slots": kind,
                "copy_rotate": ms["copy_rotate"].median,
                "best": ms["copy_rotate"].best,
                "floor": floor,
                "share of it": floor / ms["copy_rotate"].best,
                "plain": ms["plain"].median,
                "best plain": ms["plain"].best,
            }
        )
    shape = f"{args.num_layers} layers, {args.kv_heads} heads x {args.head_dim}, {args.num_tokens} tokens"
    rate = flop_rate(device, torch.float32 if dtype in FP8 else dtype)  # fp8 is rotated in fp32
    report = about | {"shape": shape, "gigabytes_per_s": copied / 1e9, "gigaflops": rate / 1e9, "results": results}
    finish(args, "copy_rotate", "Copying KV with a rotary shift", report, NOTES)


if __name__ == "__main__":
    main()
