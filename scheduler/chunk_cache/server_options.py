"""The options that a server is started with, checked together: `server_problem`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from chunk_cache.errors import one_line
from chunk_cache.gate.target import Target, parse_target
from chunk_cache.methods import METHODS
from chunk_cache.methods.method_options import ALPHA, budget_in
from chunk_cache.options.config import Config, parse_config
from chunk_cache.options.request_options import RequestOptions
from chunk_cache.plan.selector_answer import asks_selector


def server_problem(
    *, method: object, ratio: object, separator: object, config: object, selector: object, target: object
) -> str | None:
    """Why a server cannot start with these options, as a sentence that names the flag; None = it can.

    Args:
        method, ratio: of requests that name none.
        separator: marks chunks in text.
        config, target: decoded JSON; no target = None.
        selector: name or folder of the model that selects; None = there is none.
    """
    if not isinstance(method, str) or method not in METHODS:
        return f"--chunk-cache-method {method!r} is not known; choose one of {', '.join(METHODS)}."
    if isinstance(ratio, bool) or not isinstance(ratio, (int, float)) or not 0.0 <= ratio <= 1.0:
        return f"--chunk-cache-ratio must be a number from 0 to 1, not {ratio!r}."
    if not isinstance(separator, str) or not separator.strip():
        return "--chunk-cache-separator must be a string with at least one visible character."
    if not isinstance(config, Mapping):
        return "--chunk-cache-config must be a JSON object."
    try:
        parsed = parse_config(dict(config))
    except ValueError as error:
        return f"{one_line(error).rstrip('.')}."  # the message begins with the name of the flag
    problem = _selector_problem(selector, method, config)
    if problem is not None or target is None:
        return problem
    try:
        parsed_target = parse_target(target, method=method, ratio=ratio)
    except ValueError as error:
        return f"{one_line(error).rstrip('.')}."
    return _target_problem(parsed_target, parsed) or _steps_problem(parsed_target, method, ratio)


def _selector_problem(selector: object, method: str, config: Mapping[str, Any]) -> str | None:
    if selector is None:
        if METHODS[method].asks_selector:
            return f"--chunk-cache-method {method} needs a small model that selects; add --chunk-cache-selector."
        if config.get("selector") is not None:
            return "--chunk-cache-config: selector is given without a model; add --chunk-cache-selector."
    elif not isinstance(selector, str) or not selector.strip():
        return f"--chunk-cache-selector must be a Hugging Face folder or name, not {selector!r}."
    return None


def _target_problem(target: Target, config: Config) -> str | None:
    if not config.verify_share:
        return (
            '--chunk-cache-target needs "verify_share" above 0 in --chunk-cache-config: it goes by that share of the '
            """replies; add it, such as --chunk-cache-config '{"verify_share": 0.05}'."""
        )
    budget = ALPHA.name if config.alpha else budget_in(config.options)
    if budget is not None:
        return f'--chunk-cache-target moves ratios, and "{budget}" in --chunk-cache-config replaces them; drop one.'
    return None


def _steps_problem(target: Target, method: str, ratio: float) -> str | None:
    """Why a step cannot ask the selector: that is decided where prompts are tokenized, by the server's own method."""
    if asks_selector(RequestOptions(spans=((0, 1),)), method, ratio):
        return None
    for i, step in enumerate(target.steps):
        if METHODS[step.method].asks_selector and step.ratio < 1.0:
            return (
                f"--chunk-cache-target: steps[{i}][0]: nobody would ask the selector for {step.method!r}, which is not "
                f"the server's method below ratio 1; add --chunk-cache-method {step.method}, or choose another step."
            )
    return None
