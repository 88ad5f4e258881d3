"""Stacks: counts the samples of a profiler by stage. `read_collapsed` reads them, `shares` sorts them into stages.

The innermost frame that matches a rule decides the stage, so a stage includes what it calls. The rules name frames of
SGLang's scheduler process, with our code inside it. They contain file names, so a new version of SGLang may show up as
time in `other`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path

OTHER, IDLE, PARSE = "other", "waiting", "parse: marks, tokens"
# (stage, pattern of a frame), tried from the innermost frame outwards; the first frame that matches a pattern decides.
RULES: tuple[tuple[str, str], ...] = (
    (
        "assemble: copy and rotate stored KV",
        r"copy_rotate|KVAssembler|cache/kv/pool|\._fill \(|\brotate \(sgl_kernel_ext",
    ),
    ("load from tiers", r"sglang_chunk_cache/tiers/(?!waiting)"),
    ("select rows", r"sglang_chunk_cache/selection|kv_deviation|attention_mass"),
    ("statistics", r"chunk_cache/(kv/)?(chunk_)?statistics"),
    ("keys", r"chunk_cache/keys"),
    ("reply", r"chunk_cache/(api/)?reply|output_streamer|RecomputePlan\._?reply|\b(_report|_write_reply) \("),
    ("look up", r"chunk_cache/(index|lookup|reusability|victims|variant|paths|(kv/)?store)"),
    (
        "remember, promote",
        r"chunk_cache/(host/)?(maintenance|refresh|kv/keeper)|\.(checkpoint|_?remember|_?promote|_is_new)",
    ),
    ("plan", r"\bchunk_cache/(planner|plan|rows|methods|manager|selection)|sglang_chunk_cache/(host/)?radix_cache"),
    ("admission", r"sglang_chunk_cache/(host/prefill_adder|admission|host/scheduler|tiers/waiting)"),
    (
        PARSE,
        r"chunk_cache/(request|api|parse|marks|text|host/(generate|chat|compl|tok))|tokenizer_manager|tokenization",
    ),
    (
        "build the batch",
        r"chunk_cache/forward/batch|(init_forward_batch|\w*_rows|build|_indptr|prepare_\w+|init_new) \(\S*chunk_cache/",
    ),
    ("attention of decode", r"forward_decode"),
    ("attention of fused rows", r"sparse_extend"),
    ("attention of plain prompts", r"forward_extend|run_sdpa_forward_extend"),
    ("KV write", r"set_kv_buffer|_store_kv_layer"),
    ("linear layers", r"UnquantizedLinearMethod\.apply|LogitsProcessor|logits_processor"),
    ("norms, activations, rotary", r"RMSNorm|SiluAndMul|rotary_embedding|layer_boundary"),
    ("sampling", r"sampler|Sampler"),
    ("receive and send", r"recv_requests|recv_pyobj|sock_recv|sock_send|send_pyobj|io_struct"),
    ("radix tree, allocator", r"unified_radix_cache|rust_tree_core|mem_cache/"),
    ("scheduling", r"scheduler\.py|schedule_policy|_batch(_info)?\.py|radix_cache|hook_registry|event_loop"),
)
_WAITING = re.compile(r"select\.|poll\.|\bpoll \(|epoll|_wait_for|wait \(threading|sleep|_watchdog_once")
_COMPILED = tuple((stage, re.compile(pattern)) for stage, pattern in RULES)


def read_collapsed(path: str | Path) -> list[tuple[tuple[str, ...], int]]:
    """Reads collapsed stacks (`py-spy record -f raw`): (frames from the outermost to the innermost, samples)."""
    stacks = []
    for line in Path(path).read_text(encoding="utf-8").splitlines():
        text, _, count = line.rpartition(" ")
        if text:
            stacks.append((tuple(text.split(";")), int(count)))
    return stacks


def stage_of(frames: Iterable[str]) -> str:
    """A stage of `RULES`, `IDLE` if the innermost frame waits for something, else `OTHER`."""
    inward = list(frames)[::-1]
    if inward and _WAITING.search(inward[0]):
        return IDLE
    for frame in inward:
        for stage, pattern in _COMPILED:
            if pattern.search(frame):
                return stage
    return OTHER


def shares(stacks: Iterable[tuple[tuple[str, ...], int]], process: str) -> Mapping[str, int]:
    """Samples by stage, without waiting, of the processes with a frame that contains `process`.

    Of other processes only the stage `PARSE` counts: the process that serves HTTP parses marks and tokens.
    """
    counts: Counter[str] = Counter()
    for frames, count in stacks:
        stage = stage_of(frames)
        if stage == PARSE or (stage != IDLE and any(process in frame for frame in frames)):
            counts[stage] += count
    return counts
