"""Runs cases on one configuration in processes of their own.

- `run_cases(config, is_ours)` starts one process per tensor-parallel rank and returns the replies of rank 0 per case;
  with data-parallel attention those of all ranks, which run the cases in different orders, each on its own requests.

The processes are forked from a server that has imported SGLang already, so a configuration costs seconds. With tensor
parallelism both ranks are fed the same requests at the same steps of the event loop; SGLang would broadcast them.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import sys
import traceback
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch

from chunk_cache.options.defaults import DEFAULT_METHOD
from chunk_cache_tools.own_server import free_port

TEST_DIR = Path(__file__).resolve().parent.parent
MODEL_DIR = TEST_DIR.parent / ".cache" / "models"

os.environ.setdefault("OMP_NUM_THREADS", "1")  # several spin where cores are shared: ten times slower
# Importing SGLang on a CUDA host initializes the device, which a fork cannot use.
_context = multiprocessing.get_context("spawn" if torch.cuda.is_available() else "forkserver")
_PRELOADED = ("managers.scheduler", "entrypoints.engine", "entrypoints.http_server", "models.registry")
_context.set_forkserver_preload([f"sglang.srt.{module}" for module in _PRELOADED])


@dataclass(frozen=True)
class Config:
    """One configuration of the matrix."""

    page_size: int = 1
    tp_size: int = 1
    attn_dp_size: int = 1  # each rank has requests of its own where it is `tp_size`
    num_idle: int = 0  # ranks that have none, then
    chunked: bool = False
    step_len: int = 64  # of chunked prefill
    overlap: bool = True
    tree_core: str = "rust"  # of SGLang's radix tree
    typed: bool = False  # messages between processes: of msgspec's types, or pickled
    kind: str = "llama"
    rope: str | None = None
    layers: int = 2
    hidden: int = 64  # four heads
    max_position: int = 8192
    max_total_tokens: int = 4096
    conservativeness: float = 1.0  # below 1 SGLang admits more than fits, and retracts
    options: tuple[tuple[str, Any], ...] = ()  # of --chunk-cache-config
    target: tuple[tuple[str, Any], ...] = ()  # --chunk-cache-target; empty = none
    method: str = DEFAULT_METHOD  # --chunk-cache-method
    discover: bool = False  # --chunk-cache-discover, with ratio 1.0 for all
    num_adapters: int = 0  # of LoRA
    draft: str | None = None  # kind of the model that drafts; "self" = the model itself
    server: tuple[tuple[str, Any], ...] = ()  # more fields of ServerArgs
    force_retract: bool = False  # SGLang's own test switch: retract at every third step that decodes

    def __str__(self) -> str:
        parts = [f"page{self.page_size}", f"tp{self.tp_size}", f"chunked{self.step_len}" if self.chunked else "whole"]
        parts += [f"dp{self.attn_dp_size}"] if self.attn_dp_size > 1 else []
        parts += [f"{self.num_idle}idle"] if self.num_idle else []
        parts += ["overlap" if self.overlap else "normal"]
        parts += [*(["pythoncore"] if self.tree_core == "python" else []), *(["typed"] if self.typed else [])]
        parts += [self.kind, *([self.rope] if self.rope else [])]
        parts += ["discover"] if self.discover else []
        parts += [f"{self.draft}-drafts"] if self.draft else []
        parts += [f"{self.num_adapters}adapters"] if self.num_adapters else []
        parts += [f"{name}={value}" for name, value in self.options + self.target + self.server]
        return "-".join([*parts, *([f"{self.layers}layers"] if self.layers != 2 else [])])

    @property
    def model_dir(self) -> Path:
        name = f"{self.kind}-{self.rope or 'default'}"
        name += f"-{self.layers}layers" if self.layers != 2 else ""
        name += f"-{self.max_position}positions" if self.max_position != 8192 else ""
        return MODEL_DIR / (name + (f"-{self.hidden}" if self.hidden != 64 else ""))

    @property
    def draft_dir(self) -> Path:
        return self.model_dir if self.draft == "self" else MODEL_DIR / f"{self.draft}-draft"

    @property
    def adapter_dirs(self) -> list[Path]:
        return [self.model_dir / f"adapter{i}" for i in range(self.num_adapters)]

    @property
    def flags(self) -> dict[str, Any]:
        return {
            "dtype": "float32",
            "page_size": self.page_size,
            "tp_size": self.tp_size,
            "attn_dp_size": self.attn_dp_size,
            "chunked_prefill_size": self.step_len if self.chunked else -1,
            "disable_overlap_schedule": not self.overlap,
            "max_total_tokens": self.max_total_tokens,
            "schedule_conservativeness": self.conservativeness,
            **({"speculative_draft_model_path": str(self.draft_dir)} if self.draft else {}),
            **(
                {"enable_lora": True, "lora_paths": [str(one) for one in self.adapter_dirs]}
                if self.adapter_dirs
                else {}
            ),
            **dict(self.server),
        }


def run_cases(
    config: Config, *, is_ours: bool, names: list[str], module: str = "exactness.cases", within_s: float = 850
) -> dict[str, Any]:
    """Per case what it returned, or else all replies; a case that failed is a string with its traceback.

    Args:
        names: of cases in `module`; numbers behind a name, with spaces between, are arguments of the case.
        within_s: when it is given up; less than what pytest waits for a test.
    """
    port = free_port()
    pipes, processes = [], []
    for rank in range(config.tp_size):
        receiver, sender = _context.Pipe(duplex=False)
        process = _context.Process(target=_child, args=(sender, config, is_ours, names, module, rank, port))
        process.start()
        sender.close()
        pipes.append(receiver)
        processes.append(process)
    results: Any = {}
    waiting = pipes if config.attn_dp_size > 1 else pipes[:1]
    by_rank: dict[int, Any] = {}
    try:
        while len(by_rank) < len(waiting) and not isinstance(results, str):
            ready = wait([pipe for rank, pipe in enumerate(waiting) if rank not in by_rank], within_s)
            for pipe in ready:
                own = by_rank[pipes.index(pipe)] = pipe.recv()
                results = own if isinstance(own, str) else results
            results = results if ready else f"no answer within {within_s} s"
        results = results or _joined([by_rank[rank] for rank in range(len(waiting))])
    except EOFError:
        results = "the scheduler process died"
    finally:
        # Not joined: helpers that SGLang started hold the pipe that a join would wait for.
        for process in processes:
            process.kill()
    if isinstance(results, str):
        raise RuntimeError(f"{config}: {results}")
    return results


def _joined(by_rank: list[dict[str, Any]]) -> dict[str, Any]:
    """What each case gave on all ranks, one after the other; what failed is the traceback of the first that did."""
    joined: dict[str, Any] = {}
    for name, replies in [item for own in by_rank for item in own.items()]:
        known = joined.get(name, [])
        if not isinstance(known, str):
            joined[name] = replies if isinstance(replies, str) or not known else known + replies
    return joined


def _child(sender: Any, config: Config, is_ours: bool, names: list[str], module: str, rank: int, port: int) -> None:
    gc.freeze()  # all that was imported, which no collection while the scheduler is built need look at
    # SGLang's own checks of the pool, after every step and when idle: leaks, double frees, use after free.
    os.environ["SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY"] = "1"
    os.environ["SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE"] = "1"
    os.environ["SGLANG_CHECK_KV_PAGE_INVARIANTS"] = "1"
    os.environ["SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND"] = config.tree_core
    os.environ["SGLANG_USE_PICKLE_IPC"] = str(int(not config.typed))
    sys.path.insert(0, str(TEST_DIR))
    import importlib

    from local_scheduler import LocalScheduler
    from tiny_models import DRAFTS, make_adapter, make_draft, make_model

    torch.set_num_threads(1)
    try:
        cases = importlib.import_module(module)
        # Read when the module is imported, which the fork server has done.
        importlib.import_module("sglang.srt.managers.io_struct")._USE_PICKLE_IPC = not config.typed
        if config.force_retract:
            importlib.import_module("sglang.srt.managers.scheduler").TEST_RETRACT = True
        shape = {"layers": config.layers, "hidden": config.hidden, "max_position": config.max_position}
        model = make_model(config.kind, config.model_dir, rope=config.rope, **shape)
        for i, folder in enumerate(config.adapter_dirs):
            make_adapter(model, folder, seed=i)
        if config.draft in DRAFTS:
            make_draft(config.draft, config.draft_dir)
        elif config.draft not in (None, "self"):
            make_model(config.draft, config.draft_dir, layers=1, seed=1)
        chunk_cache = None
        if is_ours:
            chunk_cache = {
                "config": dict(config.options),
                "target": dict(config.target) or None,
                "method": config.method,
            }
            chunk_cache |= {"discover": True, "ratio": 1.0} if config.discover else {}
        local = LocalScheduler(model, chunk_cache=chunk_cache, tp_rank=rank, nccl_port=port, **config.flags)
        is_rust = type(local.cache.tree_core).__name__.startswith("Rust")
        assert is_rust == (config.tree_core == "rust"), "SGLang chose the other core"
        gc.freeze()  # SGLang collects garbage at every flush, over all that it imported
        if config.attn_dp_size > 1:
            names = [*names[rank:], *names[:rank]] if rank < config.tp_size - config.num_idle else []
        sender.send({name: _run_case(cases, name, local, is_ours) for name in names})
        local.drain()
    except BaseException:
        sender.send(traceback.format_exc())
        raise
    finally:
        sender.close()
        os._exit(0)


def _run_case(cases: Any, name: str, local: Any, is_ours: bool) -> Any:
    session = cases.Session(local, is_ours=is_ours)
    case, *numbers = name.split()
    try:
        value = cases.CASES[case](session, *map(int, numbers))
        if is_ours:
            local.cache.chunks.check_integrity()
        assert local.flush(), "the cache could not be flushed: a request left something behind"
        assert local.num_used_slots() == 0, f"{local.num_used_slots()} slots of the KV pool have leaked"
    except Exception:  # noqa: BLE001 - whatever it is, it is reported for this case and the next one runs
        return traceback.format_exc()
    return session.replies if value is None else value
