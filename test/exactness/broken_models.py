"""Models with one wrong layer, and a start of a server that meets them.

Verbs: `start` (in a process of its own; a sentence, or how long the check took), `start_ranks` (of all ranks).
"""

from __future__ import annotations

import copy
import functools
import gc
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from chunk_cache_tools.own_server import free_port
from exactness.runner import TEST_DIR, _context

LAYER = 2
"""The one that is broken."""


def _rope(model: Any) -> tuple[Any, Any]:
    """Attention of the layer, and a rotary embedding that is its own from now on."""
    attention = model.model.layers[LAYER].self_attn
    attention.rotary_emb = copy.deepcopy(attention.rotary_emb)
    return attention, attention.rotary_emb


def another_base(model: Any) -> None:
    """The table of cosines is that of another base than the module says."""
    _, rope = _rope(model)
    told, rope.base = rope.base, rope.base / 2
    rope.cos_sin_cache = rope._compute_cos_sin_cache().to(rope.cos_sin_cache)
    rope.base = told


def another_base_and_says_so(model: Any) -> None:
    """Not broken: a layer with a rotation of its own."""
    _, rope = _rope(model)
    rope.base /= 2
    rope.cos_sin_cache = rope._compute_cos_sin_cache().to(rope.cos_sin_cache)


def interleaved(model: Any) -> None:
    """Pairs are neighbours, and the module says halves."""
    _, rope = _rope(model)
    other = copy.deepcopy(rope)
    other.is_neox_style = not rope.is_neox_style
    rope.forward = lambda *args, **kwargs: other.forward_native(*args, **kwargs)


def interleaved_on_one_rank(model: Any) -> None:
    """One of two tensor-parallel ranks has the layer of `interleaved`."""
    from sglang.srt.runtime_context import get_parallel

    if get_parallel().tp_rank == 1:
        interleaved(model)


def scaling_dropped(model: Any) -> None:
    """The table is that of the unscaled frequencies."""
    _, rope = _rope(model)
    scaled = rope._compute_inv_freq
    rope._compute_inv_freq = lambda base: type(rope).__mro__[1]._compute_inv_freq(rope, base)
    rope.cos_sin_cache = rope._compute_cos_sin_cache().to(rope.cos_sin_cache)
    rope._compute_inv_freq = scaled


def undeclared_window(model: Any) -> None:
    """SGLang's backend shows the layer 8 positions, and the layer does not say so."""
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

    stock = TorchNativeAttnBackend.forward_extend

    def forward_extend(self: Any, q: Any, k: Any, v: Any, layer: Any, *args: Any, **kwargs: Any) -> Any:
        seen = layer
        if layer.layer_id == LAYER:
            seen = copy.copy(layer)
            seen.sliding_window_size = 8
        return stock(self, q, k, v, seen, *args, **kwargs)

    TorchNativeAttnBackend.forward_extend = forward_extend


def score_mod(model: Any) -> None:
    """The layer hands its attention something that SGLang's backend takes and our kernels do not know."""
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

    stock = TorchNativeAttnBackend.forward_extend
    TorchNativeAttnBackend.forward_extend = lambda *args, score_mod=None, **kwargs: stock(*args, **kwargs)
    attention = model.model.layers[LAYER].self_attn.attn
    attention.forward = functools.partial(attention.forward, score_mod=torch.neg)


def early_embeddings(model: Any) -> None:
    """Not broken: the decoder is given the embeddings of all rows, which are not its own."""
    stock = model.forward

    def forward(input_ids: Any, positions: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        embeddings = model.model.embed_tokens(input_ids) * 1.5
        return stock(input_ids, positions, batch, *args, **{**kwargs, "input_embeds": embeddings})

    model.forward = forward


def rows_of_the_decoder(model: Any) -> None:
    """The decoder is given something of every row that is not known here, as that of Gemma 3n is."""
    from sglang_chunk_cache.forward.selection import executor

    executor._IMAGE_FEATURES = ""

    def give(_: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        embeddings = kwargs["input_embeds"]
        return args, {**kwargs, "input_deepstack_embeds": torch.zeros_like(embeddings).repeat(1, 2)}

    model.model.register_forward_pre_hook(give, with_kwargs=True)


def positions_of_the_batch(model: Any) -> None:
    """Not broken: the model is given the tensor that the batch has, and no copy of it in a buffer of SGLang's."""
    from sglang.srt.model_executor.runner.eager_runner import EagerRunner

    EagerRunner.load_batch = lambda self, batch, *args: batch


def positions_that_are_shared(model: Any) -> None:
    """Ours is broken: a model that adds to its positions adds to those by which rows are masked."""
    from sglang_chunk_cache.start import model_check

    positions_of_the_batch(model)
    model_check.stand_at = lambda batch, positions: setattr(batch, "positions", positions)


def columns_of_the_lengths(model: Any) -> None:
    """Ours is broken: the coordinates of multimodal rope are those that SGLang counts from lengths."""
    from sglang_chunk_cache.start import model_check

    stock = model_check.stand_at

    def stand_at(batch: Any, positions: Any) -> None:
        columns = batch.mrope_positions
        stock(batch, positions)
        batch.mrope_positions = columns

    model_check.stand_at = stand_at


def columns_that_stay(model: Any) -> None:
    """Ours is broken: where rows leave, the coordinates of multimodal rope are still those of all rows."""
    from sglang_chunk_cache.forward.selection import executor
    from sglang_chunk_cache.kv import model_layers

    stock = model_layers.cut_rows

    def cut_rows(value: Any, index: Any, num_rows: int) -> Any:
        stays = getattr(value, "ndim", 0) == 2 and len(value) == 3
        return value if stays else stock(value, index, num_rows)

    model_layers.cut_rows = executor.cut_rows = cut_rows  # it calls itself by the name in its module


def without_sinks(model: Any) -> None:
    """Ours is broken: our kernel leaves out the sinks that the layers hand over."""
    from sglang_chunk_cache.forward.rows import FusedRows

    attend = FusedRows._attend_own
    FusedRows._attend_own = lambda self, q, layer, sinks: attend(self, q, layer, None)


def as_it_is(model: Any) -> None:
    """Not broken."""


def start(
    model_dir: Path, break_model: Callable[[Any], None] = as_it_is, config: dict[str, Any] | None = None, **flags: Any
) -> str | float:
    """The sentence of a start that is refused; else seconds that the check took."""
    (found,) = start_ranks(1, model_dir, break_model, config, **flags)
    return found


def start_ranks(
    tp_size: int,
    model_dir: Path,
    break_model: Callable[[Any], None],
    config: dict[str, Any] | None = None,
    within_s: float = 600,
    **flags: Any,
) -> list[str | float]:
    """What `start` returns, of each tensor-parallel rank."""
    port, receivers, processes = free_port(), [], []
    for rank in range(tp_size):
        receiver, sender = _context.Pipe(duplex=False)
        place = {"tp_rank": rank, "nccl_port": port, "tp_size": tp_size}
        process = _context.Process(target=_child, args=(sender, model_dir, break_model, config or {}, flags | place))
        process.start()
        sender.close()
        receivers.append(receiver)
        processes.append(process)
    try:
        return [one.recv() if one.poll(within_s) else f"no answer within {within_s} s" for one in receivers]
    finally:
        for process in processes:
            process.kill()


def _child(
    sender: Any, model_dir: Path, break_model: Callable[[Any], None], config: dict[str, Any], flags: dict[str, Any]
) -> None:
    gc.freeze()
    sys.path.insert(0, str(TEST_DIR))
    import time

    from local_scheduler import LocalScheduler

    torch.set_num_threads(2)
    try:
        from sglang_chunk_cache.flags.server_args import StartRefused
        from sglang_chunk_cache.start import runtime

        describe = runtime.describe_model

        def describe_broken(model: Any, context_len: int) -> Any:
            break_model(model)
            return describe(model, context_len)

        runtime.describe_model = describe_broken
        try:
            local = LocalScheduler(model_dir, chunk_cache={"config": config}, **flags)
        except StartRefused as refused:
            sender.send(str(refused.code))
            return
        from sglang_chunk_cache.start.model_check import check_loaded_model

        began = time.perf_counter()
        check_loaded_model(local.scheduler, local.cache.chunks)
        assert local.num_used_slots() == 0, "the check gave its slots back"
        sender.send(time.perf_counter() - began)
    except BaseException:
        sender.send(traceback.format_exc())
        raise
    finally:
        sender.close()
        os._exit(0)
