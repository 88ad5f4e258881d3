"""Tiling: how the work of `sparse_extend` in Triton is divided among programs.

    choose_tile     rows and keys that a program computes at one time
    choose_splits   among how many programs the keys of one tile are split
    find_tile       which request a tile belongs to

The host chooses before a launch, by numbers that it knows without waiting; on the device a program finds its tile.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl

MAX_SPLITS = 32
_MIN_SPLIT_LEN = 512
_SEARCH_LEN = tl.constexpr(32)


class Tile(NamedTuple):
    """What a program computes at one time, and by what means."""

    block_m: int  # rows x query heads per key-value head
    block_n: int  # keys
    num_warps: int
    num_stages: int  # blocks of keys on their way at one time


def choose_tile(dim_pad: int, q_size: int, group: int, arch: int, *, is_plain: bool = True) -> Tile:
    """A tile within registers and shared memory of a GPU: no spills, 99 KB before sm_90 (test_budgets.py).

    Args:
        dim_pad: the larger dimension of K and V heads, padded.
        q_size: bytes of an element of q.
        group: query heads per key-value head.
        arch: 90 for sm_90.
        is_plain: K and V are of q's dtype, their dimensions not padded; reading others takes more registers.
    """
    is_wide = dim_pad > 128
    if q_size == 4:
        tile = Tile(32, 16 if is_wide else 32, 4, 2)
    elif arch < 80:
        tile = Tile(32, 32, 4, 2) if is_wide else Tile(64, 64, 4, 2)
    elif is_wide:
        tile = Tile(128, 32, 8, 3) if arch >= 90 else Tile(64, 32, 8, 3)
    elif arch < 89 and not is_plain:
        tile = Tile(128, 32, 8, 3)
    else:
        tile = Tile(128, 64, 8, 3)
    return tile._replace(block_m=max(tile.block_m, triton.next_power_of_2(group)))


@functools.cache
def _num_multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 0


def choose_splits(num_programs: int, num_keys: int, device: torch.device) -> int:
    """Among how many programs the keys of one tile are split: enough for two per multiprocessor, if the keys suffice.

    Not tuned on a GPU yet: the 512 keys that a program has at least are a few microseconds' work.
    """
    wanted = triton.cdiv(2 * _num_multiprocessors(device), num_programs)
    return max(1, min(wanted, num_keys // _MIN_SPLIT_LEN, MAX_SPLITS))


@triton.jit
def find_tile(tile, row_indptr_ptr, num_requests, TILE_ROWS: tl.constexpr):
    """(request, number of tiles of the requests before it); past the last tile, request is `num_requests` or more."""
    request = 0
    tiles_before = 0
    total = 0
    for first in range(0, num_requests, _SEARCH_LEN):
        request_id = first + tl.arange(0, _SEARCH_LEN)
        exists = request_id < num_requests
        first_row = tl.load(row_indptr_ptr + request_id, mask=exists, other=0)
        num_rows = (tl.load(row_indptr_ptr + request_id + 1, mask=exists, other=0) - first_row).to(tl.int32)
        num_tiles = (num_rows + TILE_ROWS - 1) // TILE_ROWS
        tiles_up_to = total + tl.cumsum(num_tiles, 0)
        is_before = tiles_up_to <= tile
        # Padding of the last block counts too, but only if all requests do: past the last tile.
        request += tl.sum(is_before.to(tl.int32), 0)
        tiles_before = tl.maximum(tiles_before, tl.max(tl.where(is_before, tiles_up_to, 0), 0))
        total += tl.sum(num_tiles, 0)
    return request, tiles_before
