"""Whether a server can do what a method needs, and lets a client do what its mode asks for.

A method may name layers that the model does not have, statistics that the server does not take, work between layers
where that is forbidden, or compute single tokens of a passage where layers keep states.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from chunk_cache.errors import ChunkCacheRequestError, request_error
from chunk_cache.methods import METHODS, STATE_METHODS, Method, Options, OptionValue, Stage
from chunk_cache.options.config import Config
from chunk_cache.options.request_options import PREPARING, RequestOptions
from chunk_cache.plan.selection_plan import is_selecting


def check_method(
    name: str,
    given: Mapping[str, OptionValue],
    num_layers: int,
    config: Config,
    rows_are_fixed: str | None,
    path: str,
) -> None:
    """Checks a method with the options that a request gives it; `path` is where they stood.

    Args:
        rows_are_fixed: why no method may work between layers, as a clause that follows "which"; None = methods may.

    Raises:
        ChunkCacheRequestError: the server cannot serve it.
    """
    method = METHODS[name]
    options = tuple(method.with_defaults(given, config.options).items())
    method.check_model(options, num_layers, path)
    if method.statistic is not None and not config.layers_with_statistics(num_layers):
        problem = f"{name!r} ranks by statistics, which this server does not take"
        remedy = 'start it with "statistics_layers" in --chunk-cache-config, or choose another method'
        raise request_error(f"{path}.method", problem, remedy)
    if rows_are_fixed is not None and is_selecting(method, options):
        problem = f"{name!r} with these options works between layers, which {rows_are_fixed}"
        raise request_error(f"{path}.method", problem, "choose near, without focus_window and drift")


def check_rows(opts: RequestOptions, default_ratio: float, most: int | None, path: str) -> None:
    """Checks that a method which begins with all rows of the chunks has room for them in one step.

    Args:
        most: most rows of a step in which the forward itself chooses rows; None = any number.

    Raises:
        ChunkCacheRequestError: the request names such a method, and the chunks have more tokens.
    """
    if opts.method is None or most is None:
        return
    method = METHODS[opts.method]
    num_rows = sum(end - start for start, end in opts.spans)
    is_partial = 0.0 < method.effective_ratio(opts.ratio, default_ratio) < 1.0
    if method.stage is Stage.LAYER and is_partial and num_rows > most:
        problem = f"{opts.method!r} begins with all {num_rows} tokens of the chunks, and a step has room for {most}"
        remedy = "choose near, or start the server with a larger --max-prefill-tokens where memory allows"
        raise request_error(f"{path}.method", problem, remedy)


def check_preparing(opts: RequestOptions, config: Config, path: str) -> None:
    """Checks that a client stores no chunk for any prompt if the server limits `trust` or `system_prompts`.

    Raises:
        ChunkCacheRequestError: it would.
    """
    if opts.mode in PREPARING:
        for key, value in (("trust", "warmed"), ("system_prompts", "same")):
            if getattr(config, key) == value:
                problem = f"{opts.mode!r} would store it for others, whatever stands in front, against {key} {value}"
                raise request_error(f"{path}.mode", problem, "have the administrator warm it")


def check_states(opts: RequestOptions, path: str) -> None:
    """Checks the method of a request for a model with states.

    Raises:
        ChunkCacheRequestError: it does not work there, or is given options.
    """
    if opts.method is not None and opts.method not in STATE_METHODS:
        raise request_error(f"{path}.method", state_problem(opts.method), f"choose {' or '.join(STATE_METHODS)}")
    if opts.options:
        problem = "this model keeps states: which rows are computed follows from the ratio and the server's seam_len"
        raise request_error(f"{path}.options", problem, "leave them out")


def state_problem(method: str) -> str:
    """Why a method cannot serve a model with states, as a clause."""
    return f"{method!r} computes single tokens within passages, where nobody knows the states of this model"


def defaults_problem(
    methods: Mapping[str, str], num_layers: int, config: Config, rows_are_fixed: str | None
) -> str | None:
    """Why a server cannot serve its own methods, or the options of its configuration; None = it can.

    Args:
        methods: the server's methods, each with the words that name it in the sentence.
        rows_are_fixed: as in `check_method`.
    """
    for one in METHODS.values():
        options = tuple(one.with_defaults({}, config.options).items())
        problem = _misfit(one, options, num_layers)
        if problem is not None and _misfit(one, (), num_layers) is None:
            return problem
    for method, flag in methods.items():
        problem = _unserved(method, num_layers, config, rows_are_fixed)
        if problem is not None:
            is_by_options = _unserved(method, num_layers, replace(config, options=()), rows_are_fixed) is None
            return f"{'--chunk-cache-config: options' if is_by_options else flag}: {problem}"
    return None


def _unserved(method: str, num_layers: int, config: Config, rows_are_fixed: str | None) -> str | None:
    """Why a server cannot serve a method with the options of its configuration; None where it can."""
    try:
        check_method(method, {}, num_layers, config, rows_are_fixed, "--chunk-cache")
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
