"""The reply: one JSON object per request, `meta_info["chunk_cache"]`.

The scheduler sets `req.customized_info["chunk_cache"] = [json_text]`, a list with one JSON string. It is sent once:
with the first output of a stream, with the last output otherwise. Here it is decoded, and kept in every later output
of a stream.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

from sglang_chunk_cache.api.prepare import KEY

_REPLY = "chunk_cache_reply"


def update_request_meta_info(
    original: Callable[..., None],
    manager: Any,
    meta_info: dict[str, Any],
    state: Any,
    customized_info: Mapping[str, list[list[Any]]],
    index: int,
    finish_reason: Any,
) -> None:
    """AROUND `TokenizerManager.update_request_meta_info`.

    Upstream joins the values of all outputs to one list; ours is one object.
    """
    others = {key: values for key, values in customized_info.items() if key != KEY}
    if others:
        original(manager, meta_info, state, others, index, finish_reason)
    values = customized_info.get(KEY)
    if values is not None and values[index]:
        setattr(state, _REPLY, json.loads(values[index][-1]))
    add_reply(meta_info, state)


def add_reply(meta_info: dict[str, Any], state: Any) -> None:
    """Puts the reply of a request, once it is known, into an output."""
    reply = getattr(state, _REPLY, None)
    if reply is not None:
        meta_info[KEY] = reply


def has_options(obj: Any) -> bool:
    """Whether a prepared single request has marks or options, and so gets a reply."""
    params = getattr(obj, "sampling_params", None)
    custom_params = params.get("custom_params") if isinstance(params, Mapping) else None
    return isinstance(custom_params, Mapping) and KEY in custom_params


def stream_one_response(
    original: Callable[..., AsyncIterator[Any]], manager: Any, obj: Any, state: Any, request: Any = None
) -> AsyncIterator[Any]:
    """AROUND `TokenizerManager._stream_one_response`."""
    generator = original(manager, obj=obj, state=state, request=request)
    return _with_reply(generator, state) if has_options(obj) else generator


async def _with_reply(generator: AsyncIterator[Any], state: Any) -> AsyncIterator[Any]:
    async for out in generator:
        if isinstance(out, dict) and "meta_info" in out:
            add_reply(out["meta_info"], state)
        yield out
