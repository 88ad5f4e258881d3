"""What this server can do, by its flags and its model; `chunk_cache/plan/served_methods` checks whether that is enough
for a request's method."""

from __future__ import annotations

from typing import Any

from chunk_cache.errors import ChunkCacheRequestError, request_error
from chunk_cache.methods import METHODS
from chunk_cache.options.request_options import RequestOptions
from chunk_cache.plan.served_methods import check_method, check_states, defaults_problem
from chunk_cache.prompt.chunk_cache_fields import KEY
from sglang_chunk_cache.flags.server_args import ChunkCacheArgs, refuse


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
        check_states(opts, path)
    if opts.method is None:
        return
    method = opts.method
    num_layers = manager.model_config.num_hidden_layers
    if METHODS[method].asks_selector and args.selector is None:
        problem = f"{method!r} needs a small model that selects, which this server does not have"
        raise request_error(f"{path}.method", problem, "start it with --chunk-cache-selector, or choose another method")
    check_method(method, dict(opts.options), num_layers, args.parsed_config, what_fixes_rows(manager.server_args), path)


def has_states(model_config: Any) -> bool:
    """Whether layers of a model keep states by the gated delta rule (Qwen3-Next, Qwen3.5)."""
    from sglang.srt.configs.hybrid_arch import hybrid_gdn_config

    return hybrid_gdn_config(model_config) is not None


def is_read_twice(manager: Any) -> bool:
    """Whether a stock decode server tokenizes each request too; it takes marks in a text for text."""
    return bool(manager.server_args.disaggregation_mode == "prefill")


def check_read_once(manager: Any, path: str) -> None:
    """Checks that no decode server reads marked text, or passages beside it; `path` is where the client marked it.

    Raises:
        ChunkCacheRequestError: one does.
    """
    if is_read_twice(manager):
        problem = "the decode server reads the request too, and knows no marks in it"
        raise request_error(path, problem, f"tokenize the prompt and send input_ids with custom_params.{KEY}.spans")


def what_fixes_rows(server_args: Any) -> str | None:
    """Why no method may work between layers on this server, as words that follow "which"; None = methods may."""
    if (server_args.speculative_algorithm or "").upper() in ("EAGLE", "EAGLE3", "NEXTN"):
        return "drafts of EAGLE, made from the hidden state of every row, do not follow"
    if divides_attention(server_args):
        return "ranks of data-parallel attention (--attn-dp-size), told of all rows before a forward, do not follow"
    for name in ("enable_deterministic_inference", "rl_on_policy_target"):
        if getattr(server_args, name):
            return f"makes answers depend on the batch, against --{name.replace('_', '-')}"
    return None


def divides_attention(server_args: Any) -> bool:
    """Whether ranks attend for requests of their own (data-parallel attention), by either of its flags."""
    is_by_old_flag = server_args.enable_dp_attention and server_args.dp_size > 1
    return bool(is_by_old_flag or server_args.attn_dp_size > 1)


def what_keeps_all(server_args: Any, model_config: Any) -> str | None:
    """What keeps this server from decoding over a part of a prompt (`keep_tokens`); None = nothing."""
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
        rows_are_fixed: what `what_fixes_rows` returns.

    Raises:
        StartRefused: this server cannot serve one of them.
    """
    methods = {args.method: f"--chunk-cache-method {args.method}"}
    for step in () if args.parsed_target is None else args.parsed_target.steps:
        methods.setdefault(step.method, f"--chunk-cache-target: {step.method}")
    problem = defaults_problem(methods, num_layers, args.parsed_config, rows_are_fixed)
    if problem is not None:
        refuse(f"{problem}.")
