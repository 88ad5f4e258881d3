"""The plugin: from the command line, or from `engine`, to a server with the chunk cache in all its processes.

Verbs: `register` (entry point of SGLang's plugin loader), `enable` (on a `ServerArgs` record, by the handlers of the
flags and by `engine`), `engine` (offline use).

Order in the launching process: `load_plugins` -> `register` -> flags parsed -> `from_cli_args` -> `enable` (all hooks
applied and verified) -> `resolve_once` (flags and model checked) -> `launch_subprocesses` (options exported, children
started). Order in a child: `load_plugins` -> `register` (options inherited, hooks registered and applied) -> the
factory of the radix cache verifies them.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from chunk_cache.options.defaults import DEFAULT_METHOD, DEFAULT_RATIO, DEFAULT_SEPARATOR
from sglang_chunk_cache.flags.server_args import (
    RADIX_CACHE_BACKEND,
    ChunkCacheArgs,
    StartRefused,
    add_flags,
    attach,
    attached,
    exported,
    from_flags,
    inherit,
    refuse,
    set_args,
)
from sglang_chunk_cache.start import hooks, refusals

if TYPE_CHECKING:
    from sglang import Engine


HTTP_APP = "sglang_chunk_cache.host.http_worker:app"
_BY_ENGINE = "_chunk_cache_by_engine"
_refused: list[StartRefused] = []
CHILDREN_END_S = 10.0


def register() -> None:
    """Called by SGLang's plugin loader in every process; with the chunk cache off it only adds the flags."""
    if inherit() is not None:
        hooks.register_radix_cache()
        hooks.register_hooks(hooks.SCHEDULER_HOOKS)
        return
    hooks.register_hooks(hooks.FLAG_HOOKS)


def enable(server_args: Any, args: ChunkCacheArgs) -> None:
    """Turns the chunk cache on for the server that `server_args` describes, and hooks this process.

    Raises:
        StartRefused: a flag is not supported, or a hook does not apply.
    """
    if server_args.radix_cache_backend not in (None, RADIX_CACHE_BACKEND):
        refuse(f"--radix-cache-backend {server_args.radix_cache_backend} cannot be combined with --chunk-cache.")
    server_args.radix_cache_backend = RADIX_CACHE_BACKEND
    attach(server_args, args)
    refusals.check_flags(server_args)
    refusals.check_folders(args.parsed_config)
    refusals.prepare_flags(server_args, args.parsed_config)
    hooks.register_radix_cache()
    hooks.apply_hooks()
    from sglang_chunk_cache.host import admin_routes  # once the flags are checked: it imports the HTTP server

    admin_routes.add_routes()


def _name_http_app() -> None:
    """Several tokenizer workers import their app by this name."""
    from sglang.srt.environ import envs

    variable = envs.SGLANG_HTTP_SERVER_APP_PATH
    if variable.is_set() and variable.get() != HTTP_APP:
        refuse("an app of your own (SGLANG_HTTP_SERVER_APP_PATH) cannot be combined with --chunk-cache; unset it.")
    variable.set(HTTP_APP)


def engine(
    *,
    chunk_cache_method: str = DEFAULT_METHOD,
    chunk_cache_ratio: float = DEFAULT_RATIO,
    chunk_cache_separator: str = DEFAULT_SEPARATOR,
    chunk_cache_selector: str | None = None,
    chunk_cache_config: dict[str, Any] | None = None,
    chunk_cache_target: dict[str, Any] | None = None,
    **engine_args: Any,
) -> Engine:
    """An `sglang.Engine` with the chunk cache on.

    Args:
        chunk_cache_method: default method of a request.
        chunk_cache_ratio: default recompute ratio, in [0, 1].
        chunk_cache_separator: marks chunks in text prompts.
        chunk_cache_selector: Hugging Face folder or name of a small model that selects for the method cacheclip.
        chunk_cache_config: all other options
        chunk_cache_target: how far answers may be from exact ones, such as `{"kl": 0.1}`; None = no matter
        **engine_args: what `sglang.Engine` takes.

    Raises:
        ValueError: an option, a flag or the model is not supported.

    Example:
        >>> llm = engine(model_path="models/llama", chunk_cache_ratio=0.15)
        >>> llm.generate("Read. <|chunk|>A<|chunk|>B<|chunk|> Who?", {"max_new_tokens": 8})
    """
    from sglang.srt.entrypoints.engine import Engine
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import ServerArgs

    load_plugins()
    engine_args.setdefault("log_level", "error")
    try:
        args = ChunkCacheArgs(
            method=chunk_cache_method,
            ratio=chunk_cache_ratio,
            separator=chunk_cache_separator,
            config=chunk_cache_config or {},
            selector=chunk_cache_selector,
            target=chunk_cache_target,
        )
        server_args = ServerArgs(**engine_args)
        if server_args.tokenizer_worker_num > 1:
            refuse("tokenizer_worker_num: only processes of an HTTP server are hooked; drop it.")
        enable(server_args, args)
        setattr(server_args, _BY_ENGINE, True)
        return Engine(server_args=server_args)
    except StartRefused as error:
        raise ValueError(error.code) from None


# Handlers of the hooks.


def add_cli_args(_result: None, parser: argparse.ArgumentParser) -> None:
    """AFTER `ServerArgs.add_cli_args`."""
    add_flags(parser)


def from_cli_args(original: Callable[..., Any], cls: type, namespace: argparse.Namespace) -> Any:
    """AROUND `ServerArgs.from_cli_args`."""
    args = from_flags(namespace)
    server_args = original(cls, namespace)
    if args is not None:
        enable(server_args, args)
        refusals.check_port(server_args)
    return server_args


def resolve_once(original: Callable[..., None], server_args: Any) -> None:
    """AROUND `ServerArgs.resolve_once`; a record that was resolved before is not checked again."""
    resolved_before = getattr(server_args, "_resolution_finished", False)
    try:
        original(server_args)
    except OSError as error:
        if attached(server_args) is None or Path(server_args.model_path).exists():
            raise
        refusals.refuse_missing_model(server_args.model_path, error)
    if not resolved_before and attached(server_args) is not None:
        refusals.check_resolved(server_args)


def launch_subprocesses(original: Callable[..., Any], cls: type, *args: Any, **kwargs: Any) -> Any:
    """AROUND `Engine._launch_subprocesses`; several tokenizer workers are started behind it, and import their app."""
    server_args = kwargs["server_args"] if "server_args" in kwargs else args[0]
    chunk_cache_args = attached(server_args)
    set_args(chunk_cache_args)
    if chunk_cache_args is not None and server_args.tokenizer_worker_num > 1:
        _name_http_app()
    before = {child.pid for child in _children()}
    try:
        with exported(chunk_cache_args):
            return original(cls, *args, **kwargs)
    except StartRefused as error:
        _end_start(error, before, is_server=not hasattr(server_args, _BY_ENGINE))
        raise


def _children() -> list[psutil.Process]:
    return psutil.Process().children(recursive=True)


def _end_start(error: StartRefused, before: set[int], *, is_server: bool) -> None:
    """Ends the children of a start that is refused, and this process too where it was to be a server.

    Children that were there `before` are somebody else's: an Engine that serves, workers of the program.

    What was made of the tokenizer manager is never collected: its sockets would wait for the other end for ever.
    """
    started = [child for child in _children() if child.pid not in before]
    try:
        for child in started:
            with suppress(psutil.NoSuchProcess):
                child.kill()
        psutil.wait_procs(started, timeout=CHILDREN_END_S)
    finally:
        if is_server:
            sys.stdout.flush()
            print(error.code, file=sys.stderr, flush=True)
            os._exit(1)
        _refused.append(error)  # with its traceback, which holds the frames
