"""The server's configuration of the chunk cache: `--chunk-cache-config`, parsed once, never changed."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from os.path import expanduser
from typing import Any

from chunk_cache.errors import ChunkCacheConfigError, ChunkCacheRequestError, config_error, given, known_names, show
from chunk_cache.index.victims import AGEING, EVICTIONS
from chunk_cache.methods import METHODS
from chunk_cache.methods.method_options import ALPHA, Options, OptionValue, layer_numbers
from chunk_cache.options.event_config import EventConfig, parse_events
from chunk_cache.options.selector_config import SelectorConfig, parse_selector
from chunk_cache.options.tier_config import TierConfig, parse_bytes, parse_tiers, shown_url

FLAG = "--chunk-cache-config"
KERNELS = ("auto", "torch", "triton", "flashinfer")
ATTENTIONS = ("auto", "runs", "rows")
MODELS = ("checked", "any")
SYSTEM_PROMPTS = ("any", "same")
TRUST = ("any", "warmed")
REMEMBER = ("misses", "contexts")
STATISTICS_LAYERS = ("sampled", "all", "none")


@dataclass(frozen=True, slots=True)
class Config:
    """The keys of the configuration, with the defaults that the documentation names."""

    max_variants: int = 200_000
    """Variants of all chunks together."""
    max_variants_per_chunk: int = 8
    """Variants of one chunk."""
    max_path_tokens: int = 64_000_000
    """Tokens of remembered prompts, 8 bytes each."""
    max_generation: int = 8
    """Variants of a higher generation are not used; 0 = exact variants only."""
    min_reuse_len: int = 1
    """A chunk that would bring in fewer tokens is computed, unless the request names a method or a ratio."""
    eviction: str = "lru"
    """Order in which variants are evicted from the index, and by frequency-reuse from the radix tree too: one of
    `victims.EVICTIONS`."""
    ageing: float = AGEING
    """With frequency-reuse: worth that new variants gain whenever the KV pool has been turned over once."""
    keep_share: float = 0.1
    """Largest share of the KV pool that requests leave to reused chunks while other requests run; 0 = none."""
    partition_share: float = 1.0
    """Share of the index (variants, path tokens), of each tier and of the KV pool that one partition may have. Above
    it, its own least useful variants are evicted; if the pool needs room, its tokens go first. 1 = no limit."""
    remember: str = "misses"
    """Which chunks of a prompt with reused chunks are remembered: one of `REMEMBER`. `misses`: those that it had to
    compute; `contexts`: also those that it fixed for its context (Cache-Craft section 3.3)."""
    promote_uses: int = 8
    """Uses after which a variant at the end of a cold path gets a tree node of its own; 0 = never."""
    refresh_uses: int = 0
    """Uses after which a derived variant is computed exactly while the server is idle; 0 = never."""
    verify_share: float = 0.0
    """Share of the fused requests that are verified, by an exact prefill while the server is idle; 0 = none."""
    verify_file: str | None = None
    """File that keeps the results of verification from one start to the next; None = they are not kept."""
    keep_tokens: int = 0
    """Slots per layer that a prompt takes while its answer is decoded, unless the request says how many (A3 with
    SnapKV, which loses quality); 0 = all are kept."""
    alpha: float | None = None
    """Budget by CFO for requests that give neither ratio nor alpha, if the method has alpha; 0 or null = by ratio."""
    system_prompts: str = "any"
    """Whose chunks a request is given: one of `SYSTEM_PROMPTS`. `any`: also those computed behind another system
    prompt, at the price that their CFO says; `same`: only those computed behind its own, and behind no text between
    chunks that the request does not have there."""
    trust: str = "any"
    """Whose KV a request is given: one of `TRUST`. `any`: also what was computed behind another request's passages;
    `warmed`: only what the administrator warmed, or what was computed alone, behind the request's own system prompt."""
    max_cfo: float | None = None
    """A chunk with a higher CFO is computed instead, whatever the request names; None = never."""
    shown_tokens: int = 0
    """First tokens of a passage that the administration and its page show beside its key; 0 = none."""
    models: str = "checked"
    """Models that are served: one of `MODELS`. `checked`: each that passes the check of the loaded model when a server
    starts; `any`: also those that fail the check, which is logged: their answers may be wrong."""
    kernel: str = "auto"
    """Library of our kernels: one of `KERNELS`. `auto`: on a GPU Triton, or FlashInfer if it is the attention backend
    and fits the model; torch if these fail their test at the start, and on a CPU."""
    attention: str = "auto"
    """What computes the attention of fused batches: one of `ATTENTIONS`. `runs`: SGLang's own backend, by runs of rows;
    `rows`: our kernel; `auto`: on a GPU `runs` if these are long enough to be worth it, else `rows`."""
    draft_on_gpu: bool = False
    """Whether speculative decoding with a draft model is served on a GPU too, where nobody has run it yet."""
    tiers: TierConfig | None = None
    """Tiers that keep chunks below the KV pool; None = there are none."""
    events: EventConfig | None = None
    """Where the server publishes which chunks enter and leave it; None = nowhere."""
    selector: SelectorConfig = field(default_factory=SelectorConfig)
    """How the model of `--chunk-cache-selector` runs, where there is one."""
    seam_len: int = 64
    """Tokens at the beginning of each passage that the method `seams` computes, at any ratio."""
    state_bytes: int = 8_000_000_000
    """Host memory of each rank for what passages do to the states of a model that has some, such as Qwen3.5; above it
    the least recently used passages go."""
    statistics_layers: str | tuple[int, ...] = "sampled"
    """Layers whose attention is summed up for each chunk that is computed: one of `STATISTICS_LAYERS`, or a list."""
    options: Options = ()
    """Method options for requests that leave them out; each counts for every method that has it."""

    @property
    def is_trust_limited(self) -> bool:
        """Whether only KV is used that no other request's passages can have steered."""
        return self.trust == "warmed"

    def layers_with_statistics(self, num_layers: int) -> tuple[int, ...]:
        """The layers of a model that statistics are taken at; those it does not have are left out."""
        if self.statistics_layers == "none":
            return ()
        if self.statistics_layers == "all":
            return tuple(range(num_layers))
        if self.statistics_layers == "sampled":
            return tuple(sorted({num_layers // 3, 2 * num_layers // 3}))
        return tuple(layer for layer in self.statistics_layers if isinstance(layer, int) and layer < num_layers)


def describe(config: Config) -> dict[str, Any]:
    """All keys and values, for logs and replies: without the user and password of a store, and the salt of events."""
    found = asdict(config)
    found["options"] = dict(config.options)
    if config.tiers is not None and config.tiers.remote is not None:
        found["tiers"]["remote"]["url"] = shown_url(config.tiers.remote.url)
    if config.events is not None:
        del found["events"]["salt"]
    return found


_MINIMUM = {
    "seam_len": 3,  # the convolution in front of a state reads so many inputs
    "max_variants": 1,
    "max_variants_per_chunk": 1,
    "max_path_tokens": 1,
    "max_generation": 0,
    "min_reuse_len": 1,
    "promote_uses": 0,
    "refresh_uses": 0,
    "keep_tokens": 0,
    "shown_tokens": 0,
}
_MAXIMUM = {
    "ageing": ALPHA.maximum,
    "partition_share": 1.0,
    "keep_share": 0.9,  # more would leave running requests next to nothing
    "verify_share": 1.0,
}
_CHOICES = {
    "models": MODELS,
    "kernel": KERNELS,
    "attention": ATTENTIONS,
    "eviction": EVICTIONS,
    "remember": REMEMBER,
    "system_prompts": SYSTEM_PROMPTS,
    "trust": TRUST,
}


def parse_config(value: object) -> Config:
    """Check a decoded `--chunk-cache-config`; a key with null is not given.

    Raises:
        ChunkCacheConfigError: not an object, an unknown key, or a value outside its range.
    """
    if not isinstance(value, Mapping):
        raise config_error(FLAG, f"{show(value)} is not an object", "give a JSON object")
    known = [each.name for each in fields(Config)]
    for key in value:
        if key not in known:
            raise config_error(f"{FLAG}: {key}", f"unknown key {show(key)}", known_names(key, known))
    checked: dict[str, Any] = {key: _check(key, item) for key, item in given(value).items()}
    config = Config(**checked)
    if config.verify_file is not None and not config.verify_share:
        remedy = "give verify_share too, or leave it out"
        raise config_error(f"{FLAG}: verify_file", "nothing is verified", remedy)
    return config


def _check(key: str, value: object) -> object:
    path = f"{FLAG}: {key}"
    if key in _CHOICES:
        choices = _CHOICES[key]
        if value not in choices:
            problem = f"unknown {key} {show(value)}"
            raise config_error(path, problem, f"known values: {', '.join(choices)}")
        return value
    if key in ("alpha", "max_cfo"):
        return _check_number(value, path, "give such a number, or null", ALPHA.maximum)
    if key == "partition_share" and value == 0 and not isinstance(value, bool):
        raise config_error(path, "0 lets nobody keep a chunk", "give a number in (0, 1]")
    if key in _MAXIMUM:
        return _check_number(value, path, "give such a number, or leave the key out", _MAXIMUM[key])
    if key == "draft_on_gpu":
        if not isinstance(value, bool):
            raise config_error(path, f"{show(value)} is neither true nor false", "give one of them")
        return value
    if key == "tiers":
        return parse_tiers(value, path)
    if key == "events":
        return parse_events(value, path)
    if key == "selector":
        return parse_selector(value, path)
    if key == "state_bytes":
        return parse_bytes(value, path)
    if key == "verify_file":
        return _check_file(value, path)
    if key == "options":
        return _check_options(value, path)
    if key == "statistics_layers":
        return _check_layers(value, path)
    if isinstance(value, int) and value > sys.maxsize:
        raise config_error(path, f"{show(value)} is too large", f"give at most {sys.maxsize}")
    if isinstance(value, bool) or not isinstance(value, int) or value < _MINIMUM[key]:
        problem = f"{show(value)} is not an integer of at least {_MINIMUM[key]}"
        raise config_error(path, problem, "give such an integer, or leave the key out")
    return value


def _check_number(value: object, path: str, remedy: str, maximum: float) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0.0 <= value <= maximum:
        problem = f"{show(value)} is not a number in [0, {maximum:g}]"
        raise config_error(path, problem, remedy)
    return float(value)


def _check_file(value: object, path: str) -> str:
    if not isinstance(value, str) or not value:
        raise config_error(path, f"{show(value)} is not a file", "give the path of one, or null")
    return expanduser(value)


def _check_options(value: object, path: str) -> Options:
    """Checks options of methods: each method checks those that it has, as it does with a request's."""
    if not isinstance(value, Mapping):
        raise config_error(path, f"{show(value)} is not an object", "give an object of options")
    if ALPHA.name in value:
        raise config_error(f"{path}.{ALPHA.name}", "is a key of its own", "give it beside this object")
    known = dict.fromkeys(option.name for method in METHODS.values() for option in method.options_schema)
    for name in value:
        if name not in known:
            problem, remedy = f"unknown option {show(name)}", known_names(name, known, "options")
            raise config_error(f"{path}.{name}", problem, remedy)
    checked: dict[str, OptionValue] = {}
    for method in METHODS.values():
        own = {option.name for option in method.options_schema}
        try:
            own_values = {name: one for name, one in given(value).items() if name in own}
            checked.update(method.check_options(own_values, path))
        except ChunkCacheRequestError as error:
            raise ChunkCacheConfigError(str(error)) from None
    return tuple(sorted(checked.items()))


def _check_layers(value: object, path: str) -> str | tuple[int, ...]:
    if isinstance(value, str) and value in STATISTICS_LAYERS:
        return value
    layers = layer_numbers(value)
    if layers is None:
        problem = f"{show(value)} is neither a list of layer numbers nor one of {', '.join(STATISTICS_LAYERS)}"
        raise config_error(path, problem, "count layers from 0")
    return tuple(sorted(set(layers)))
