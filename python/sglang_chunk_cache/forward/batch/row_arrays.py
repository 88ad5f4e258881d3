"""The arrays of a fused batch: SGLang's batch with rows in front of each request's extend, which SGLang takes for more
tokens of the extend.

Verbs: `positions_of` (all rows), `with_rows` (the batch), `questions_alone` (the batch in which questions ask),
`one_ahead` (the ids that a draft is given).

Promises: the scheduler's batch is never changed; the model sees a copy in which a fused request simply extends by more
tokens. All lengths of that copy agree, so whatever SGLang derives from them (logit positions, LoRA segments, padding
counts) is right; only the positions of the added rows are scattered, and they are replaced afterwards. Arrays are put
together on the host and uploaded at once: the number of operations does not grow with the batch.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from sgl_kernel_ext.transfer import upload
from sglang_chunk_cache.forward.added_rows import NO_ROWS, AddedRows
from sglang_chunk_cache.forward.batch.image_rows import image_rows

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ScheduleBatch


def num_decoding(batch: ScheduleBatch) -> int:
    """Requests at the end of a mixed batch (`--enable-mixed-chunk`) that decode: an extend of one token each."""
    return len(batch.decoding_reqs or ())


def positions_of(batch: ScheduleBatch, added: Sequence[AddedRows]) -> list[npt.NDArray[np.int64]]:
    """Positions of the rows that each request computes: those that are added, then its extend."""
    requests = zip(added, batch.prefix_lens, batch.extend_lens, strict=True)
    return [np.concatenate((one.positions, np.arange(first, first + length))) for one, first, length in requests]


def with_rows(
    batch: ScheduleBatch,
    added: Sequence[AddedRows],
    positions: list[npt.NDArray[np.int64]],
    extra: Sequence[np.ndarray],
    device: str,
) -> tuple[ScheduleBatch, torch.Tensor, list[torch.Tensor]]:
    """A copy of `batch` with the added rows in front of each request's extend; positions `[num_rows]` of all; `extra`.

    Args:
        positions: `positions_of(batch, added)`.
        extra: other arrays to upload, returned on the device.
    """
    req_to_token = batch.req_to_token_pool.req_to_token
    num_prefilling = len(batch.reqs) - num_decoding(batch)
    ids = [
        np.frombuffer(req.full_untruncated_fill_ids, dtype=np.int64)[own]
        for req, own in zip(batch.reqs[:num_prefilling], positions, strict=False)
    ]
    num_decoded = sum(batch.extend_lens[num_prefilling:])
    ids.append(np.zeros(num_decoded, dtype=np.int64))  # the host may not know yet what was decoded
    pool_rows = batch.req_pool_indices_cpu.tolist()
    places = [own + row * req_to_token.shape[1] for own, row in zip(positions, pool_rows, strict=True)]
    row_positions, row_ids, row_places, *uploaded = upload(
        [np.concatenate(one) for one in (positions, ids, places)] + list(extra), device
    )
    num_added = [len(one.positions) for one in added]
    fused = copy.copy(batch)
    fused.input_ids = row_ids.to(batch.input_ids)
    if num_decoded:
        fused.input_ids[-num_decoded:] = batch.input_ids[-num_decoded:]
    fused.out_cache_loc = req_to_token.view(-1).index_select(0, row_places).to(batch.out_cache_loc.dtype)
    fused.extend_lens = [length + more for length, more in zip(batch.extend_lens, num_added, strict=True)]
    # These have a meaning only in the sum with `extend_lens`.
    fused.prefix_lens = [length - more for length, more in zip(batch.prefix_lens, num_added, strict=True)]
    starts = zip(batch.extend_logprob_start_lens, num_added, strict=True)
    fused.extend_logprob_start_lens = [start + more for start, more in starts]
    fused.extend_num_tokens = sum(fused.extend_lens)
    if batch.multimodal_inputs is not None:
        given = zip(batch.multimodal_inputs, positions, fused.prefix_lens, num_added, strict=True)
        fused.multimodal_inputs = [
            image_rows(inputs, own, first) if more or not len(own) else inputs for inputs, own, first, more in given
        ]
    if batch.replace_positions is not None:  # of other requests: embeddings by index into the flattened input ids
        moved = _moved_indices(batch.extend_lens, fused.extend_lens, device)
        fused.replace_positions = moved[batch.replace_positions]
    return fused, row_positions, uploaded


def questions_alone(
    batch: ScheduleBatch, added: Sequence[AddedRows], asking: Collection[int]
) -> tuple[ScheduleBatch, list[AddedRows]]:
    """A copy of `batch` that computes only the requests `asking`, with the rows that their plans begin with.

    The other requests have no rows, as if they had been computed already. Questions that ask have no images.
    """
    alone = copy.copy(batch)
    alone.prefix_lens, alone.extend_lens, own = [], [], []
    for i, (one, prefix_len, extend_len) in enumerate(zip(added, batch.prefix_lens, batch.extend_lens, strict=True)):
        asks = i in asking
        alone.prefix_lens.append(prefix_len if asks else prefix_len + extend_len)
        alone.extend_lens.append(extend_len if asks else 0)
        own.append(AddedRows(one.load.plan.row_positions if asks and one.load else NO_ROWS, one.begin))
    alone.extend_logprob_start_lens = [0] * len(added)
    alone.return_logprob = False
    alone.replace_embeds = alone.replace_positions = None
    return alone, own


def one_ahead(batch: ScheduleBatch, fused: ScheduleBatch, positions: list[npt.NDArray[np.int64]]) -> torch.Tensor:
    """`[num_rows]` the token behind each row, which a draft is given; for each request's last row as in `batch`."""
    ids = [
        np.append(np.frombuffer(req.full_untruncated_fill_ids, dtype=np.int64), 0)[own + 1]
        for req, own in zip(batch.reqs, positions, strict=True)
    ]
    has_tail = np.array(batch.extend_lens) > 0
    ends = [np.cumsum(one.extend_lens)[has_tail] - 1 for one in (fused, batch)]
    row_ids, last, last_of_batch = upload([np.concatenate(ids), *ends], fused.input_ids.device)
    row_ids = row_ids.to(fused.input_ids.dtype)
    row_ids[last] = batch.input_ids[last_of_batch]
    return row_ids


def _moved_indices(old_lens: list[int], new_lens: list[int], device: str) -> torch.Tensor:
    """`[sum(old_lens)]` where each token of the flattened extends stands once rows were put in front of them."""
    ends = np.cumsum(new_lens)
    moved = [np.arange(end - old, end) for old, end in zip(old_lens, ends, strict=True)]
    return upload([np.concatenate(moved)], device)[0]
