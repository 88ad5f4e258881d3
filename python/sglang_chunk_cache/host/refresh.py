"""The request that computes a derived variant exactly while the server has nothing else to do.

It is an ordinary request of mode exact that nobody reads.
"""

from __future__ import annotations

from typing import Any

from sglang.srt.constants import HEALTH_CHECK_RID_PREFIX
from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
from sglang.srt.sampling.sampling_params import SamplingParams

from chunk_cache.index.refresh import Origin
from chunk_cache.options.request_options import RequestOptions, dumps
from sglang_chunk_cache.request.chunk_request import PARAM_NAME

# SGLang drops unread replies to ids with this prefix, as for its own health checks.
_RID = f"{HEALTH_CHECK_RID_PREFIX}_chunk_cache_refresh_"


def is_refresh(rid: str) -> bool:
    """Whether a request is the server's own."""
    return rid.startswith(_RID)


def refresh_request(number: int, origin: Origin, **fields: Any) -> TokenizedGenerateReqInput:
    """The request that computes the prompt `origin`; `number` makes its id unique, `fields` are further fields."""
    options = dumps(RequestOptions(spans=origin.spans, mode="exact"))
    sampling = SamplingParams(max_new_tokens=1, temperature=0.0, custom_params={PARAM_NAME: options})
    sampling.normalize(None)
    return TokenizedGenerateReqInput(
        rid=f"{_RID}{number}",
        input_text=None,
        # One token more than the last chunk: a prompt's last token never enters the tree before it is answered.
        input_ids=origin.token_ids + origin.token_ids[-1:],
        input_embeds=None,
        mm_inputs=None,
        token_type_ids=None,
        sampling_params=sampling,
        return_logprob=False,
        logprob_start_len=-1,
        top_logprobs_num=0,
        token_ids_logprob=None,
        stream=False,
        extra_key=origin.partition.extra_key,
        cache_salt=origin.partition.cache_salt,
        **fields,
    )
