"""Time copy_rotate for all layers of a model, against a plain copy of the same slots by index.

    python benchmark/kernel/bench_copy_rotate.py --threads 2 --out results.json

`--num-tokens` tokens in eight chunks, each moved by another distance. `runs`: a chunk lies in consecutive slots;
`pages`: in scattered pages of 16; `scattered`: every slot by itself. `gigabytes_per_s` counts K and V once read and
once written. The op is compared with its float64 definition first; nothing is timed if that fails.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from bench_report import describe_machine, measure, print_table, write_json

from sgl_kernel_ext import RotarySpec, copy_rotate
from sgl_kernel_ext.copy_rotate.naive import copy_rotate_reference
from sgl_kernel_ext.rotary import default_inv_freq

NUM_CHUNKS = 8
UNIT_LEN = {"runs": None, "pages": 16, "scattered": 1}
TOLERANCE = {torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default=None, choices=["float32", "float16", "bfloat16"])
    parser.add_argument("--backend", default="auto", choices=["auto", "torch", "triton"])
    parser.add_argument("--num-layers", type=int, default=12)
    parser.add_argument("--kv-heads", type=int, default=12)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--num-tokens", type=int, default=4096)
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument("--threads", type=int, default=None, help="CPU threads; default: torch's choice")
    parser.add_argument("--out", type=Path, default=None, help="JSON file to write")
    return parser.parse_args()


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


def plain_copy(pools: list[list[torch.Tensor]], src: torch.Tensor, dst: torch.Tensor) -> None:
    for buffers in pools:
        for buffer in buffers:
            buffer[dst] = buffer[src]


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
    tolerance = TOLERANCE[pools[0][0].dtype]
    torch.testing.assert_close(one_layer[0][0], expected[0][0], atol=tolerance, rtol=tolerance)
    assert torch.equal(one_layer[1][0], expected[1][0]), "values must be exact copies"


@torch.inference_mode()
def main() -> None:
    args = parse_args()
    if args.num_tokens % (16 * NUM_CHUNKS):
        raise SystemExit(f"--num-tokens: {args.num_tokens} must be a multiple of {16 * NUM_CHUNKS}")
    if args.threads:
        torch.set_num_threads(args.threads)
    device = torch.device(args.device)
    dtype = getattr(torch, args.dtype or ("bfloat16" if device.type == "cuda" else "float32"))
    pools = make_pools(args, device, dtype)
    spec = RotarySpec(args.head_dim, True, default_inv_freq(10_000.0, args.head_dim)).to(device)
    delta = (torch.arange(NUM_CHUNKS, device=device) * 97 - 300).repeat_interleave(args.num_tokens // NUM_CHUNKS)
    machine = describe_machine(device)
    print(machine)
    print(f"{args.num_layers} layers, {args.kv_heads} heads x {args.head_dim}, {args.num_tokens} tokens, {dtype}")

    gigabytes = 4 * args.num_layers * args.num_tokens * args.kv_heads * args.head_dim * dtype.itemsize / 1e9
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
                "ms": ms["copy_rotate"].median,
                "plain_copy_ms": ms["plain"].median,
                "best_ms": ms["copy_rotate"].best,
                "best_plain_copy_ms": ms["plain"].best,
                "best_gigabytes_per_s": gigabytes / ms["copy_rotate"].best * 1e3,
            }
        )
    print_table(list(results[0]), [list(row.values()) for row in results])
    if args.out:
        keys = ("num_layers", "kv_heads", "head_dim", "num_tokens")
        shape = {key: getattr(args, key) for key in keys}
        write_json(args.out, {"machine": machine, "dtype": str(dtype), "shape": shape, "results": results})


if __name__ == "__main__":
    main()
