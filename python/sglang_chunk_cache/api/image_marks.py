"""Chunks of a prompt with images: where they stand once the image processor has put in the tokens of each image.

Verb: `placed_beside_images`. A client, a tokenizer and a chat template give each image one token, its placeholder; the
processor replaces it by as many tokens as the encoder makes of the image.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from chunk_cache.errors import request_error
from chunk_cache.options.request_options import RequestOptions
from chunk_cache.types import Span
from sglang_chunk_cache.request.request_images import cut_image, images_of


def placed_beside_images(
    opts: RequestOptions, given: Sequence[int], ids: Sequence[int], inputs: Any, path: str
) -> RequestOptions:
    """The options of a request with its spans where they stand in `ids`.

    Prompts with other inputs than images stay as they are: the scheduler serves them exactly, and says so.

    Args:
        opts: with spans of `given`.
        given: token ids as they were marked, one placeholder for each image, or already all of its tokens.
        ids: those that the model is given.
        inputs: what the processor made of the images.
        path: JSON path of the options.

    Raises:
        ChunkCacheRequestError: a span cuts an image, or the processor has changed more than the placeholders.
    """
    images = images_of(inputs)
    if not images:
        return opts
    places: Sequence[int] = range(len(ids) + 1)
    if len(given) != len(ids):
        places = _places(given, ids, images, path)
    spans = tuple((places[start], places[end]) for start, end in opts.spans)
    for i, span in enumerate(spans):
        cut = cut_image(span, images)
        if cut is not None:
            problem = f"it cuts the image at the tokens [{cut[0]}, {cut[1]})"
            raise request_error(f"{path}.spans[{i}]", problem, "mark all of the image, or none of it")
    return opts.with_spans(spans, opts.chunk_ids)


def _places(given: Sequence[int], ids: Sequence[int], images: Sequence[Span], path: str) -> list[int]:
    """The place in `ids` of each token of `given`, and of their end: `[len(given) + 1]`."""
    places: list[int] = []
    at = 0
    for first, last in (*images, (len(ids), len(ids))):
        places += range(at, first + (last > first))
        at = last
    places.append(len(ids))
    if len(places) != len(given) + 1 or any(given[i] != ids[place] for i, place in enumerate(places[:-1])):
        problem = "the image processor of this model changes more of the prompt than the placeholders of images"
        raise request_error(f"{path}.spans", problem, "send the token ids that it makes, or no marks")
    return places
