"""Images among scattered rows: what SGLang's multimodal routines are given for a fused request.

Verb: `image_rows`.
"""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import numpy.typing as npt
import torch


def image_rows(inputs: Any, positions: npt.NDArray[np.int64], first: int) -> Any:
    """A copy of a request's `MultimodalInputs`, as if its rows were its tokens from `first` on; None = no rows.

    An image without rows is left out, so its encoder does not run. Any other image has all of its rows, except that the
    first one may lack its beginning and the last one its end: a plan cuts no image. A coordinate stays as far from the
    row's place as it was from the token's (`forward/positions`).

    Args:
        inputs: None = the request has no images.
        positions: `[num_rows]` prompt positions of the rows, ascending.
        first: number of tokens in front of the rows, as SGLang counts.
    """
    if inputs is None or not len(positions):
        return None
    moved = copy.copy(inputs)
    moved.mm_items = [one for item in inputs.mm_items if (one := _moved_item(item, positions, first)) is not None]
    own, places = torch.tensor(positions), first + torch.arange(len(positions))
    coordinates = inputs.mrope_positions[:, own] + (places - own)
    moved.mrope_positions = torch.cat([coordinates.new_zeros(3, first), coordinates], dim=1)
    return moved


def _moved_item(item: Any, positions: npt.NDArray[np.int64], first: int) -> Any:
    ((start, last),) = item.offsets
    begin, end = np.searchsorted(positions, (start, last + 1)).tolist()
    if begin == end:
        return None
    rows = positions[begin:end]
    assert begin == 0 or rows[0] == start, f"rows {rows} of the image at [{start}, {last}] behind others"
    assert end == len(positions) or rows[-1] == last, (
        f"rows {rows} of the image at [{start}, {last}] in front of others"
    )
    assert rows[-1] - rows[0] == len(rows) - 1, f"rows {rows} of the image at [{start}, {last}]"
    shift = first + begin - int(positions[begin])
    moved = copy.copy(item)
    moved.offsets = [(start + shift, last + shift)]
    return moved
