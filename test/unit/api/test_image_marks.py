"""Marks of a prompt with images: from placeholders to the tokens that the processor puts in their places."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from chunk_cache.errors import ChunkCacheRequestError
from chunk_cache.options.request_options import RequestOptions
from sglang_chunk_cache.api.image_marks import placed_beside_images

HOLDER = 99


def inputs(*spans, **fields):
    """What a processor hands over: images at half-open spans of the prompt."""
    items = [SimpleNamespace(is_image=lambda: True, offsets=[(start, end - 1)]) for start, end in spans]
    return SimpleNamespace(**{"mm_items": items, "mrope_positions": object(), "vision_position_ids": None, **fields})


def place(spans, given, ids, images, **fields):
    opts = RequestOptions(spans=tuple(spans), chunk_ids=tuple("abc"[: len(spans)]))
    placed = placed_beside_images(opts, given, ids, inputs(*images, **fields), "chunk_cache")
    assert placed.chunk_ids == opts.chunk_ids
    return placed.spans


def test_spans_stand_where_the_tokens_of_images_have_moved_them() -> None:
    given = [1, 2, HOLDER, 3, 4, HOLDER, 5]
    ids = [1, 2, HOLDER, HOLDER, HOLDER, 3, 4, HOLDER, HOLDER, 5]
    images = [(2, 5), (7, 9)]
    assert place([(0, 2), (2, 3), (3, 7)], given, ids, images) == ((0, 2), (2, 5), (5, 10))
    assert place([(1, 4), (4, 6)], given, ids, images) == ((1, 6), (6, 9))
    assert place([(1, 5), (5, 9)], ids, ids, images) == ((1, 5), (5, 9))  # the client sent all tokens


@pytest.mark.parametrize("spans", [[(1, 4)], [(3, 6)], [(0, 1), (3, 4)]])
def test_a_span_that_cuts_an_image_is_refused(spans) -> None:
    ids = [1, 2, HOLDER, HOLDER, HOLDER, 3]
    message = rf"chunk_cache.spans\[{len(spans) - 1}\]: it cuts the image at the tokens \[2, 5\); mark all of the image"
    with pytest.raises(ChunkCacheRequestError, match=message):
        place(spans, ids, ids, [(2, 5)])


@pytest.mark.parametrize("given", [[1, 7, HOLDER, 3], [1, HOLDER, 3], [1, 2, HOLDER, HOLDER, 3]])
def test_a_processor_that_changes_the_text_is_no_secret(given) -> None:
    with pytest.raises(ChunkCacheRequestError, match="changes more of the prompt than the placeholders"):
        place([(0, 1)], given, [1, 2, HOLDER, HOLDER, HOLDER, 3], [(2, 5)])


@pytest.mark.parametrize("fields", [{"mrope_positions": None}, {"vision_position_ids": object()}])
def test_other_inputs_are_left_to_the_scheduler(fields) -> None:
    assert place([(0, 3)], [1, HOLDER, 3], [1, HOLDER, HOLDER, 3], [(1, 3)], **fields) == ((0, 3),)
