"""Requests with images, as scenarios for `exactness.runner`.

A case returns replies that must equal those of stock SGLang. The model is a tiny Qwen2.5-VL or Qwen3-VL, whose images
have three coordinates, and in the latter features that are added between layers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from exactness import kept_cases
from exactness.cases import Prompt, Session
from exactness.tier_cases import only_on_disk
from local_scheduler import Reply, Request

IMAGE_ID = 511


@dataclass(frozen=True)
class Image:
    """Of `side` x `side` patches, of which two by two are a token."""

    seed: int
    side: int = 4

    @property
    def num_tokens(self) -> int:
        return (self.side // 2) ** 2


Part = Image | Sequence[int]


@dataclass
class Illustrated(Prompt):
    """Token ids and images, with the spans of chunks."""

    images: list[tuple[int, Image]] = field(default_factory=list)

    def put(self, *parts: Part) -> Illustrated:
        for part in parts:
            if isinstance(part, Image):
                self.images.append((len(self.ids), part))
                self.ids += [IMAGE_ID] * part.num_tokens
            else:
                self.ids += part
        return self

    def mark(self, *parts: Part) -> Illustrated:
        start = len(self.ids)
        self.put(*parts)
        self.spans.append([start, len(self.ids)])
        return self

    @property
    def positions(self) -> torch.Tensor:
        """`[3, num_tokens]` of multimodal rope: an image takes as many as its longer side has tokens."""
        found, at, begin = [], 0, 0
        for start, image in [*self.images, (len(self.ids), None)]:
            found.append((at + torch.arange(start - begin)).repeat(3, 1))
            at, begin = at + start - begin, start
            if image is not None:
                own, width = torch.arange(image.num_tokens), image.side // 2
                found.append(at + torch.stack([torch.zeros_like(own), own // width, own % width]))
                at, begin = at + width, start + image.num_tokens
        return torch.cat(found, dim=1)

    def inputs(self, s: Session) -> Any:
        """What SGLang's tokenizer process makes of them."""
        from sglang.srt.managers.schedule_batch import Modality, MultimodalDataItem, MultimodalProcessorOutput

        tower = s.local.scheduler.model_config.hf_config.vision_config
        patch_len = 3 * tower.temporal_patch_size * tower.patch_size**2
        items = [
            MultimodalDataItem(
                modality=Modality.IMAGE,
                offsets=[(start, start + image.num_tokens - 1)],
                feature=torch.randn(image.side**2, patch_len, generator=torch.Generator().manual_seed(image.seed)),
                model_specific_data={"image_grid_thw": torch.tensor([[1, image.side, image.side]])},
            )
            for start, image in self.images
        ]
        positions = self.positions
        return MultimodalProcessorOutput(
            mm_items=items,
            input_ids=list(self.ids),
            im_token_id=IMAGE_ID,
            mrope_positions=positions,
            mrope_position_delta=(positions.max() + 1 - len(self.ids)).reshape(1, 1),
        )


def request(s: Session, prompt: Illustrated, *, ratio: float = 1.0, options: Any = None, **fields: Any) -> Request:
    chunk_cache = {"spans": prompt.spans, "ratio": ratio, **(options or {})} if s.is_ours and prompt.spans else None
    inputs = prompt.inputs(s) if prompt.images else None
    return Request(prompt.ids, chunk_cache, mm_inputs=inputs, **{"max_new_tokens": 6, **fields})


def send(s: Session, *prompts: Illustrated, **fields: Any) -> list[Reply]:
    """All in one batch; the replies are compared."""
    replies = s.local.generate([request(s, prompt, **fields) for prompt in prompts])
    s.replies += replies
    return replies


def begin(s: Session) -> Illustrated:
    return Illustrated().put(s.system)


def assert_reused(reply: Reply, *statuses: str) -> None:
    """The chunks of a reply, where it is ours."""
    if reply.info is not None:
        assert [chunk["status"] for chunk in reply.info["chunks"]] == list(statuses), reply.info


def case_chunks_behind_images(s: Session) -> None:
    """Texts, stored with and without an image in front, are reused with and without one."""
    a, b, c = s.chunks(40, 33, 51)
    s.prime([a, b])
    (reply,) = send(s, begin(s).put(Image(1)).mark(a).put(Image(2, 8)).mark(b).put(s.tokens(9)))
    assert_reused(reply, "hit", "hit")
    send(s, begin(s).put(Image(3, 8)).mark(c).put(s.tokens(20)))  # c lies in a path, at another place than position
    (reply,) = send(s, begin(s).mark(c).mark(a).put(s.tokens(9)))
    assert_reused(reply, "hit", "hit")
    (reply,) = send(s, begin(s).put(s.tokens(7), Image(1)).mark(b).mark(c).put(s.tokens(3), Image(4), s.tokens(5)))
    assert_reused(reply, "hit", "hit")


def case_images_in_chunks(s: Session) -> None:
    """Chunks with an image are stored and reused at another place, behind others, twice, and behind a new one."""
    a, b, c = s.chunks(40, 33, 51)
    cat, dog = (a[:20], Image(1, 8), a[20:]), (b, Image(2))
    send(s, begin(s).mark(*cat).put(s.tokens(20)), begin(s).mark(*dog).put(s.tokens(20)))
    (reply,) = send(s, begin(s).put(s.tokens(5)).mark(*dog).mark(*cat).put(s.tokens(9)))
    assert_reused(reply, "hit", "hit")
    new = (Image(3, 8), c)
    (reply,) = send(s, begin(s).put(s.tokens(6)).mark(*cat).mark(*new).mark(*dog).put(s.tokens(9)))
    assert_reused(reply, "hit", "miss", "hit")
    (reply,) = send(s, begin(s).put(s.tokens(7)).mark(*new).mark(*dog).mark(*new).put(Image(4), s.tokens(9)))
    assert_reused(reply, "hit", "hit", "hit")
    first, second = send(
        s,
        begin(s).put(s.tokens(8)).mark(*dog).mark(*cat).put(s.tokens(9)),
        begin(s).put(s.tokens(9)).mark(*new).mark(c).put(Image(3, 8), s.tokens(9)),
    )
    assert_reused(first, "hit", "hit")
    assert_reused(second, "hit", "miss")


def case_chunks_end_in_images(s: Session) -> None:
    """The load, whole pages, does not end within an image, nor does a prefix that does spoil what is behind."""
    (a,) = s.chunks(40)
    end = (a, Image(1, 12))
    alone = (Image(2, 12),)
    send(s, begin(s).mark(*end).put(s.tokens(20)), begin(s).mark(*alone).put(s.tokens(20)))
    for count in range(1, 20, 6):
        (reply,) = send(s, begin(s).put(s.tokens(count)).mark(*end).put(s.tokens(20)))
        assert_reused(reply, "hit")
        (reply,) = send(s, begin(s).put(s.tokens(count)).mark(*end).mark(*alone).put(s.tokens(20)))
        assert_reused(reply, "hit", "hit")
    prompt = begin(s).put(Image(5, 12), s.tokens(30)).mark(*end).put(s.tokens(40))
    send(s, prompt)
    send(s, prompt)


def case_images_beside_texts(s: Session) -> None:
    chunks = s.chunks(40, 33, 51)
    s.prime(chunks)
    texts = [s.request(s.prompt([chunks[i] for i in order])) for order in ([2, 1, 0], [1, 0], [0, 2, 1])]
    cat = (chunks[0], Image(3), chunks[1])
    pictures = [
        begin(s).put(Image(1), s.tokens(11)),
        Illustrated().put(s.tokens(30), Image(2), s.tokens(7)),
        begin(s).mark(*cat).put(s.tokens(7)),
    ]
    first, *others = [request(s, one) for one in pictures]
    s.replies += s.local.generate([first, texts[0], others[0], texts[1], others[1], texts[2]])
    moved = begin(s).put(s.tokens(3)).mark(chunks[2]).mark(*cat).put(s.tokens(5))
    s.replies += s.local.generate([request(s, moved), s.request(s.prompt([chunks[2], chunks[0]])), request(s, moved)])
    assert_reused(s.replies[-1], "hit", "hit")


def case_images_beside_rows_that_leave(s: Session) -> None:
    """A text beside images gets what it gets alone."""
    chunks = s.chunks(40, 33, 51)
    cat = (chunks[0], Image(3), chunks[1])
    replies: list[Reply] = []
    for method in ("cacheblend", "fusionrag", "question-drift"):
        prompt = s.prompt([chunks[i] for i in (2, 1, 0)])
        moved = begin(s).put(s.tokens(3)).mark(*cat).put(s.tokens(5))
        recipe = {"method": method, "ratio": 0.3}
        s.prime(chunks)
        (alone,) = s.local.generate([s.request(prompt, options=recipe)])
        s.local.flush()
        s.prime(chunks)
        send(s, begin(s).mark(*cat).put(s.tokens(20)))
        first = request(s, begin(s).put(Image(1), s.tokens(11)))
        beside = s.local.generate([first, s.request(prompt, options=recipe), request(s, moved)])
        assert_reused(beside[2], "hit")
        s.local.flush()
        replies += [beside[0], beside[2]]
        if s.is_ours:
            assert beside[1].info["method"] == method
            assert beside[1].info["recomputed_tokens"] == alone.info["recomputed_tokens"] > 0
            assert beside[1].logprobs == pytest.approx(alone.logprobs, abs=1e-4), method
    s.replies = replies


@contextlib.contextmanager
def encoded(s: Session) -> Iterator[list[int]]:
    """Numbers of images that the encoder is given meanwhile, one for each of its runs; none is there already."""
    from sglang.srt.managers import mm_schedule

    mm_schedule.embedding_cache.clear()
    model = s.local.scheduler.tp_worker.model_runner.model
    runs: list[int] = []

    def count(items: Any) -> Any:
        runs.append(len(items))
        return type(model).get_image_feature(model, items)

    model.get_image_feature = count
    try:
        yield runs
    finally:
        del model.get_image_feature


def case_images_reused_in_full(s: Session) -> None:
    """In a model of one layer no key depends on what stands in front, so what was moved rightly equals stock's."""
    a, b, c = s.chunks(40, 33, 51)
    cat, dog = (a[:20], Image(1, 8), a[20:]), (Image(2, 8), b)
    send(s, begin(s).mark(*cat).put(s.tokens(20)), begin(s).put(Image(6, 8)).mark(*dog).mark(c).put(s.tokens(20)))
    moved = begin(s).put(s.tokens(5), Image(3)).mark(c).mark(*dog).put(s.tokens(4)).mark(*cat).put(s.tokens(20))
    for ratio in (0.0, 0.15):
        with encoded(s) as runs:
            (reply,) = send(s, moved, ratio=ratio, options={"explain": True})
        assert not s.is_ours or sum(runs) == 1, "the image in front is new, and the chunks are not encoded"
        assert_reused(reply, "hit", "hit", "hit")


def case_images_from_disk(s: Session) -> None:
    """As before, of chunks that were written down."""
    a, b = s.chunks(40, 33)
    cat, dog = (a[:20], Image(1, 8), a[20:]), (Image(2, 8), b)
    send(s, begin(s).mark(*cat).put(s.tokens(20)), begin(s).put(Image(6, 8)).mark(*dog).put(s.tokens(20)))
    if s.is_ours:
        only_on_disk(s)
    moved = begin(s).put(s.tokens(5)).mark(*dog).put(s.tokens(4)).mark(*cat).put(s.tokens(40))
    with encoded(s) as runs:
        (reply,) = send(s, moved, ratio=0.0)
    if s.is_ours:
        assert runs == []
        assert [chunk["tier"] for chunk in reply.info["chunks"]] == ["disk", "disk"]


def case_images_packed_whole(s: Session) -> None:
    """Decoding goes on at the right positions where the prompt was packed into slots of its own, whole or in part."""
    whole = kept_cases.Session(s.local, is_ours=s.is_ours)
    a, b = s.chunks(40, 33)
    for lead in (0, 4, 9):
        prompt = begin(s).put(s.tokens(lead)).mark(a, Image(1, 8)).mark(Image(2), b).put(s.tokens(40))
        (reply,) = send(s, prompt, options={"keep_tokens": len(prompt.ids)})
        assert not s.is_ours or whole.num_packed == 1, reply.info
        whole.num_packed = 0
    if s.is_ours:
        whole.drop()
        for keep in (75, 100, 120):
            with decoded_positions(s) as found:
                s.local.generate([request(s, prompt, options={"keep_tokens": keep})])
            first = int(prompt.positions.max()) + 1
            assert found == [[first + i] * 3 for i in range(5)], keep


@contextlib.contextmanager
def decoded_positions(s: Session) -> Iterator[list[list[int]]]:
    """The three coordinates of each token of one answer that the model is given meanwhile."""
    model = s.local.scheduler.tp_worker.model_runner.model
    found: list[list[int]] = []

    def forward(ids: Any, positions: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        if batch.forward_mode.is_decode():
            found.append(batch.mrope_positions[:, 0].tolist())
        return type(model).forward(model, ids, positions, batch, *args, **kwargs)

    model.forward = forward
    try:
        yield found
    finally:
        del model.forward


def case_images_at_a_low_ratio(s: Session) -> None:
    """No row of an image is computed again, methods that choose in the forward are stood in for, the reply says so."""
    if not s.is_ours:
        return
    a, b = s.chunks(40, 33)
    cat, dog = (a[:20], Image(1, 8), a[20:]), (b, Image(2))
    send(s, begin(s).mark(*cat).put(s.tokens(20)), begin(s).mark(*dog).put(s.tokens(20)))
    for method in ("near-words", "epic", "random", "cacheblend", "question-drift", "cache-craft"):
        prompt = begin(s).put(s.tokens(5)).mark(*dog).mark(*cat).put(s.tokens(9))
        options = {"method": method, "explain": True}
        with encoded(s) as runs:
            (reply,) = send(s, prompt, ratio=0.3, options=options)
        assert runs == [], method
        info = reply.info
        assert info["reused_image_tokens"] == 20, info
        assert [chunk["reused_image_tokens"] for chunk in info["chunks"]] == [4, 16]
        assert 0 < info["recomputed_tokens"] <= 25, info
        places = {start + i for start, image in prompt.images for i in range(image.num_tokens)}
        assert all(places.isdisjoint(chunk["recomputed_positions"]) for chunk in info["chunks"]), info
        in_forward = method in ("cacheblend", "question-drift")
        assert (info["method"], info["fallback_reason"]) == (("near", "images") if in_forward else (method, None))


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
    "chunks_behind_images": case_chunks_behind_images,
    "images_in_chunks": case_images_in_chunks,
    "chunks_end_in_images": case_chunks_end_in_images,
    "images_beside_texts": case_images_beside_texts,
    "images_beside_rows_that_leave": case_images_beside_rows_that_leave,
    "images_reused_in_full": case_images_reused_in_full,
    "images_from_disk": case_images_from_disk,
    "images_packed_whole": case_images_packed_whole,
    "images_at_a_low_ratio": case_images_at_a_low_ratio,
    "positions_that_observers_see": case_positions_that_observers_see,
}
