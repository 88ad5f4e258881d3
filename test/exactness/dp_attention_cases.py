"""Cases of data-parallel attention, where each rank has its own requests: those of `cases`, and reuse with few rows."""

from __future__ import annotations

from typing import Any

from chunk_cache.methods import METHODS, Stage
from exactness import cases
from exactness.cases import Session
from exactness.tier_cases import only_on_disk

EARLY = tuple(name for name, method in METHODS.items() if method.stage is Stage.BEFORE and not method.asks_selector)
"""Methods that know their rows before the forward."""


def few_rows(s: Session, seed: int) -> None:
    """Every such method at ratio 0.15, with other requests and alone; what it finds follows from the seed."""
    s.rng.seed(seed)
    chunks = s.chunks(40, 33, 51, 64)
    s.prime(chunks)
    for method in EARLY:
        order = s.rng.sample(chunks, 3)
        fields: dict[str, Any] = {"ratio": 0.15, "options": {"method": method}}
        plain = s.request(s.prompt([s.tokens(30 + seed)]), marked=False)
        s.replies += s.local.generate([s.request(s.prompt(order), **fields), plain])
        (reply,) = s.send(s.prompt(order[::-1]), **fields)
        assert reply.info["reused_tokens"] > 0, reply.info


def from_disk(s: Session) -> None:
    """Chunks that come up from a folder of all ranks; each reply in front of that without reuse."""
    chunks = s.chunks(40, 33, 51)
    s.prime(chunks)
    only_on_disk(s)
    s.replies.clear()
    for order in ([2, 0, 1], [1, 2, 0]):
        prompt = s.prompt([chunks[i] for i in order])
        (reply,) = s.send(prompt)
        assert [chunk["tier"] for chunk in reply.info["chunks"]] == ["disk"] * 3, reply.info
        s.send(prompt, options={"mode": "off"})
        only_on_disk(s)


ALONE = {"weights_without_a_flush"}
"""Cases that all ranks must run at once: weights are changed on all."""
CASES = {name: case for name, case in cases.CASES.items() if name not in ALONE} | {
    "few_rows": few_rows,
    "from_disk": from_disk,
}
