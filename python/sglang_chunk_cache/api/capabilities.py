"""Whether this server can do what a request's method needs: `check_served` and `check_rows` for a request,
`check_default` at the start.

A method may name layers that the model does not have, statistics that the server does not take, or work between layers
where the server's flags forbid it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from chunk_cache.errors import ChunkCacheRequestError, request_error
from chunk_cache.methods import METHODS, STATE_METHODS, Method, Options, OptionValue, Stage
from chunk_cache.options.config import Config
from chunk_cache.options.request_options import RequestOptions
from chunk_cache.plan.selection_plan import is_selecting
from chunk_cache.prompt.chunk_cache_fields import KEY
from sglang_chunk_cache.flags.server_args import ChunkCacheArgs, refuse
from sglang_chunk_cache.flags.step_limits import most_unknown_rows
from sglang_chunk_cache.kv.state_models import has_states, method_problem


def check_served(opts: RequestOptions | None, manager: Any, args: ChunkCacheArgs, path: str) -> None:
    """Checks the method of one request, and whether decoding may keep a part of it; `path` is where its options stood.

    Raises:
        ChunkCacheRequestError: this server cannot serve it.
    """
    if opts is None:
        return
    if opts.keep_tokens and (what := what_keeps_all(manager.server_args, manager.model_config)) is not None:
        raise keeps_all_error(what, path)
    if has_states(manager.model_config):
        _check_states(opts, path)
    if opts.method is None:
        return
    method = opts.method
    num_layers = manager.model_config.num_hidden_layers
    if METHODS[method].asks_selector and args.selector is None:
        problem = f"{method!r} needs a small model that selects, which this server does not have"
        raise request_error(f"{path}.method", problem, "start it with --chunk-cache-selector, or choose another method")
    _check(method, dict(opts.options), num_layers, args.parsed_config, what_fixes_rows(manager.server_args), path)


def _check_states(opts: RequestOptions, path: str) -> None:
    if opts.method is not None and opts.method not in STATE_METHODS:
        raise request_error(f"{path}.method", method_problem(opts.method), f"choose {' or '.join(STATE_METHODS)}")
    if opts.options:
        problem = "this model keeps states: which rows are computed follows from the ratio and the server's seam_len"
        raise request_error(f"{path}.options", problem, "leave them out")


def is_read_twice(manager: Any) -> bool:
    """Whether a stock decode server tokenizes each request too: for it a mark in a text is a part of the text."""
    return bool(manager.server_args.disaggregation_mode == "prefill")


def check_read_once(manager: Any, path: str) -> None:
    """Checks that no decode server reads marked text, or passages beside it; `path` is where the client marked it.

    Raises:
        ChunkCacheRequestError: one does.
    """
    if is_read_twice(manager):
        problem = "the decode server reads the request too, and knows no marks in it"
        raise request_error(path, problem, f"tokenize the prompt and send input_ids with custom_params.{KEY}.spans")


def check_rows(opts: RequestOptions, args: ChunkCacheArgs, path: str) -> None:
    """Checks that a method which begins with all rows of the chunks has room for them in one step.

    Raises:
        ChunkCacheRequestError: the request names such a method, and the chunks have more tokens.
    """
    most = most_unknown_rows()
    if opts.method is None or most is None:
        return
    method = METHODS[opts.method]
    num_rows = sum(end - start for start, end in opts.spans)
    is_partial = 0.0 < method.effective_ratio(opts.ratio, args.ratio) < 1.0
    if method.stage is Stage.LAYER and is_partial and num_rows > most:
        problem = f"{opts.method!r} begins with all {num_rows} tokens of the chunks, and a step has room for {most}"
        remedy = "choose near, or start the server with a larger --max-prefill-tokens where memory allows"
        raise request_error(f"{path}.method", problem, remedy)


def what_fixes_rows(server_args: Any) -> str | None:
    """Why no method may work between layers on this server, to follow on "which"; None = it may."""
    if (server_args.speculative_algorithm or "").upper() in ("EAGLE", "EAGLE3", "NEXTN"):
        return "drafts of EAGLE, made from the hidden state of every row, do not follow"
    for name in ("enable_deterministic_inference", "rl_on_policy_target"):
        if getattr(server_args, name):
            return f"makes answers depend on the batch, against --{name.replace('_', '-')}"
    return None


def what_keeps_all(server_args: Any, model_config: Any) -> str | None:
    """What of a server does not work with prompts of which decoding keeps a part (`keep_tokens`); None = nothing."""
    if server_args.speculative_algorithm is not None:
        return "speculative decoding"
    if server_args.disaggregation_mode == "prefill":
        return "the decode server"
    if server_args.enable_mixed_chunk:
        return "a batch that mixes prefill and decoding (--enable-mixed-chunk)"
    if has_states(model_config):
        return "a model with states"
    if model_config.sliding_window_size is not None:
        return "attention in a sliding window"
    return None


def keeps_all_error(what: str, path: str) -> ChunkCacheRequestError:
    """The error for a request with `keep_tokens`, which does not work with `what`; `path` names its options."""
    problem = f"{what} needs the keys and values of all tokens"
    return request_error(f"{path}.keep_tokens", problem, "leave it out, or give 0")


def check_default(args: ChunkCacheArgs, num_layers: int, rows_are_fixed: str | None) -> None:
    """Checks the server's own default method, and those of its target.

    Args:
        rows_are_fixed: as `what_fixes_rows` says.

    Raises:
        StartRefused: this server cannot serve one.
    """
    for one in METHODS.values():
        options = tuple(one.with_defaults({}, args.parsed_config.options).items())
        problem = _misfit(one, options, num_layers)
        if problem is not None and _misfit(one, (), num_layers) is None:
            refuse(f"{problem}.")
    methods = {args.method: f"--chunk-cache-method {args.method}"}
    for step in () if args.parsed_target is None else args.parsed_target.steps:
        methods.setdefault(step.method, f"--chunk-cache-target: {step.method}")
    for method, flag in methods.items():
        problem = _unserved(method, num_layers, args.parsed_config, rows_are_fixed)
        if problem is not None:
            without_options = replace(args.parsed_config, options=())
            is_by_options = _unserved(method, num_layers, without_options, rows_are_fixed) is None
            refuse(f"{'--chunk-cache-config: options' if is_by_options else flag}: {problem}.")


def _unserved(method: str, num_layers: int, config: Config, rows_are_fixed: str | None) -> str | None:
    """Why a server cannot serve a method with the options of its configuration; None where it can."""
    try:
        _check(method, {}, num_layers, config, rows_are_fixed, "--chunk-cache")
    except ChunkCacheRequestError as error:
        return str(error)
    return None


def _misfit(method: Method, options: Options, num_layers: int) -> str | None:
    """Why a model cannot be served with these options; None where it can."""
    try:
        method.check_model(options, num_layers, "--chunk-cache-config")
    except ChunkCacheRequestError as error:
        return str(error)
    return None


def _check(
    method_name: str,
    given: Mapping[str, OptionValue],
    num_layers: int,
    config: Config,
    rows_are_fixed: str | None,
    path: str,
) -> None:
    method = METHODS[method_name]
    options = tuple(method.with_defaults(given, config.options).items())
    method.check_model(options, num_layers, path)
    if method.statistic is not None and not config.layers_with_statistics(num_layers):
        problem = f"{method_name!r} ranks by statistics, which this server does not take"
        remedy = 'start it with "statistics_layers" in --chunk-cache-config, or choose another method'
        raise request_error(f"{path}.method", problem, remedy)
    if rows_are_fixed is not None and is_selecting(method, options):
        problem = f"{method_name!r} with these options works between layers, which {rows_are_fixed}"
        raise request_error(f"{path}.method", problem, "choose near, without focus_window and drift")
