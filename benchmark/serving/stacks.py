"""Stacks: says to which stage a sample of a profiler belongs: `stage_of`.

The innermost frame that matches a rule decides the stage, so a stage includes what it calls, and a file of no rule
belongs to its caller. The rules name frames of SGLang's scheduler and HTTP processes, with our code inside them, by
their files from the package on, so a new version of SGLang may show up as time in `other`. They have no stages of the
model's forward, which `benchmark/host` leaves out.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

OTHER, IDLE = "other", "waiting"
# (stage, pattern of a frame), tried from the innermost frame outwards; the first frame that matches a pattern decides.
RULES: tuple[tuple[str, str], ...] = (
    (
        "assemble: copy and rotate stored KV",
        r"sgl_kernel_ext/(copy_rotate|rotary)|sglang_chunk_cache/kv/(assembler|layer_kv|pool)",
    ),
    ("load from tiers", r"chunk_cache/(tiers/(?!cost)|kv/(layer_stream|partial_load|stored_variant))"),
    (
        "select rows",
        r"sglang_chunk_cache/(forward/(kept_chooser|row_choice|selection/)|selector/|host/selector)"
        r"|sgl_kernel_ext/(add_drift|attention_mass|kv_deviation|question_mass)",
    ),
    ("statistics", r"chunk_cache/(forward/statistics_taker|index/chunk_statistics|kv/chunk_sums)"),
    ("keys", r"\bchunk_cache/keys"),
    (
        "reply",
        r"sglang_chunk_cache/(api/replies|host/sglext|request/(reply|selection_report))"
        r"|output_streamer|RecomputePlan\._?reply",
    ),
    (
        "remember, promote",
        r"chunk_cache/(host/refresh|index/refresh|kv/(keeper|packer|packing)|retention)"
        r"|\.(checkpoint|remember_\w+|promote) \(",
    ),
    ("look up", r"\bchunk_cache/index/|sglang_chunk_cache/kv/store\b"),
    ("plan", r"\bchunk_cache/(manager|methods/|plan/)|sglang_chunk_cache/host/radix_cache"),
    ("admission", r"sglang_chunk_cache/host/(prefill_adder|schedule_batch|scheduler)"),
    (
        "parse: marks, tokens",
        r"\bchunk_cache/(options|prompt)/|sglang_chunk_cache/(api/|request/|host/(anthropic|chat|completions|generate))"
        r"|tokenizer_manager|tokenization",
    ),
    ("build the batch", r"sglang_chunk_cache/(forward/|host/(attention_backend|forward_batch|model_runner))"),
    ("attention of fused rows", r"sgl_kernel_ext/sparse_extend"),
    ("sampling", r"sampler|Sampler"),
    ("receive and send", r"recv_requests|recv_pyobj|sock_recv|sock_send|send_pyobj|io_struct"),
    ("radix tree, allocator", r"sglang/srt/mem_cache/"),
    ("scheduling", r"scheduler\.py|schedule_policy|_batch(_info)?\.py|hook_registry|event_loop"),
)
_WAITING = re.compile(r"select\.|poll\.|\bpoll \(|epoll|_wait_for|wait \(threading|sleep|_watchdog_once")
_COMPILED = tuple((stage, re.compile(pattern)) for stage, pattern in RULES)


def stage_of(frames: Iterable[str]) -> str:
    """A stage of `RULES`, `IDLE` if the innermost frame waits for something, else `OTHER`.

    Args:
        frames: `function (file:line)`, from the outermost to the innermost.
    """
    inward = list(frames)[::-1]
    if inward and _WAITING.search(inward[0]):
        return IDLE
    for frame in inward:
        for stage, pattern in _COMPILED:
            if pattern.search(frame):
                return stage
    return OTHER
