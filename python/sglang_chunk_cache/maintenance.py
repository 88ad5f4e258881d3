"""Maintenance: makes popular variants cheaper to keep, or exact, without a request waiting for it.

Verbs: `Maintenance.promote` (a popular variant at the end of a cold path becomes a node of its own, so that the path
can go), `Maintenance.note_derived` (what to compute again, and from which prompt), `Maintenance.next_refresh` and
`on_idle` (a popular derived variant is computed exactly, in its own context, while the server has nothing to do).

Promises: a promotion copies KV bit by bit at the position that it was computed at, or does nothing where there is no
room. A refresh is an ordinary request of mode exact that nobody reads; it starts only when the scheduler is idle, one
at a time, and never for chunks of a LoRA adapter. What is chosen depends on the index alone, so all tensor-parallel
ranks choose alike.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.constants import HEALTH_CHECK_RID_PREFIX
from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
from sglang.srt.sampling.sampling_params import SamplingParams

from chunk_cache.index import ChunkIndex
from chunk_cache.keys import Partition
from chunk_cache.request_options import RequestOptions, dumps
from chunk_cache.types import Span
from chunk_cache.variant import PathTokens, Variant
from sglang_chunk_cache.request_state import PARAM_NAME, DocChunkRequest

if TYPE_CHECKING:
    from array import array

    from sglang.srt.managers.schedule_batch import Req

    from chunk_cache.config import Config
    from sglang_chunk_cache.kv.assembler import KVAssembler
    from sglang_chunk_cache.kv.store import VariantStore
    from sglang_chunk_cache.metrics import ChunkMetrics

logger = logging.getLogger(__name__)

# SGLang drops replies of such names that nobody waits for; it does so for its own health checks.
_RID = f"{HEALTH_CHECK_RID_PREFIX}_chunk_cache_refresh_"

MAX_NOTED = 256
"""Derived variants whose prompts are kept (8 bytes per token), the newest."""


@dataclass(frozen=True)
class _Origin:
    """How a derived variant can be computed exactly: the prompt up to its end."""

    token_ids: array[int]
    spans: tuple[Span, ...]
    partition: Partition


class Maintenance:
    """See the head of this file.

    Args:
        allocate: `(num_tokens, sources)` -> slots in whole pages, or None where there is no room.
    """

    def __init__(
        self,
        config: Config,
        index: ChunkIndex,
        store: VariantStore,
        assembler: KVAssembler,
        metrics: ChunkMetrics,
        allocate: Callable[[int, Sequence[Variant]], torch.Tensor | None],
    ) -> None:
        self._config = config
        self._index = index
        self._store = store
        self._assembler = assembler
        self._metrics = metrics
        self._allocate = allocate
        self._origins: OrderedDict[int, _Origin] = OrderedDict()
        self._num_refreshed = 0

    def promote(self, variant: Variant, priority: int) -> bool:
        """Gives the variant a node of its own if it is popular, its path is not, and there is room.

        Args:
            priority: eviction priority of the node.
        """
        if not self._index.is_worth_promoting(variant, self._config.promote_uses):
            return False
        if self._store.resolve(variant) < variant.length:
            return False
        path = variant.holder
        assert isinstance(path, PathTokens)
        slots = self._allocate(variant.length, [variant])
        if slots is None:
            return False
        source = self._store.slots(variant, 0, variant.length)
        self._assembler.copy(source, slots[: variant.length], torch.zeros_like(source))
        self._index.move(variant, self._store.insert_node(path.partition, variant.token_ids, slots, priority))
        self._metrics.count_maintenance("promoted")
        return True

    def note_derived(self, variant: Variant, req: Req, chunk: int, state: DocChunkRequest) -> None:
        """Remembers how the variant of chunk number `chunk` of this prompt can be computed exactly.

        Not where a LoRA adapter computed it: the adapter may be gone when the server is idle, and no client's request
        holds it then.
        """
        if not self._config.refresh_uses or req.lora_id is not None:
            return
        spans = state.options.spans[: chunk + 1]
        self._origins[variant.variant_id] = _Origin(req.origin_input_ids[: spans[-1][1]], spans, state.partition)
        while len(self._origins) > MAX_NOTED:
            self._origins.popitem(last=False)

    @property
    def has_noted(self) -> bool:
        """Whether anything may be computed again."""
        return bool(self._origins)

    def next_refresh(self) -> TokenizedGenerateReqInput | None:
        """The request that computes the most popular derived variant exactly; None where none is popular enough."""
        best: Variant | None = None
        for variant_id in list(self._origins):
            variant = self._index.get(variant_id)
            if variant is None:
                del self._origins[variant_id]
            elif variant.num_uses >= self._config.refresh_uses and (
                best is None or variant.reuse_frequency > best.reuse_frequency
            ):
                best = variant
        if best is None:
            return None
        origin = self._origins.pop(best.variant_id)
        self._num_refreshed += 1
        self._metrics.count_maintenance("refreshed")
        logger.info("Chunk cache: idle, a derived variant of %d uses is computed exactly", best.num_uses)
        return _exact_request(f"{_RID}{self._num_refreshed}", origin)

    def clear(self) -> None:
        """The cache was flushed."""
        self._origins.clear()


def is_refresh(rid: str) -> bool:
    """Whether a request is the server's own."""
    return rid.startswith(_RID)


def on_idle(_result: None, scheduler: Any) -> None:
    """AFTER `Scheduler.on_idle`."""
    maintenance: Maintenance | None = getattr(scheduler.tree_cache, "maintenance", None)
    if maintenance is None or not maintenance.has_noted or not scheduler.is_fully_idle():
        return
    request = maintenance.next_refresh()
    if request is not None:
        scheduler.handle_generate_request(request)


def _exact_request(rid: str, origin: _Origin) -> TokenizedGenerateReqInput:
    options = dumps(RequestOptions(spans=origin.spans, mode="exact"))
    sampling = SamplingParams(max_new_tokens=1, temperature=0.0, custom_params={PARAM_NAME: options})
    sampling.normalize(None)
    return TokenizedGenerateReqInput(
        rid=rid,
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
    )
