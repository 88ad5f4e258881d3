"""Systems under test: which server answers, and how a client writes its prompts for it.

| name | server | prompts |
| --- | --- | --- |
| `no-cache` | stock SGLang, `--disable-radix-cache` | as retrieved |
| `stock` | stock SGLang, prefix cache on | as retrieved |
| `reorder` | stock SGLang, prefix cache on | chunks reordered and de-duplicated by the client, `reorder.py` |
| `contextpilot` | stock SGLang, prefix cache on | chunks in ContextPilot's order, and each once |
| `rebuild` | stock SGLang, prefix cache on | rebuilt by tokens without marks, `reorder.py` |
| `set-cache` | stock SGLang, prefix cache on | first chunks in the order of an earlier prompt, `reorder.py` |
| `METHOD@RATIO` | `--chunk-cache` | as retrieved, chunks marked |
| `METHOD@RATIO, no ...` | `--chunk-cache` without a part, see `ablated` | the same |

`split_names` and `parse_systems` read such names; `Writer` turns the prompts of one run into request bodies.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from benchmark.quality.question import DataError
from benchmark.serving.prompt import Piece, Prompt, num_tokens
from benchmark.serving.reorder import Piloted, Rebuilder, Reorderer, SetOrderer

from chunk_cache_tools.conditions import Condition, parse_method

NO_CACHE, STOCK, REORDER, REBUILD, SET_CACHE = "no-cache", "stock", "reorder", "rebuild", "set-cache"
CONTEXTPILOT = "contextpilot"
DEFAULT_RATIO = 0.15
SERVER_FLAGS: Mapping[str, tuple[str, ...]] = {
    "no-cache": ("--disable-radix-cache",),
    "plain": (),
    "chunk": ("--chunk-cache",),
    "no-room-kept": ("--chunk-cache", "--chunk-cache-config", '{"keep_share": 0}'),
    "no-statistics": ("--chunk-cache", "--chunk-cache-config", '{"statistics_layers": "none"}'),
}
"""Flags of each kind of server; all other flags are the same for all."""


@dataclass(frozen=True)
class System:
    """One way to serve a trace.

    Attributes:
        name: as in tables and on the command line.
        kind: kind of its server, a key of `SERVER_FLAGS`.
        options: options of the chunk cache; None on a stock server.
        orders: what the client reorders: "chunks", "pilot" (chunks, by ContextPilot), "tokens", "sets", or None.
    """

    name: str
    kind: str
    options: Mapping[str, Any] | None = None
    orders: str | None = None

    @property
    def exactness(self) -> str:
        """How its answers compare with a full prefill of the prompt as it was retrieved."""
        if self.options is not None:
            return "exact" if self.options.get("ratio") == 1 else "approximate"
        return "exact" if self.orders is None else "exact for its own order"


BASELINES: Mapping[str, System] = {
    NO_CACHE: System(NO_CACHE, "no-cache"),
    STOCK: System(STOCK, "plain"),
    REORDER: System(REORDER, "plain", orders="chunks"),
    CONTEXTPILOT: System(CONTEXTPILOT, "plain", orders="pilot"),
    REBUILD: System(REBUILD, "plain", orders="tokens"),
    SET_CACHE: System(SET_CACHE, "plain", orders="sets"),
}


def ablated(system: System, kind: str) -> System:
    """The system on a server without a part of the chunk cache: `kind` of `SERVER_FLAGS`, which its name then has."""
    return replace(system, name=f"{system.name}, {kind.replace('-', ' ')}", kind=kind)


def split_names(text: str) -> list[str]:
    """Splits an argument into names of systems; commas between the options of a method belong to its name."""
    return re.split(r",(?!\s*\w+=)", text)


def parse_systems(names: Iterable[str]) -> list[System]:
    """Systems by name; `epic` alone is `epic@0.15`, `cache-craft:alpha=1` has no ratio, since alpha sets its budget.

    Raises:
        DataError: a name is unknown, or given twice; the message says what to give.
    """
    systems = [_parse(name.strip()) for name in names]
    twice = {system.name for system in systems if sum(other.name == system.name for other in systems) > 1}
    if twice:
        raise DataError(f"system {sorted(twice)[0]!r} is given twice; name each once.")
    return systems


def parse_condition(name: str) -> Condition:
    """Parses `METHOD@RATIO`; `METHOD` alone has the ratio `DEFAULT_RATIO`, or none if it has an alpha.

    Raises:
        DataError: no such method, option or ratio.
    """
    method_text, at, ratio_text = name.partition("@")
    try:
        method = parse_method(method_text)
        has_alpha = any(option == "alpha" for option, _ in method.options)
        ratio = None if has_alpha and not at else float(ratio_text) if at else DEFAULT_RATIO
    except ValueError as error:
        known = ", ".join(BASELINES)
        raise DataError(f"system {name!r}: {error}; give one of {known}, or METHOD@RATIO such as epic@0.15.") from error
    if ratio is not None and not 0 <= ratio <= 1:
        raise DataError(f"system {name!r}: the ratio {ratio:g} is not in [0, 1]; give one such as epic@0.15.")
    return Condition(method, ratio)


def label_of(condition: Condition) -> str:
    """The condition as `parse_condition` reads it."""
    return condition.label if condition.ratio is None else f"{condition.label}@{condition.ratio:g}"


def _parse(name: str) -> System:
    if name in BASELINES:
        return BASELINES[name]
    condition = parse_condition(name)
    return System(label_of(condition), "chunk", condition.request)


class Writer:
    """Writes prompts for one system; the baselines that reorder remember what they have sent.

    Attributes:
        sent: the prompts so far, with their chunks in the order in which they were sent.
    """

    def __init__(self, system: System, pool_len: int | None = None) -> None:
        """`pool_len`: tokens of the server's KV pool; orders that it has probably evicted are not followed."""
        self.system = system
        self.sent: list[Prompt] = []
        self._reorderer: Reorderer[str] | None = Reorderer(pool_len) if system.orders == "chunks" else None
        self._piloted = Piloted() if system.orders == "pilot" else None
        self._rebuilder = Rebuilder(pool_len) if system.orders == "tokens" else None
        self._set_orderer: SetOrderer[str] | None = SetOrderer() if system.orders == "sets" else None
        self._heads: set[Piece] = set()

    def body(self, prompt: Prompt) -> dict[str, Any]:
        """The request for `/generate`; call it in the order of sending.

        Raises:
            DataError: the system needs token ids, and the prompt is text.
        """
        if self._reorderer is not None:
            lengths = {chunk.key: num_tokens(chunk.content) for chunk in prompt.chunks}
            rest = num_tokens(prompt.tail) + prompt.output_len
            rest += 0 if prompt.head in self._heads else num_tokens(prompt.head)
            self._heads.add(prompt.head)
            prompt = prompt.reordered(self._reorderer.order(list(lengths), lengths.__getitem__, rest, prompt.head))
        if self._piloted is not None:
            prompt = prompt.reordered(self._piloted.order([chunk.key for chunk in prompt.chunks]))
        if self._rebuilder is not None:
            tokens = prompt.tokens
            order = self._rebuilder.order(tokens, rest_len=prompt.output_len)
            prompt = replace(prompt, head=(), chunks=(), tail=tuple(tokens[place] for place in order))
        if self._set_orderer is not None:
            keys = [chunk.key for chunk in prompt.chunks]
            prompt = prompt.reordered(self._set_orderer.order(keys, prompt.head))
        self.sent.append(prompt)
        return prompt.body(self.system.options)
