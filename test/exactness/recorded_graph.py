"""Prefill graphs without a GPU: SGLang's own runner of breakable graphs, whose segments are recorded on the CPU.

    use_graphs        from here on a model runner's prefills are captured and replayed by SGLang's code
    RecordedGraph     stands in the place of `torch.cuda.CUDAGraph`

A replay executes the operations of its segment again, on the tensors of the capture, and no line of Python between
them: what a forward does outside of breaks is lost, as on a GPU. Before each replay all that the last one has left,
inputs and results, is overwritten: what is read without having been written shows. Streams, memory pools and timing are
not there.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_recorded: list[RecordedGraph] = []


class RecordedGraph:
    """Operations between `capture_begin` and `capture_end`."""

    def __init__(self, **_: Any) -> None:
        self._operations: list[tuple[Any, Any, Any, Any]] = []
        _recorded.append(self)
        self._recorder = _Recorder(self._operations)

    def capture_begin(self, **_: Any) -> None:
        self._recorder.__enter__()

    def capture_end(self) -> None:
        self._recorder.__exit__(None, None, None)

    def poison(self) -> None:
        """Overwrites its results."""
        for function, _, _, results in self._operations:
            for result, returned in zip(
                _one_each(results, function._schema.returns), function._schema.returns, strict=True
            ):
                if returned.alias_info is None:
                    _poison(tree_leaves(result))

    def replay(self) -> None:
        for function, args, kwargs, results in self._operations:
            again = function(*args, **kwargs)
            returns = function._schema.returns
            pairs = zip(_one_each(results, returns), _one_each(again, returns), returns, strict=True)
            for result, new, returned in pairs:
                if returned.alias_info is None:
                    for kept, made in zip(tree_leaves(result), tree_leaves(new), strict=True):
                        kept.copy_(made)


def _poison(values: Iterable[Any]) -> None:
    for value in values:
        if isinstance(value, torch.Tensor):
            value.fill_(float("nan") if value.is_floating_point() else 1)


def _one_each(results: Any, returns: Any) -> tuple[Any, ...]:
    return results if len(returns) > 1 else (results,)


class _Recorder(TorchDispatchMode):
    def __init__(self, operations: list[tuple[Any, Any, Any, Any]]) -> None:
        super().__init__()
        self._operations = operations

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = function(*args, **(kwargs or {}))
        self._operations.append((function, args, kwargs or {}, results))
        return results


def use_graphs(model_runner: Any, num_tokens: list[int]) -> None:
    """Captures prefills of so many tokens; larger ones are eager, as ones below half of the smallest."""
    from sglang.srt.model_executor.cuda_graph_config import Backend
    from sglang.srt.model_executor.model_runner_components import cuda_graph_setup
    from sglang.srt.model_executor.runner import prefill_cuda_graph_runner
    from sglang.srt.model_executor.runner_backend import breakable_cuda_graph_backend as backend
    from sglang.srt.model_executor.runner_backend_utils.breakable_cuda_graph import breakable_cuda_graph as graph
    from sglang.srt.runtime_context import get_exec, get_resources

    prefill = get_exec().graph.cuda_graph_config.prefill
    prefill.backend, prefill.bs = Backend.BREAKABLE, num_tokens
    get_resources().graph_memory_pool = (0, 0)

    @contextlib.contextmanager
    def graph_capture(stream: Any = None) -> Iterator[Any]:
        yield SimpleNamespace(stream=None)

    nothing = contextlib.nullcontext
    for place, name, value in (
        (torch.cuda, "CUDAGraph", RecordedGraph),
        (prefill_cuda_graph_runner, "graph_capture", graph_capture),
        (prefill_cuda_graph_runner, "get_or_create_global_graph_capture_stream", lambda: None),
        (backend, "graph_pool_capture_scope", nothing),
        (backend, "graph_pool_replay_scope", nothing),
        (graph, "_install_wait_stream_hook", lambda: None),
        (graph, "_uninstall_wait_stream_hook", lambda: None),
    ):
        mock.patch.object(place, name, value).start()
    model_runner.prefill_cuda_graph_runner = cuda_graph_setup.capture_prefill_graph(
        model_runner=model_runner, eager_runner=model_runner.eager_runner
    ).runner
    runner = model_runner.prefill_cuda_graph_runner
    execute = runner.execute

    def execute_poisoned(batch: Any, **kwargs: Any) -> Any:
        _poison(vars(runner.buffers).values())
        for recorded in _recorded:
            recorded.poison()
        return execute(batch, **kwargs)

    runner.execute = execute_poisoned
