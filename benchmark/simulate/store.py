"""Pool: the KV memory of the simulated server, as a tree of chunks with a bounded number of tokens.

    match       the nodes of a prompt's exact prefix
    reserve     makes room for a running request; evicts leaves by policy, never locked ones
    add_path    stores an exact prompt: a chain of nodes that other prompts can share
    add_own     stores a chunk that a fused request computed, in a node of its own
    use, use_prefix   count that a variant was reused from a node; that a prompt began with these nodes

The pool models SGLang's radix tree with one node per chunk, and the two homes of a variant
(`chunk_cache.index.variant`). Only leaves are evicted. Partitions (tenants) share no node; leaves of partitions above
their share are evicted first. Not modelled: pages, splits inside a chunk, tokens of answers in the tree.

Policies evict the leaf that is: `lru` least recently used; `fifo` oldest; `lfu` least often used; `frequency-reuse` of
least worth, like the server's priorities: a new node is worth the index's age, and a use raises the node, and those in
front of it, to the worth of its variant (`chunk_cache.index.victims`). Of equals, the least recently used is evicted.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import TypeAlias

from chunk_cache.index.quota import Shares
from chunk_cache.index.variant import Variant
from chunk_cache.keys import DEFAULT_PARTITION

POLICIES = ("lru", "lfu", "fifo", "frequency-reuse")
SYSTEM = -1
"""Label of the system prompt; chunks are numbered from 0, labels below -1 are for everything else."""

Score: TypeAlias = tuple[float, int]
"""The node with the lowest is evicted first."""


class Node:
    """Tokens of one chunk (or of the system prompt, or of a question) behind its parent's."""

    __slots__ = (
        *(
            "children",
            "created",
            "is_stored",
            "label",
            "last_use",
            "length",
            "num_locks",
            "num_uses",
            "owner",
            "parent",
        ),
        *("ticket", "variant", "worth"),
    )

    def __init__(self, parent: Node | None, label: int, length: int, clock: int, owner: bytes) -> None:
        self.parent = parent
        self.owner = owner
        self.label = label
        self.length = length
        self.children: dict[int, Node] = {}
        self.created = self.last_use = clock
        self.num_uses = 0
        self.num_locks = 0
        self.is_stored = True
        self.variant: Variant | None = None
        self.worth = 0
        """The eviction priority, as on the server: an integer that never falls."""
        self.ticket = 0
        """Ticket of its valid entry in the pool's queue; entries with other tickets are ignored."""

    def __repr__(self) -> str:
        return f"Node({self.label}, {self.length} tokens, {self.num_uses} uses)"

    def behind(self) -> Iterator[Node]:
        """The node and those in front of it, without the root."""
        node = self
        while node.parent is not None:
            yield node
            node = node.parent


class Pool:
    """See the head of this file.

    Args:
        capacity: tokens of cached nodes and running requests together.
        policy: one of `POLICIES`.
        share: share of the capacity that one partition may keep when room is needed; 1 = all.
        age: what a new node is worth; only `frequency-reuse` compares it.
        on_evicted: called with the number of tokens just evicted.
    """

    def __init__(
        self,
        capacity: int,
        policy: str,
        *,
        share: float = 1.0,
        age: Callable[[], float] = float,
        on_evicted: Callable[[int], None] | None = None,
    ) -> None:
        assert policy in POLICIES, f"unknown policy {policy!r}"
        self._age = age
        self._on_evicted = on_evicted
        self.capacity = capacity
        self.policy = policy
        self.num_stored = 0
        """Tokens in nodes."""
        self.num_reserved = 0
        """Tokens of running requests that are in no node."""
        self.num_locked = 0
        """Tokens in locked nodes."""
        self.num_evicted = 0
        self.version = 0
        """A number that changes whenever an answer of `resolve` may have changed."""
        self.shares = Shares(capacity, share)
        """Tokens of each partition, by its `Partition.key`."""
        self._roots: dict[bytes, Node] = {}
        self._nodes: dict[int, Node] = {}  # variant id -> its node
        self._heaps: dict[bytes, list[tuple[Score, int, Node]]] = {}
        self._num_leaves = 0
        self._num_own = 0
        self._serial = 0
        self._clock = 0

    # Lookup.

    def match(self, labels: Iterable[int], owner: bytes = DEFAULT_PARTITION) -> list[Node]:
        """The stored nodes of the longest exact prefix."""
        nodes, node = [], self._root_of(owner)
        for label in labels:
            child = node.children.get(label)
            if child is None:
                break
            nodes.append(child)
            node = child
        return nodes

    def node_of(self, variant: Variant) -> Node | None:
        """Where a variant lives; None when it has been evicted."""
        return self._nodes.get(variant.variant_id)

    def resolve(self, variant: Variant) -> int:
        """How many leading tokens of a variant are stored; the index asks this."""
        return variant.length if variant.variant_id in self._nodes else 0

    def use(self, node: Node, worth: float = 0.0) -> None:
        """Counts a reuse of the variant in this node; nodes in front get its last use and worth, but count no use.

        Args:
            worth: worth of the variant, in the unit of the age.
        """
        self._clock += 1
        for one in node.behind():
            one.last_use = self._clock
            one.worth = max(one.worth, int(worth))
        node.num_uses += 1
        self._queue(node)

    def use_prefix(self, nodes: Sequence[Node]) -> None:
        """Counts that a prompt began with these nodes."""
        self._clock += 1
        for node in nodes:
            node.last_use = self._clock
            node.num_uses += 1
            self._queue(node)

    def lock(self, nodes: Iterable[Node]) -> None:
        """Keeps these nodes, and those in front of them, until `unlock`."""
        for node in nodes:
            for one in node.behind():
                self.num_locked += 0 if one.num_locks else one.length
                one.num_locks += 1

    def unlock(self, nodes: Iterable[Node]) -> None:
        for node in nodes:
            for one in node.behind():
                one.num_locks -= 1
                self.num_locked -= 0 if one.num_locks else one.length

    # Room.

    @property
    def num_free(self) -> int:
        """Tokens that are unused, or can be evicted."""
        return self.capacity - self.num_reserved - self.num_locked

    def reserve(self, num_tokens: int) -> bool:
        """Makes room for a running request; returns False and reserves nothing if locked nodes leave too little."""
        before = self.num_stored
        has_room = True
        while has_room and self.num_stored + self.num_reserved + num_tokens > self.capacity:
            has_room = self._evict_one()
        if has_room:
            self.num_reserved += num_tokens
        if self._on_evicted is not None and before > self.num_stored:
            self._on_evicted(before - self.num_stored)
        return has_room

    def evict(self, node: Node) -> None:
        """Removes a leaf."""
        parent = node.parent
        assert parent is not None, "the root stays"
        del parent.children[node.label]
        node.is_stored = False
        self.num_stored -= node.length
        self.shares.remove(node.owner, node.length)
        self.num_evicted += 1
        self._num_leaves -= 1
        if node.variant is not None:
            self.version += 1
            del self._nodes[node.variant.variant_id]
        if parent.parent is not None and not parent.children:
            self._num_leaves += 1
            self._queue(parent)

    def release(self, num_left: int = 0) -> None:
        """Called when a running request is over; the others still hold `num_left` tokens."""
        self.num_reserved = num_left

    # Storing. New nodes take over reserved tokens.

    def add_path(self, labels: Sequence[int], lengths: Sequence[int], owner: bytes = DEFAULT_PARTITION) -> list[Node]:
        """Returns the nodes of an exact prompt, one per label; creates those that are missing."""
        nodes, node = [], self._root_of(owner)
        for label, length in zip(labels, lengths, strict=True):
            child = node.children.get(label)
            if child is None:
                child = self._add(node, label, length)
            child.worth = max(child.worth, int(self._age()))
            nodes.append(child)
            node = child
        return nodes

    def add_own(self, length: int, worth: float = 0.0, owner: bytes = DEFAULT_PARTITION) -> Node:
        """Creates a node that `match` never finds."""
        self._num_own += 1
        return self._add(self._root_of(owner), SYSTEM - self._num_own, length, worth)

    def settle(self, node: Node, variant: Variant) -> None:
        """Notes that the variant lives in this node from now on."""
        self.version += 1
        assert node.is_stored, f"{variant} in {node}, which is gone"
        left = self._nodes.get(variant.variant_id)
        if left is not None and left is not node:
            left.variant = None
        if node.variant is not None and node.variant is not variant:
            del self._nodes[node.variant.variant_id]
        node.variant = variant
        self._nodes[variant.variant_id] = node

    def score(self, node: Node) -> Score:
        """What the policy compares; the lowest is evicted first."""
        if self.policy == "lru":
            return 0.0, node.last_use
        if self.policy == "fifo":
            return 0.0, node.created
        return float(node.num_uses if self.policy == "lfu" else node.worth), node.last_use

    def num_dead(self, is_known: Callable[[Variant], bool]) -> int:
        """Tokens of nodes of `add_own` whose variant the index has dropped: no request finds them again."""
        own = (node for root in self._roots.values() for label, node in root.children.items() if label < SYSTEM)
        return sum(node.length for node in own if node.variant is None or not is_known(node.variant))

    def check_integrity(self) -> None:
        """Recounts everything from scratch.

        Raises:
            AssertionError: a count differs.
        """
        nodes = [node for root in self._roots.values() for node in self._walk(root)]
        assert self.num_stored == sum(node.length for node in nodes), "stored tokens"
        assert self.num_locked == sum(node.length for node in nodes if node.num_locks), "locked tokens"
        assert self.num_stored + self.num_reserved <= self.capacity, "over capacity"
        assert self._num_leaves == sum(not node.children for node in nodes), "leaves"
        assert all(node.is_stored for node in nodes), "an evicted node is in the tree"
        homes = {node.variant.variant_id: node for node in nodes if node.variant is not None}
        assert homes == self._nodes, f"nodes say {homes}, variants {self._nodes}"
        held = {owner: sum(node.length for node in self._walk(root)) for owner, root in self._roots.items()}
        self.shares.check_integrity(held)
        heaps = chain.from_iterable(self._heaps.values())
        queued = {node for score, ticket, node in heaps if ticket == node.ticket and score == self.score(node)}
        missing = [node for node in nodes if not node.children and node not in queued]
        assert not missing, f"leaves that are never evicted: {missing}"

    def _root_of(self, owner: bytes) -> Node:
        if owner not in self._roots:
            self._roots[owner] = Node(None, 0, 0, 0, owner)
        return self._roots[owner]

    def _walk(self, node: Node) -> Iterator[Node]:
        for child in node.children.values():
            yield child
            yield from self._walk(child)

    def _add(self, parent: Node, label: int, length: int, worth: float = 0.0) -> Node:
        assert self.num_reserved >= length, f"{length} tokens of {self.num_reserved} reserved ones"
        self._clock += 1
        node = Node(parent, label, length, self._clock, parent.owner)
        node.worth = int(max(worth, self._age()))
        self._num_leaves += 1 if parent.parent is None or parent.children else 0
        parent.children[label] = node
        self.num_stored += length
        self.shares.add(node.owner, length)
        self.num_reserved -= length
        self._queue(node)
        return node

    def _queue(self, node: Node) -> None:
        """Queues a leaf after its score has changed or it became a leaf."""
        if node.children:
            return
        self._serial += 1
        node.ticket = self._serial
        heap = self._heaps.setdefault(node.owner, [])
        heapq.heappush(heap, (self.score(node), node.ticket, node))
        if len(heap) > 4 * self._num_leaves + 1024:
            # A node with children is queued again when it has lost them.
            heap[:] = [entry for entry in heap if entry[1] == entry[2].ticket and not entry[2].children]
            heapq.heapify(heap)

    def _evict_one(self) -> bool:
        return self._evict_of(self.shares.above) or self._evict_of(self._heaps)

    def _evict_of(self, owners: Iterable[bytes]) -> bool:
        """Evicts one leaf of these partitions; False if there is none that is not locked."""
        heaps = [heap for owner in owners if (heap := self._heaps.get(owner))]
        locked = []
        is_evicted = False
        while heaps and not is_evicted:
            heap = min(heaps, key=lambda one: one[0])
            _, ticket, node = heapq.heappop(heap)
            if not heap:
                heaps = [one for one in heaps if one]
            if ticket != node.ticket or not node.is_stored or node.children:
                continue
            if node.num_locks:
                locked.append(node)
            else:
                self.evict(node)
                is_evicted = True
        for node in locked:
            self._queue(node)
        return is_evicted
