"""What other stores would have found in the same trace, without a bound: `alternative_path` (FusionRAG section 4.1).

The prefix cache is no function of its own: `simulate` with ``reuse=False``.
"""

from __future__ import annotations

from dataclasses import dataclass

from benchmark.simulate.trace import Trace


@dataclass(frozen=True, slots=True)
class Found:
    """Chunks found and computed over a whole trace, and the copies at its end."""

    num_chunks: int
    num_found: int
    stored_tokens: int
    """Of chunks, those computed in advance included."""

    @property
    def num_computed(self) -> int:
        return self.num_chunks - self.num_found


def alternative_path(trace: Trace) -> Found:
    """FusionRAG's rule as its section 4.1 words it.

    A chunk is looked for behind all chunks in front of it, then with the first of those left out, then the first two,
    and so on down to the system prompt alone. So a stored copy is found if the chunks it was computed behind stand
    directly in front of it again. A chunk that is found nowhere is computed and stored where it stands.
    """
    contexts: dict[int, set[tuple[int, ...]]] = {chunk: {()} for chunk in trace.preloaded}
    num_found = 0
    stored_tokens = sum(trace.lengths[chunk] for chunk in trace.preloaded)
    for request in trace.requests:
        for i, chunk in enumerate(request.chunks):
            known = contexts.setdefault(chunk, set())
            if any(request.chunks[j:i] in known for j in range(i + 1)):
                num_found += 1
            else:
                known.add(request.chunks[:i])
                stored_tokens += trace.lengths[chunk]
    return Found(trace.num_chunks, num_found, stored_tokens)
