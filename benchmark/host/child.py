"""One checkout, one process: `python child.py PART NUM FILE`, with the checkout on the PYTHONPATH.

PART `scheduler` runs SGLang's scheduler here, from the message to the reply, which it writes to FILE. PARTs `ids` and
`text` run what the HTTP process does for `/generate`, from the decoded body to the response, with the reply in FILE.
Prints one JSON object: CPU time of each request, and samples of where it went. Requests take turns: `plain` (no marks),
`off` (marks, mode off), `fused`; each has ten of 20 stored chunks in a new order, and in the scheduler also a new
beginning and question. Once the chunks are stored, the model's forward and the copies of KV do nothing.
"""

from __future__ import annotations

import asyncio
import copy
import functools
import importlib
import itertools
import json
import os
import pickle
import random
import signal
import sys
import time
from collections import Counter
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from benchmark.common.models import LlamaShape
from benchmark.serving.models import documents_model
from benchmark.serving.stacks import stage_of

HEAD_LEN, CHUNK_LEN, NUM_CHUNKS, NUM_STORED, QUESTION_LEN = 96, 400, 10, 20, 64
SPANS = [[HEAD_LEN + i * CHUNK_LEN, HEAD_LEN + (i + 1) * CHUNK_LEN] for i in range(NUM_CHUNKS)]
MARKS: dict[str, dict[str, Any]] = {"plain": {}, "off": {"spans": SPANS, "mode": "off"}, "fused": {"spans": SPANS}}
WARMUP = 20  # rounds that do not count
POOL_LEN, ROOM_LEN = 131072, 8192  # tokens; ROOM_LEN are freed before each request, so that eviction is not measured
STEP_S = 0.0003  # between samples
OPTIONS = {"method": "epic", "ratio": 0.15}


class Meter:
    """CPU time by kind of the first half of the requests after the warm-up, and samples of the second half."""

    def __init__(self, num: int) -> None:
        draw = random.Random(7)
        kinds = itertools.chain(*(draw.sample(list(MARKS), len(MARKS)) for _ in range(WARMUP + 2 * num)))
        self.orders = [(kind, draw.sample(range(NUM_STORED), NUM_CHUNKS)) for kind in kinds]
        self._warm, self._timed = WARMUP * len(MARKS), (WARMUP + num) * len(MARKS)
        self._count, self._kind, self._began = 0, "", 0
        self._ns: dict[str, list[int]] = {kind: [] for kind in MARKS}
        self._stacks: dict[str, Counter[tuple[CodeType, ...]]] = {kind: Counter() for kind in MARKS}
        signal.signal(signal.SIGALRM, self._sample)

    def begin(self, kind: str) -> None:
        self._kind = kind
        if self._count >= self._timed:
            signal.setitimer(signal.ITIMER_REAL, STEP_S * (1 - random.random()), STEP_S)
        self._began = time.process_time_ns()

    def end(self) -> None:
        took = time.process_time_ns() - self._began
        signal.setitimer(signal.ITIMER_REAL, 0)
        if self._warm <= self._count < self._timed:
            self._ns[self._kind].append(took)
        self._count += 1

    def _sample(self, _number: int, frame: FrameType | None) -> None:
        codes = []
        while frame is not None:
            codes.append(frame.f_code)
            frame = frame.f_back
        self._stacks[self._kind][tuple(codes)] += 1

    def report(self) -> dict[str, Any]:
        """Nanoseconds by kind; microseconds of a request by stage, by function, and by function with what it calls."""
        report: dict[str, Any] = {"ns": self._ns, "us": {}}
        for kind, stacks in self._stacks.items():
            counts: Counter[str] = Counter()
            for codes, count in stacks.items():
                inward = [f"{c.co_qualname} ({_from_package(c.co_filename)}:1)" for c in codes[::-1]]
                keys = {f"within {frame}" for frame in inward} | {f"stage {stage_of(inward)}", f"own {inward[-1]}"}
                counts.update(dict.fromkeys(keys, count))
            scale = sum(self._ns[kind]) / len(self._ns[kind]) / 1e3 / max(1, stacks.total())
            report["us"][kind] = {key: round(count * scale, 1) for key, count in counts.items()}
        return report


@functools.cache
def _from_package(filename: str) -> str:
    """A file by its path from its package on."""
    path = Path(filename)
    folder = max((one for one in sys.path if path.is_relative_to(one)), key=len, default=path.parent)
    return str(path.relative_to(folder))


# The scheduler process.


def measure_scheduler(meter: Meter, file: Path) -> dict[str, Any]:
    stubs = _Stubs()
    from sglang.srt.managers.io_struct import unwrap_from_pickle
    from sglang.srt.mem_cache.common import evict_from_tree_cache

    from local_scheduler import LocalScheduler, Request

    flags = {"max_total_tokens": POOL_LEN, "dtype": "float32", "chunked_prefill_size": -1}
    local = LocalScheduler(_model_dir(), chunk_cache=dict(OPTIONS), **flags)
    draw = random.Random(3)

    def tokens(length: int) -> list[int]:
        return [draw.randrange(8, 2048) for _ in range(length)]

    chunks = [tokens(CHUNK_LEN) for _ in range(NUM_STORED)]

    def message(kind: str, which: list[int]) -> Any:
        ids = [*tokens(HEAD_LEN), *itertools.chain(*(chunks[i] for i in which)), *tokens(QUESTION_LEN)]
        given = local.prepare(Request(ids, chunk_cache=MARKS[kind] or None, max_new_tokens=1))
        given.return_logprob, given.top_logprobs_num = False, 0
        return given

    for first in range(0, NUM_STORED, NUM_CHUNKS):
        stored = message("fused", list(range(first, first + NUM_CHUNKS)))
        local.run(lambda step, stored=stored: [stored] if step == 0 else None)
    stubs.is_on = True
    waiting = iter([(kind, message(kind, which)) for kind, which in meter.orders])
    current, outputs = "", {}

    def receive(output: Any, _request: Any = None) -> None:
        pickle.dumps(output, pickle.HIGHEST_PROTOCOL)  # as it is sent
        if getattr(output, "rids", None):
            outputs[current] = output
            local._unfinished.discard(output.rids[0])

    def on_step(_step: int) -> list[Any] | None:
        nonlocal current
        if local._unfinished:
            return []
        if current:
            meter.end()
        current, following = next(waiting, ("", None))
        if following is None:
            return None
        evict_from_tree_cache(local.cache, ROOM_LEN)
        meter.begin(current)
        return [following]

    local.scheduler.ipc_channels.send_to_detokenizer.send_output = receive
    local.run(on_step, max_steps=10**9)
    file.write_bytes(pickle.dumps(outputs))
    reply = unwrap_from_pickle(outputs["fused"].customized_info)["chunk_cache"][0][0]
    reply = json.loads(reply) if isinstance(reply, str) else reply
    assert all(chunk["status"] == "hit" for chunk in reply["chunks"]), f"not fused: {reply}"
    return {name: reply[f"{name}_tokens"] for name in ("prefix", "reused", "recomputed", "computed")}


class _Stubs:
    """Replaces the model's forward and the copy of KV, which do nothing once `is_on`; make it before other imports."""

    def __init__(self) -> None:
        import torch
        from sglang.srt.layers.logits_processor import LogitsProcessorOutput
        from sglang.srt.model_executor.model_runner import ModelRunner, ModelRunnerOutput

        copies = importlib.import_module("sgl_kernel_ext.copy_rotate")  # the module, not the function
        self.is_on = False
        original, copy_rotate = ModelRunner.forward, copies.copy_rotate

        def forward(runner: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
            if not self.is_on:
                return original(runner, batch, *args, **kwargs)
            logits = torch.zeros(batch.batch_size, runner.model_config.vocab_size)
            return ModelRunnerOutput(LogitsProcessorOutput(next_token_logits=logits), can_run_graph=False)

        ModelRunner.forward = forward  # type: ignore[method-assign]
        copies.copy_rotate = lambda *args, **kwargs: None if self.is_on else copy_rotate(*args, **kwargs)


def _model_dir() -> Path:
    return documents_model(LlamaShape(1, 32, 2, 1, 64, 2048))[0]


# The process that serves HTTP.


def measure_http(meter: Meter, file: Path, *, is_text: bool) -> None:
    from sglang.srt.plugins import load_plugins

    load_plugins()
    from sglang.srt.runtime_context import publish
    from sglang.srt.server_args import PortArgs, ServerArgs

    from sglang_chunk_cache import plugin
    from sglang_chunk_cache.flags.server_args import ChunkCacheArgs, set_args

    server_args = ServerArgs(model_path=str(_model_dir()), log_level="warning", dtype="float32")
    args = ChunkCacheArgs(**OPTIONS)
    plugin.enable(server_args, args)
    set_args(args)
    server_args.resolve_once()
    publish(server_args, role="tokenizer")
    from sglang.srt.entrypoints import http_server  # not before: the plugin replaces classes of these modules
    from sglang.srt.managers.io_struct import GenerateReqInput
    from sglang.srt.managers.tokenizer_manager import TokenizerManager

    manager = TokenizerManager(server_args, PortArgs.init_new(server_args))
    http_server.set_global_state(http_server._GlobalState(manager, None, {}))
    outputs = pickle.loads(file.read_bytes())
    ids = manager.tokenizer.encode(Path(__file__).read_text() * 40, add_special_tokens=False)
    chunks = [ids[7 * i : 7 * i + CHUNK_LEN] for i in range(NUM_STORED)]
    texts = [manager.tokenizer.decode(chunk) for chunk in chunks]
    dispatched: list[Any] = []

    def dispatch(obj: Any) -> None:
        pickle.dumps(obj, pickle.HIGHEST_PROTOCOL)
        dispatched.append(obj)

    manager._dispatch_to_scheduler = dispatch

    def body(kind: str, which: list[int]) -> dict[str, Any]:
        marks = dict(MARKS[kind])
        if is_text:
            marks.pop("spans", None)
            prompt: Any = ("" if kind == "plain" else args.separator).join(("Read.", *(texts[i] for i in which), "So?"))
        else:
            prompt = [*ids[:HEAD_LEN], *itertools.chain(*(chunks[i] for i in which)), *ids[:QUESTION_LEN]]
        params = {"temperature": 0.0, "max_new_tokens": 1} | (
            {"custom_params": {"chunk_cache": marks}} if marks else {}
        )
        return {"text" if is_text else "input_ids": prompt, "sampling_params": params}

    async def run() -> None:
        for kind, which in meter.orders:
            request = body(kind, which)
            obj, output = GenerateReqInput(**copy.deepcopy(request)), copy.copy(outputs[kind])
            meter.begin(kind)
            assert http_server.generate_contract_error(request) is None
            answer = asyncio.ensure_future(http_server.serve_generate_request(obj, None))
            while not dispatched:
                await asyncio.sleep(0)
            output.rids = [dispatched.pop().rid]
            await manager._handle_batch_output(output)
            response = await answer
            meter.end()
            assert (b'"chunk_cache":{' in response.body) == (kind != "plain"), response.body

    asyncio.run(run())


def main() -> None:
    part, num, file = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    importlib.import_module("torch").set_num_threads(1)
    meter = Meter(num)
    reply = measure_scheduler(meter, file) if part == "scheduler" else measure_http(meter, file, is_text=part == "text")
    print("\n" + json.dumps(meter.report() | {"reply": reply}), flush=True)
    os._exit(0)  # else Python would wait for SGLang's helper threads and processes


if __name__ == "__main__":
    main()
