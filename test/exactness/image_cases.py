"""Requests with an image, beside texts whose chunks are reused, as scenarios for `exactness.runner`.

A case returns replies that must equal those of stock SGLang. The model is a tiny Qwen2.5-VL or Qwen3-VL, whose images
have three coordinates, and in the latter features that are added between layers.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from exactness.cases import Session
from local_scheduler import Reply, Request

IMAGE_ID = 511
SIDE = 4  # patches; two by two are a token
NUM_TOKENS = (SIDE // 2) ** 2


def image_request(s: Session, before: list[int], behind: list[int], seed: int, **fields: Any) -> Request:
    """Text, an image, text."""
    from sglang.srt.managers.schedule_batch import Modality, MultimodalDataItem, MultimodalProcessorOutput

    start = len(before)
    own = torch.arange(NUM_TOKENS)
    height, width = own // (SIDE // 2), own % (SIDE // 2)
    image = start + torch.stack([torch.zeros_like(own), height, width])
    rest = start + SIDE // 2 + torch.arange(len(behind))
    positions = torch.cat([torch.arange(start).repeat(3, 1), image, rest.repeat(3, 1)], dim=1)
    ids = [*before, *[IMAGE_ID] * NUM_TOKENS, *behind]
    tower = s.local.scheduler.model_config.hf_config.vision_config
    patch_len = 3 * tower.temporal_patch_size * tower.patch_size**2
    item = MultimodalDataItem(
        modality=Modality.IMAGE,
        offsets=[(start, start + NUM_TOKENS - 1)],
        feature=torch.randn(SIDE * SIDE, patch_len, generator=torch.Generator().manual_seed(seed)),
        model_specific_data={"image_grid_thw": torch.tensor([[1, SIDE, SIDE]])},
    )
    output = MultimodalProcessorOutput(
        mm_items=[item],
        input_ids=ids,
        im_token_id=IMAGE_ID,
        mrope_positions=positions,
        mrope_position_delta=torch.tensor([[SIDE // 2 - NUM_TOKENS]]),
    )
    return Request(ids, mm_inputs=output, **fields)


def images(s: Session, chunk: list[int]) -> list[Request]:
    """One behind the system prompt, one within other text, and one whose chunks are marked."""
    found = [
        image_request(s, s.system, s.tokens(11), 1, max_new_tokens=6),
        image_request(s, s.tokens(30), s.tokens(7), 2),
        image_request(s, s.system + chunk, s.tokens(7), 3),
    ]
    if s.is_ours:
        found[2].chunk_cache = {"spans": [[len(s.system), len(s.system) + len(chunk)]], "ratio": 0.15}
    return found


def case_images_beside_texts(s: Session) -> None:
    chunks = s.chunks(40, 33, 51)
    s.prime(chunks)
    texts = [s.request(s.prompt([chunks[i] for i in order])) for order in ([2, 1, 0], [1, 0], [0, 2, 1])]
    first, *others = images(s, chunks[0])
    s.replies += s.local.generate([first, texts[0], others[0], texts[1], others[1], texts[2]])
    s.replies += s.local.generate([*images(s, chunks[0]), s.request(s.prompt([chunks[2], chunks[0]]))])
    marked = s.replies[-2]
    assert not s.is_ours or marked.info is None or marked.info["reused_tokens"] == 0


def case_images_beside_rows_that_leave(s: Session) -> None:
    """A text beside images gets what it gets alone."""
    chunks = s.chunks(40, 33, 51)
    replies: list[Reply] = []
    for method in ("cacheblend", "fusionrag", "question-drift"):
        prompt = s.prompt([chunks[i] for i in (2, 1, 0)])
        recipe = {"method": method, "ratio": 0.3}
        s.prime(chunks)
        (alone,) = s.local.generate([s.request(prompt, options=recipe)])
        s.local.flush()
        s.prime(chunks)
        first, second, _ = images(s, chunks[0])
        beside = s.local.generate([first, s.request(prompt, options=recipe), second])
        s.local.flush()
        replies += [beside[0], beside[2]]
        if s.is_ours:
            assert beside[1].info["method"] == method
            assert beside[1].info["recomputed_tokens"] == alone.info["recomputed_tokens"] > 0
            assert beside[1].logprobs == pytest.approx(alone.logprobs, abs=1e-4), method
    s.replies = replies


def case_positions_that_observers_see(s: Session) -> None:
    """A model may add to its positions; who looks on gets those of the prompt."""
    if not s.is_ours:
        return
    from sglang_chunk_cache.forward.statistics_taker import StatisticsTaker

    seen: list[list[int]] = []
    stock = StatisticsTaker.observe

    def observe(self: Any, rows: Any) -> None:
        seen.append(rows.positions.tolist())
        stock(self, rows)

    StatisticsTaker.observe = observe
    try:
        prompt = s.prompt(s.chunks(40))
        s.local.generate([s.request(prompt)])
    finally:
        StatisticsTaker.observe = stock
    assert seen
    assert all(positions == list(range(len(prompt.ids))) for positions in seen), seen


CASES = {
    "images_beside_texts": case_images_beside_texts,
    "images_beside_rows_that_leave": case_images_beside_rows_that_leave,
    "positions_that_observers_see": case_positions_that_observers_see,
}
