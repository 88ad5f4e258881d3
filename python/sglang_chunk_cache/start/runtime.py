"""ChunkRuntime: the parts of the chunk cache in one scheduler process, put together once."""

from __future__ import annotations

import atexit
import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.runtime_context import get_parallel, get_serving, get_spec

from chunk_cache.events.event_log import POOL
from chunk_cache.index.quota import Shares
from chunk_cache.index.refresh import RefreshQueue
from chunk_cache.index.transition_store import TransitionStore
from chunk_cache.index.variant import SHOWN_ID_SECRET, NodeHome
from chunk_cache.manager import ChunkManager
from chunk_cache.methods import METHODS, Stage
from chunk_cache.options.config import Config, describe
from chunk_cache.plan.question_words import QuestionWords
from chunk_cache.prompt.discover import Discoverer
from sglang_chunk_cache.admin.journal import Journal
from sglang_chunk_cache.admin.scheduler_side import ChunkAdmin
from sglang_chunk_cache.flags.server_args import ChunkCacheArgs, instance_of, refuse
from sglang_chunk_cache.flags.step_limits import most_unknown_rows, step_len
from sglang_chunk_cache.forward.forward import TargetForwards
from sglang_chunk_cache.forward.forward_clock import ForwardClock
from sglang_chunk_cache.forward.kernels import choose_kernel
from sglang_chunk_cache.forward.runs import WORTHWHILE_LEN
from sglang_chunk_cache.kv.assembler import KVAssembler
from sglang_chunk_cache.kv.keeper import ChunkKeeper
from sglang_chunk_cache.kv.model_layers import ModelLayers, describe_model
from sglang_chunk_cache.kv.packer import KVPacker
from sglang_chunk_cache.kv.partial_load import PartialLoads
from sglang_chunk_cache.kv.pool import ChunkPool
from sglang_chunk_cache.kv.ranks import ReduceMax, max_over_ranks, of_one_rank, ranks_of_batch
from sglang_chunk_cache.kv.state_layers import StateLayers, find_state_layers
from sglang_chunk_cache.kv.store import VariantStore
from sglang_chunk_cache.kv.stored_variant import TierError
from sglang_chunk_cache.request.chunk_request import ChunkRequest
from sglang_chunk_cache.request.reply import whole_reason
from sglang_chunk_cache.start.model_refusals import REUSES_IMAGES
from sglang_chunk_cache.start.pool_check import check_pool, check_scales
from sglang_chunk_cache.start.window_check import check_windows
from sglang_chunk_cache.telemetry.chunk_metrics import ChunkMetrics
from sglang_chunk_cache.telemetry.event_publisher import EventPublisher
from sglang_chunk_cache.telemetry.gate_metrics import GateMetrics
from sglang_chunk_cache.telemetry.tier_metrics import TierMetrics
from sglang_chunk_cache.tiers.manager import ChunkTiers
from sglang_chunk_cache.tiers.registry import open_tiers
from sglang_chunk_cache.verification.gate import Gate
from sglang_chunk_cache.verification.state_file import StateFile

if TYPE_CHECKING:
    from sglang.srt.mem_cache.registry import TreeCacheBuildContext


logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class ChunkRuntime:
    """The parts, each the only one of its process.

    Attributes:
        reuses_images: whether chunks are reused in prompts with images; else these are computed exactly.
        layers: of the model.
        manager: decides.
        store, assembler, pool, keeper, packer: find, move, bring in, keep and pack KV.
        gate: verifies replies; None = nobody does.
        tiers, partial_loads: tiers below the KV pool, and their loads that arrive by layers; None = there are none.
        events: publishes which chunks are held; None = nobody does, or another rank.
        clock: times forwards: of all batches where there are tiers, else of those with marked requests.
        kernel: backend of our kernels.
        states: layers of the model that keep states; None = it has none.
        min_run_len: mean length of runs of rows from which SGLang's own attention backend serves them; None = never.
        statistics_layers: layers of the model at which statistics are taken.
        target_forwards: tells the draft model which rows the target's forward added.
    """

    reuses_images: bool
    layers: ModelLayers
    manager: ChunkManager
    store: VariantStore
    assembler: KVAssembler
    pool: ChunkPool
    keeper: ChunkKeeper
    packer: KVPacker
    refresh: RefreshQueue
    gate: Gate | None
    discoverer: Discoverer | None
    tiers: ChunkTiers | None
    partial_loads: PartialLoads | None
    events: EventPublisher | None
    admin: ChunkAdmin
    metrics: ChunkMetrics
    clock: ForwardClock
    kernel: str
    states: StateLayers | None
    min_run_len: int | None
    statistics_layers: tuple[int, ...]
    target_forwards: TargetForwards

    def note_ended(self, rid: str, state: ChunkRequest) -> None:
        """Notes in journal and metrics what became of a request, if it was ever admitted."""
        if state.reported is None:
            return
        plan = state.reported.plan
        saved_s = self.clock.cost.saved_s(plan.num_saved, plan.prompt_len)
        self.admin.journal.note(rid, state.prompt.partition.name, state, state.reported, saved_s)
        if saved_s is not None:
            self.metrics.observe("saved", saved_s)
        if (reason := whole_reason(state, has_ended=True)) is not None:
            self.metrics.add("not_packed", reason)

    def forget_weights(self) -> None:
        """Drops all chunks and measurements of the old weights, after the model got others.

        SGLang decides whether to keep or flush the exact prefixes in the tree. Running requests keep what they have.
        """
        if self.tiers is not None:
            self.tiers.disable("the weights were changed; start the server anew to have them again.")
        if self.gate is not None:
            self.gate.forget()
        if self.partial_loads is not None:
            self.partial_loads.give_way()
        index = self.manager.index
        nodes = [one.holder for one in index if isinstance(one.holder, NodeHome)]
        index.clear("weights_changed")
        if self.store.transitions is not None:
            self.store.transitions.clear()
        self.admin.after_forgetting()
        for node in nodes:
            self.store.remove_node(node)
        self.refresh.clear()
        self.keeper.distrust()

    def check_integrity(self) -> None:
        """Recomputes index and pins from scratch.

        Raises:
            AssertionError: they contradict themselves or the tree, or a request that is gone left something behind.
        """
        self.manager.check_integrity()
        self.store.check_integrity(self.manager.index)
        self.admin.pins.check_integrity()
        if self.gate is not None:
            self.gate.queue.check_integrity()


def runtime_of(tree_cache: Any) -> ChunkRuntime | None:
    """The parts that belong to a radix cache; None where it is not ours."""
    return getattr(tree_cache, "chunks", None)


def known_runtime_of(tree_cache: Any) -> ChunkRuntime:
    """The parts that belong to a radix cache of ours."""
    chunks = runtime_of(tree_cache)
    assert chunks is not None, "what asks is used where the chunk cache is on"
    return chunks


def create_runtime(cache: Any, args: ChunkCacheArgs, ctx: TreeCacheBuildContext) -> ChunkRuntime:
    """Puts the parts of a radix cache together.

    Raises:
        StartRefused: the KV pool, the model's rotation or windows are not supported, a kernel that was asked for is
            wrong here, or a tier cannot be opened.
    """
    config = args.parsed_config
    model_runner = ctx.tp_worker.model_runner
    allocator = cache.token_to_kv_pool_allocator
    backends = (model_runner.prefill_attention_backend_str, model_runner.decode_attention_backend_str)
    check_pool(allocator.get_kvcache(), backends)
    layers = describe_model(model_runner.model, model_runner.model_config.context_len)
    check_scales(allocator.get_kvcache(), layers.attentions, backends)
    check_windows(model_runner.sliding_window_size, layers.windows, backends)
    kernel = choose_kernel(config.kernel, model_runner, allocator.get_kvcache(), layers)
    assembler = KVAssembler(model_runner, allocator.get_kvcache(), layers.rotaries, kernel)
    store = VariantStore(cache, Shares(allocator.size, config.partition_share))
    states = find_state_layers(model_runner, config.seam_len)
    manager = ChunkManager(
        config,
        store,
        method=args.method,
        ratio=args.ratio,
        page_size=cache.page_size,
        capacity=allocator.size,
        max_unknown_rows=most_unknown_rows(),
        step_len=step_len(),
        words=QuestionWords.of(ctx.tp_worker.tokenizer, model_runner.model_config.vocab_size),
        has_states=states is not None,
    )
    if states is not None:
        store.transitions = TransitionStore(
            config.state_bytes,
            is_known=lambda variant_id: manager.index.get(variant_id) is not None,
            note_change=store.note_change,
        )
    refresh = RefreshQueue(manager.index, config.refresh_uses)
    ranks = ranks_of_batch()
    rank, num_ranks = ranks.rank_in_group, ranks.world_size
    if num_ranks > 1:
        SHOWN_ID_SECRET[:] = ranks.all_gather_object(bytes(SHOWN_ID_SECRET))[0]
    is_counting = bool(cache._enable_metrics_flag) and rank == 0
    metrics = ChunkMetrics(enabled=is_counting)
    reduce_max = max_over_ranks(ranks.cpu_group) if num_ranks > 1 else of_one_rank
    partial_loads = None
    if config.tiers is not None:
        timeout_s = config.tiers.timeout_s
        partial_loads = PartialLoads(manager.index, store, assembler, timeout_s=timeout_s, reduce_max=reduce_max)
    pool = ChunkPool(cache, manager, store, assembler, partial_loads)
    tiers, clock = None, ForwardClock(torch.device(allocator.get_kvcache().device))
    if config.tiers is not None:
        try:
            layout = None if states is None else states.layout
            fingerprint = assembler.fingerprint(ctx.server_args, rank, num_ranks, layout)
            for name in ("trust", "system_prompts"):
                if (value := getattr(config, name)) != "any":  # a server that says "any" may write to the same place
                    fingerprint = replace(fingerprint, settings=(*fingerprint.settings, (name, value)))
            tiers = ChunkTiers(
                config.tiers,
                open_tiers(config, fingerprint, get_parallel().num_dp_ranks),
                pool=pool,
                metrics=TierMetrics(enabled=is_counting),
                fingerprint=fingerprint,
                # A question's forward reads all that comes in before any of it is computed again.
                ratio=0.0 if METHODS[args.method].stage is Stage.QUESTION else args.ratio,
                reduce_max=reduce_max,
                prefill_cost=clock.cost,
            )
        except (TierError, ImportError, ValueError) as error:
            refuse(f"--chunk-cache-config: tiers: {error}")
        atexit.register(tiers.close)
        if store.transitions is not None:
            store.transitions.note_leaving = partial(_save, manager, tiers)
    keeper = ChunkKeeper(
        cache,
        manager,
        store,
        pool,
        assembler,
        refresh=refresh,
        metrics=metrics,
        note_stored=None if tiers is None else tiers.note_stored,
        reduce_max=reduce_max,
    )
    events = _create_events(config, ctx, metrics) if rank == 0 else None
    if events is not None:
        manager.index.observer = events.log.observer(POOL)
        if tiers is not None:
            tiers.observe(events.log.observer)
    discoverer = Discoverer() if args.discover else None
    gate = _create_gate(args, ctx, assembler, is_counting=is_counting, reduce_max=reduce_max)
    admin = ChunkAdmin(cache, manager, store, tiers, gate, discoverer, Journal(), kernel, refresh)
    if store.transitions is not None:
        store.transitions.is_kept = admin.is_pinned
    logger.info(
        "Chunk cache: method %s, ratio %s, separator %r, kernels %s, %s",
        args.method,
        args.ratio,
        args.separator,
        kernel,
        describe(config),
    )
    return ChunkRuntime(
        reuses_images=get_spec().speculative_algorithm is None
        and not REUSES_IMAGES.isdisjoint(model_runner.model_config.hf_config.architectures),
        layers=layers,
        manager=manager,
        store=store,
        assembler=assembler,
        pool=pool,
        keeper=keeper,
        packer=KVPacker(cache, pool, keeper, assembler),
        refresh=refresh,
        gate=gate,
        discoverer=discoverer,
        tiers=tiers,
        partial_loads=partial_loads,
        events=events,
        admin=admin,
        metrics=metrics,
        clock=clock,
        kernel=kernel,
        states=states,
        min_run_len=_min_run_len(config.attention, model_runner.device),
        statistics_layers=_statistics_layers(config, [one.layer_id for one in layers.attentions]),
        target_forwards=TargetForwards(),
    )


def _save(manager: ChunkManager, tiers: ChunkTiers, variant_id: int) -> None:
    """Saves a variant to the tiers before its transition is dropped: without it the pool cannot serve the variant."""
    variant = manager.index.get(variant_id)
    if variant is not None:
        tiers.save_victims([variant], variant.length)


def _statistics_layers(config: Config, attending: Sequence[int]) -> tuple[int, ...]:
    """The layers at which statistics are taken; all are among `attending`, the layers that attend.

    Raises:
        StartRefused: a layer that was named keeps a state.
    """
    if isinstance(config.statistics_layers, str):
        return tuple(attending[i] for i in config.layers_with_statistics(len(attending)))
    for layer in config.statistics_layers:
        if layer not in attending:
            known = ", ".join(map(str, attending))
            refuse(f"--chunk-cache-config: statistics_layers: layer {layer} keeps a state; those that attend: {known}.")
    return config.statistics_layers


def _min_run_len(attention: str, device: str) -> int | None:
    if attention == "rows" or (attention == "auto" and torch.device(device).type == "cpu"):
        return None
    return 1 if attention == "runs" else WORTHWHILE_LEN


def _create_events(config: Config, ctx: TreeCacheBuildContext, metrics: ChunkMetrics) -> EventPublisher | None:
    """The publisher of a data-parallel replica, on one rank only, since all hold the same; None without `events`."""
    if config.events is None:
        return None
    instance, dp_rank = instance_of(ctx.server_args), get_parallel().dp_rank or 0
    try:
        return EventPublisher(config.events, metrics, instance=instance, dp_rank=dp_rank)
    except ValueError as error:
        refuse(f"--chunk-cache-config: events: {error}.")


def _create_gate(
    args: ChunkCacheArgs,
    ctx: TreeCacheBuildContext,
    assembler: KVAssembler,
    *,
    is_counting: bool,
    reduce_max: ReduceMax,
) -> Gate | None:
    config = args.parsed_config
    if not config.verify_share:
        return None
    file = None
    if config.verify_file is not None:
        # Rank 0's fingerprint, since all ranks read the same file; it differs with the number of ranks.
        model = assembler.fingerprint(ctx.server_args, 0, ctx.tp_size).digest
        file = StateFile(config.verify_file, model, is_writer=ctx.tp_rank == 0)
    metrics = GateMetrics(enabled=is_counting, model=get_serving().served_model_name)
    try:
        gate = Gate(config.verify_share, args.parsed_target, metrics, reduce_max=reduce_max, state_file=file)
    except ValueError as error:
        refuse(f"--chunk-cache-config: verify_file: {error}; delete it, or name another.")
    atexit.register(gate.save)
    return gate
