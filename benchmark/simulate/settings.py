"""Settings of the simulated server: checked when made, never changed."""

from __future__ import annotations

from dataclasses import dataclass

from benchmark.simulate.store import POLICIES

from chunk_cache.index.victims import AGEING
from chunk_cache.options.config import REMEMBER, Config

HOLDS = ("prompts", "chunks")
_SERVER = Config()
_LEAST = {
    **dict.fromkeys(("pool_tokens", "max_variants", "max_variants_per_chunk", "max_path_tokens"), 1),
    **dict.fromkeys(("max_generation", "promote_uses"), 0),
}


class SettingsError(ValueError):
    """A setting that cannot be used; the message says which, what is wrong, and what to do."""


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of the simulated server, with the names and defaults of `--chunk-cache-config` where it has them."""

    pool_tokens: int
    """Size of the KV memory, for everything cached and the running request."""
    policy: str = "lru"
    """Eviction policy of the pool, one of `POLICIES`; `config` says which one the index has."""
    max_variants: int = _SERVER.max_variants
    max_variants_per_chunk: int = _SERVER.max_variants_per_chunk
    max_path_tokens: int = _SERVER.max_path_tokens
    max_generation: int = _SERVER.max_generation
    alpha: float | None = 1.0
    """None: recompute `ratio` of every reused chunk instead."""
    ratio: float = 0.15
    max_cfo: float | None = _SERVER.max_cfo
    reuse: bool = True
    """False: reuse only exact prefixes, as stock SGLang does (every request has mode off)."""
    holds: str = "prompts"
    """What lies in the KV memory: `prompts`: all that a server's KV pool holds, and the running request; `chunks`:
    only chunks, as in a tier beside that pool."""
    remember: str = _SERVER.remember
    counts_system: bool = True
    """False: text in front of the first chunk is not counted as context, and has no share in a CFO."""
    keep_share: float = _SERVER.keep_share
    partition_share: float = _SERVER.partition_share
    """Share of the index and of the KV memory that one tenant may have."""
    promote_uses: int = _SERVER.promote_uses
    ageing: float = _SERVER.ageing
    """With frequency-reuse: by how much the index ages when as many tokens as the memory holds were evicted."""
    seed: int = 0
    """Seed of the synthetic attention."""

    def __post_init__(self) -> None:
        for name, known in (("policy", POLICIES), ("remember", REMEMBER), ("holds", HOLDS)):
            if getattr(self, name) not in known:
                raise SettingsError(f"{name}: unknown {getattr(self, name)!r}; known: {', '.join(known)}")
        for name, least in _LEAST.items():
            if getattr(self, name) < least:
                raise SettingsError(f"{name}: {getattr(self, name)} is too small; give at least {least}")
        for name in ("alpha", "max_cfo"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < float("inf"):
                raise SettingsError(f"{name}: {value} is not a number of at least 0; give one, 1 for example")
        if not 0 <= self.ageing < float("inf"):
            raise SettingsError(
                f"ageing: {self.ageing} is not a number of at least 0; give one, {AGEING:g} as the server"
            )
        if not 0 < self.partition_share <= 1:
            raise SettingsError(f"partition_share: {self.partition_share} is not in (0, 1]; give such a number")
        if not 0 <= self.ratio <= 1:
            raise SettingsError(f"ratio: {self.ratio} is not in [0, 1]; give a number from 0 to 1")

    @property
    def config(self) -> Config:
        """The server's configuration; its index knows only lru and frequency-reuse: with lfu and fifo it uses lru."""
        return Config(
            max_variants=self.max_variants,
            max_variants_per_chunk=self.max_variants_per_chunk,
            max_path_tokens=self.max_path_tokens,
            max_generation=self.max_generation,
            alpha=self.alpha,
            max_cfo=self.max_cfo,
            remember=self.remember,
            keep_share=self.keep_share,
            partition_share=self.partition_share,
            promote_uses=self.promote_uses,
            eviction="frequency-reuse" if self.policy == "frequency-reuse" else "lru",
            ageing=self.ageing,
        )
