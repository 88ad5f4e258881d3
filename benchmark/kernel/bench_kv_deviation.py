"""Time kv_deviation against the same in single torch operations.

    python benchmark/kernel/bench_kv_deviation.py
    python benchmark/kernel/bench_kv_deviation.py --kv-heads 8 --head-dim 128 --num-tokens 32768    # 8B shapes

`--num-tokens` tokens whose old K and V lie in scattered slots, K for another position (`shift`) or for its own. `plain`
gathers, turns, subtracts, squares and adds up, one operation after the other. The op's tests run first; nothing is
timed if one fails.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch
from harness import bandwidth, finish, flop_rate, measure, parser, peak_bytes, prepare

from sgl_kernel_ext import RotarySpec
from sgl_kernel_ext.kv_deviation import kv_deviation
from sgl_kernel_ext.kv_deviation.naive import kv_deviation_reference
from sgl_kernel_ext.rotary import default_inv_freq, rotation_table

NOTES = (
    "Milliseconds, median. *floor*: new and old K and V read once at the measured bandwidth; *share of it*: the floor",
    "over the best time. Memory in MB, beside the inputs.",
)


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    return parser(__doc__.splitlines()[0], kv_heads=12, head_dim=64, num_tokens=4096).parse_args(argv)


def run_plain(
    new: list[torch.Tensor],
    old: list[torch.Tensor],
    slots: torch.Tensor,
    delta: torch.Tensor | None,
    spec: RotarySpec | None,
) -> torch.Tensor:
    k, v = (pool[slots].float() for pool in old)
    if delta is not None and spec is not None:
        cos, sin = (table[:, None] for table in rotation_table(spec, delta))
        x, y = k.chunk(2, -1)
        k = torch.cat([x * cos - y * sin, y * cos + x * sin], -1)
    return ((new[0].float() - k) ** 2).sum((1, 2)) + ((new[1].float() - v) ** 2).sum((1, 2))


@torch.inference_mode()
def main(argv: Sequence[str] | None = None) -> None:
    args = parse_args(argv)
    device, dtype, about = prepare(args, "kv_deviation")
    rng = torch.Generator().manual_seed(0)

    def normal(num: int) -> torch.Tensor:
        return torch.randn(num, args.kv_heads, args.head_dim, generator=rng).to(device, dtype)

    new, old = [normal(args.num_tokens) for _ in "kv"], [normal(2 * args.num_tokens) for _ in "kv"]
    slots = torch.randperm(2 * args.num_tokens, generator=rng)[: args.num_tokens].to(device)
    spec = RotarySpec(args.head_dim, True, default_inv_freq(1e4, args.head_dim)).to(device)
    copied, rate = bandwidth(device), flop_rate(device, dtype)
    floor = 1e3 * 4 * new[0].numel() * dtype.itemsize / copied
    results = []
    for name, delta in (("none", None), ("shift", torch.full_like(slots, 321))):
        given = {"slots": slots, "position_delta": delta, "spec": None if delta is None else spec}
        few = {key: value[:16] if isinstance(value, torch.Tensor) else value for key, value in given.items()}
        expected = kv_deviation_reference(new[0][:16], new[1][:16], *old, **few)
        found = kv_deviation(new[0][:16], new[1][:16], *old, **few, backend=args.backend)
        torch.testing.assert_close(found.double(), expected, atol=0, rtol=1e-4)
        candidates = {
            "ours": lambda given=given: kv_deviation(*new, *old, **given, backend=args.backend),
            "plain": lambda given=given: run_plain(new, old, slots, given["position_delta"], given["spec"]),
        }
        ms = measure(candidates, repeat=args.repeat, device=device)
        results.append(
            {
                "shift": name,
                "kv_deviation": ms["ours"].median,
                "best": ms["ours"].best,
                "floor": floor,
                "share of it": floor / ms["ours"].best,
                "plain": ms["plain"].median,
                "x plain": ms["plain"].median / ms["ours"].median,
                "MB": peak_bytes(candidates["ours"], device) / 1e6,
                "MB plain": peak_bytes(candidates["plain"], device) / 1e6,
            }
        )
    shape = f"{args.num_tokens} tokens, {args.kv_heads} heads x {args.head_dim}"
    report = about | {"shape": shape, "gigabytes_per_s": copied / 1e9, "gigaflops": rate / 1e9, "results": results}
    finish(args, "kv_deviation", "Deviation of K and V from what was stored", report, NOTES)


if __name__ == "__main__":
    main()
