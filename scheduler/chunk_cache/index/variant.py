"""Variants: one stored key-value cache of a chunk, and where it lives.

The radix tree is the store; a variant only remembers its home, of which there are two kinds:

    PathHome   a span of an exactly computed prompt: free, but it lives only as long as its whole prefix
    NodeHome   a tree node of its own under a namespace of ours: for chunks computed inside a fused request

A home may be gone at any time. Each lookup asks the tree again, in which an evicted variant is a shorter match.
"""

from __future__ import annotations

import hashlib
import secrets
from array import array
from dataclasses import dataclass, field
from typing import TypeAlias

from chunk_cache.index.chunk_statistics import ChunkStatistics
from chunk_cache.keys import Partition

SHOWN_ID_SECRET = bytearray(secrets.token_bytes(16))
"""Makes shown numbers unguessable; tensor-parallel ranks take that of the first, since their answers must agree."""
_LENGTHS = [bytes((length,)) for length in range(256)]


def shown_id(variant_id: int) -> int:
    """The number by which replies name a variant, below 2**48.

    Ids of the index count the variants of all tenants: two of them would show how many others stored in between.
    """
    digest = hashlib.blake2b(variant_id.to_bytes(8, "big"), digest_size=6, key=SHOWN_ID_SECRET).digest()
    return int.from_bytes(digest, "big")


@dataclass(eq=False, slots=True)
class PathTokens:
    """The tokens of one exactly computed prompt, shared by the variants in it; compared by identity.

    `tokens` must not change once a variant with this path is in an index. `seen` is the store's own note of where it
    last saw the path; nobody else reads or writes it.
    """

    tokens: array[int]
    partition: Partition
    seen: object = None

    def __len__(self) -> int:
        return len(self.tokens)

    def __repr__(self) -> str:
        return f"PathTokens({len(self.tokens)} tokens, {self.partition})"


@dataclass(frozen=True, slots=True)
class PathHome:
    """The chunk lies at ``path.tokens[start:start + length]``."""

    path: PathTokens
    start: int


@dataclass(eq=False, slots=True)
class NodeHome:
    """A tree node of the chunk's own; compared by identity.

    `node_key` holds the chunk's tokens, padded by the store to whole pages. `seen` belongs to the store, as in
    `PathTokens`. `variant_id` belongs to the index: the variant that lives here, -1 = none.
    """

    node_key: array[int]
    namespace: str
    seen: object = None
    variant_id: int = -1
    partition: Partition = field(default_factory=Partition)

    def __repr__(self) -> str:
        return f"NodeHome({len(self.node_key)} tokens, {self.namespace!r})"


Home: TypeAlias = PathHome | NodeHome


def holder_of(home: Home) -> PathTokens | NodeHome:
    """The path or node that a home is in, which several variants may share."""
    return home.path if isinstance(home, PathHome) else home


def path_start_of(home: Home) -> int:
    """Where in its path a home begins; 0 without a path."""
    return home.start if isinstance(home, PathHome) else 0


def check_home(home: Home, length: int, start: int, generation: int) -> None:
    """Asserts that a variant with these numbers can live in `home`."""
    assert length > 0, f"a chunk of {length} tokens"
    assert min(start, generation) >= 0, f"start {start}, generation {generation}"
    if isinstance(home, PathHome):
        assert generation == 0, f"a path holds exact KV only, not generation {generation}"
        # Images take fewer positions than tokens.
        assert start <= home.start, f"at {home.start} in its path, but computed at position {start}"
        assert home.start + length <= len(home.path), f"{home.start} + {length} is outside {home.path}"
    else:
        assert len(home.node_key) >= length, f"{home} is shorter than the chunk's {length} tokens"


def usable_len(covered_len: int, length: int) -> int:
    """How many of a chunk's `covered_len` stored leading tokens may be used: all, or none if less than half is stored.

    Tokens that two chunks begin with, such as a title, stay when one of the two is evicted; such a remnant would keep
    that chunk from being remembered again.
    """
    return covered_len if 2 * covered_len >= length else 0


Rank: TypeAlias = tuple[int, bool]
"""Smaller is better: where a chunk has too many variants, none evicts one of a smaller rank."""


def rank_of(generation: int, is_prepared: bool) -> Rank:
    """By generation; a prepared variant before the other derived ones."""
    return generation, not is_prepared


def variant_name(start: int, generation: int, is_prepared: bool, system: bytes, context: tuple[bytes, ...]) -> str:
    """A name, 8 bytes in hex, that tells the variants of one chunk apart in every tier of every server."""
    kind = ",prepared" if is_prepared else ""
    hasher = hashlib.blake2b(f"{start},{generation}{kind}".encode(), digest_size=8)
    hasher.update(system)
    hasher.update(b"".join([part for key in context for part in (_LENGTHS[len(key)], key)]))
    return hasher.hexdigest()


@dataclass(eq=False, slots=True)
class Variant:
    """One stored key-value cache of a chunk, computed in one context; compared by identity.

    Only the `ChunkIndex` that has it writes to it: `holder`, `num_uses`, `last_use`, `reuse_frequency`, `statistics`
    change while it lives.
    """

    variant_id: int
    key: bytes
    length: int
    """Tokens of the chunk."""
    start: int
    """Rotary position of the first token when the KV was computed."""
    generation: int
    """0 = exact; otherwise 1 + the largest generation in its context."""
    prompt_keys: tuple[bytes, ...]
    """The pieces of its prompt (`ChunkPrompt`), one object for all variants of the prompt."""
    num_before: int
    """How many of these pieces stood in front of the chunk."""
    holder: PathTokens | NodeHome
    """What keeps its KV; in a path it lies at `path_start`."""
    path_start: int = 0
    """Place of the first token in its path, larger than `start` if images stand in front; 0 without a path."""
    num_uses: int = 0
    last_use: int = 0
    """The index's logical clock at the last use; larger is more recent."""
    reuse_frequency: float = 0.0
    """f_r: uses, each weighed by how little had to be fixed (Cache-Craft section 3.3)."""
    statistics: ChunkStatistics | None = None
    """None where the server takes none, or the KV was found and not computed."""
    is_prepared: bool = False
    """Computed ahead of time, for any prompt: behind filler, or behind the KV of similar chunks (FusionRAG eq. 10)."""
    system: bytes = b""
    """Marks of the system prompt in front of all pieces (`chunk_cache.index.system_prompt`)."""
    _name: str = field(default="", init=False, repr=False)  # made when it is first asked for

    @property
    def home(self) -> Home:
        """Where its KV lies."""
        holder = self.holder
        return PathHome(holder, self.path_start) if isinstance(holder, PathTokens) else holder

    @property
    def token_ids(self) -> array[int]:
        """Token ids of the chunk, from where its KV lies."""
        holder = self.holder
        if isinstance(holder, PathTokens):
            return holder.tokens[self.path_start : self.path_start + self.length]
        return holder.node_key[: self.length]

    @property
    def context(self) -> tuple[bytes, ...]:
        """Keys of the pieces that stood between the system prompt and the chunk."""
        return self.prompt_keys[: self.num_before]

    @property
    def name(self) -> str:
        """See `variant_name`."""
        if not self._name:
            self._name = variant_name(self.start, self.generation, self.is_prepared, self.system, self.context)
        return self._name

    @property
    def kind(self) -> str:
        """`prepared` ahead of time for any prompt, `alone` behind a system prompt only, `met` behind other chunks of a
        prompt, `derived` behind KV that was reused there.
        """
        if self.is_prepared:
            return "prepared"
        if self.generation:
            return "derived"
        return "met" if self.num_before else "alone"

    @property
    def is_exact(self) -> bool:
        return self.generation == 0

    @property
    def rank(self) -> Rank:
        return rank_of(self.generation, self.is_prepared)

    def __repr__(self) -> str:
        prepared = " prepared," if self.is_prepared else ""
        return (
            f"Variant({self.variant_id},{prepared} key={self.key.hex()[:8]}, length={self.length}, start={self.start}, "
            f"generation={self.generation}, num_uses={self.num_uses}, f_r={self.reuse_frequency:g}, home={self.home})"
        )
