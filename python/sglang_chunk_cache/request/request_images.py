"""Images of one request, as SGLang's processor hands them over: where they stand, and the positions that they take.

Verbs: `images_of` (where), `image_spans` (of a request), `cut_image` (the one that a span cuts), `rope_starts_of` (the
position at which spans begin).

An image of n tokens takes fewer than n rotary positions (multimodal rope: as many as its longer side has), so what
stands behind it begins at a smaller position than its place in the prompt. Its tokens are ids that stand for its
content, and all of them have coordinates relative to the first, so its KV moves like that of a text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from chunk_cache.types import Span


def images_of(inputs: Any) -> tuple[Span, ...] | None:
    """Half-open spans of the prompt, ascending; None where chunks cannot be reused beside such inputs.

    They can if each item is one image in one place and SGLang gives its positions (Qwen-VL and its kin).

    Args:
        inputs: a `MultimodalProcessorOutput`, or the `MultimodalInputs` that the scheduler makes of it.
    """
    is_plain = getattr(inputs, "token_modalities", None) is None and inputs.vision_position_ids is None
    has_images_only = all(item.is_image() and len(item.offsets or ()) == 1 for item in inputs.mm_items)
    if inputs.mrope_positions is None or not (is_plain and has_images_only):
        return None
    return tuple(sorted((start, last + 1) for item in inputs.mm_items for start, last in item.offsets))


def image_spans(req: Any) -> tuple[Span, ...] | None:
    """`images_of` a request; None for a turn of a session, of which SGLang does not give all positions."""
    if req.multimodal_inputs is None:
        return ()
    return None if req.session is not None else images_of(req.multimodal_inputs)


def cut_image(span: Span, images: Sequence[Span]) -> Span | None:
    """The image within which a span begins or ends; None = it cuts none."""
    return next(((first, last) for first, last in images for end in span if first < end < last), None)


def rope_starts_of(req: Any, spans: Sequence[Span]) -> tuple[int, ...] | None:
    """The rotary position of the first token of each span; None = its place in the prompt, there are no images."""
    if req.multimodal_inputs is None:
        return None
    positions = req.multimodal_inputs.mrope_positions[0]
    return tuple(int(positions[start]) for start, _ in spans)
