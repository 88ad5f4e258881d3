"""What a request carries once it is prepared: our options, its text and the texts of its chunks."""

from __future__ import annotations

from typing import Any

from chunk_cache.options.request_options import loads


def carried(request: Any) -> Any:
    """The options, as the JSON string that travels; None where there are none."""
    return (request.sampling_params.custom_params or {}).get("chunk_cache")


def text_of(service, request) -> str:
    return service.manager.tokenizer.decode(list(request.input_ids))


def chunks_of(service, request) -> list[str]:
    if carried(request) is None:
        return []
    ids = list(request.input_ids)
    return [service.manager.tokenizer.decode(ids[start:end]).strip() for start, end in loads(carried(request)).spans]
