"""Bad `/generate` bodies, refused before the answer starts.

Verb: `generate_contract_error`. A stream has sent its status 200 before the request itself is looked at, so whatever
can be wrong with marks and options is looked for here, on the parsed JSON.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from chunk_cache.errors import ChunkCacheRequestError
from sglang_chunk_cache import server_args as options
from sglang_chunk_cache.api.marks import MarkedText
from sglang_chunk_cache.api.prepare import Item, check_length, parse_items
from sglang_chunk_cache.server_args import ChunkCacheArgs


def top_level_error(body: Any, remedy: str = "sampling_params.custom_params.chunk_cache") -> str | None:
    """The message for a `chunk_cache` field at the top of a body, or None."""
    if isinstance(body, Mapping) and "chunk_cache" in body:
        return f"chunk_cache: unknown field at the top of the request; put it into {remedy}"
    return None


def body_error(body: Any, args: ChunkCacheArgs, tokenizer: Any) -> str | None:
    """What is wrong with the marks and options of a `/generate` body, or None.

    Args:
        body: the parsed JSON.
        args: the options of the server.
        tokenizer: the tokenizer, or None with `--skip-tokenizer-init`.
    """
    if not isinstance(body, Mapping):
        return None
    try:
        items = parse_items(body.get("text"), body.get("input_ids"), body.get("sampling_params"), args)
        for item in items:
            _check_tokens(item, args, tokenizer)
    except ChunkCacheRequestError as error:
        return str(error)
    return None


def _check_tokens(item: Item, args: ChunkCacheArgs, tokenizer: Any) -> None:
    if item.text is None:
        return
    if tokenizer is None:
        _refuse_text(item.marked, item)
    elif item.needs_length:
        check_length(item, len(tokenizer.encode(item.text)), args)


def _refuse_text(marked: MarkedText | None, item: Item) -> None:
    if marked is not None or item.needs_length:
        raise ChunkCacheRequestError(
            f"{item.path}: the server runs with --skip-tokenizer-init and cannot split text; send input_ids and "
            f"{item.opts_path}.spans"
        )


def generate_contract_error(original: Callable[[Any], str | None], body: Any) -> str | None:
    """AROUND `api_contract.generate_contract_error`."""
    from sglang.srt.entrypoints.http_server import get_global_state

    error = top_level_error(body) or original(body)
    args = options.get_args()
    if error is not None or args is None:
        return error
    return body_error(body, args, get_global_state().tokenizer_manager.tokenizer)
