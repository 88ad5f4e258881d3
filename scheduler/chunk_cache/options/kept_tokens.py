"""KeptTokens: which tokens of a prompt decoding keeps, and how many of the others (SnapKV, as A3 uses it).

    0              begin                       end              prompt_len
    | system prompt | chunks, text between them | question ...  | answer ...
    |   all kept    | the best `room` per layer |    all kept
                    | and KV head               |

The last tokens of a prompt are always kept, as in SnapKV: they are the window from which the others are judged.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from chunk_cache.errors import request_error
from chunk_cache.types import Span

WINDOW_LEN = 32
"""Last tokens of a prompt, whose attention judges the others; the value of SnapKV's runs on LongBench."""
POOLING_LEN = 7
"""Window of the max pooling of scores, so that words are kept whole; the value of the same runs."""


@dataclass(frozen=True, slots=True)
class KeptTokens:
    """What decoding keeps of a prompt.

    Attributes:
        begin, end: of the positions of which some are dropped.
        room: how many of them each layer and KV head keeps; at least 1.
    """

    begin: int
    end: int
    room: int

    @property
    def num_dropped(self) -> int:
        """Tokens that each layer and KV head drops, and so slots that the prompt does not need."""
        return self.end - self.begin - self.room

    @property
    def whole(self) -> KeptTokens:
        """The same, but nothing is dropped: there was no room for the copy."""
        return replace(self, room=self.end - self.begin)


def droppable(spans: tuple[Span, ...], prompt_len: int) -> Span:
    """The positions of a prompt of which some may be dropped; empty where there are no chunks in front of its end."""
    begin = spans[0][0] if spans else prompt_len
    return begin, max(begin, min(spans[-1][1], prompt_len - WINDOW_LEN) if spans else begin)


def plan_kept(spans: tuple[Span, ...], keep_tokens: int | None, prompt_len: int) -> KeptTokens | None:
    """What is kept of a prompt that shall need `keep_tokens` slots; None = all of it.

    None also if the tokens that are kept in any case leave no room.

    Args:
        keep_tokens: 0 or None = all.
    """
    if not keep_tokens or keep_tokens >= prompt_len:
        return None
    begin, end = droppable(spans, prompt_len)
    room = keep_tokens - (prompt_len - (end - begin))
    return KeptTokens(begin, end, room) if 0 < room < end - begin else None


def check_room(spans: tuple[Span, ...], keep_tokens: int | None, prompt_len: int, path: str) -> None:
    """Checks that a request which names `keep_tokens` leaves room for tokens of its chunks.

    Raises:
        ChunkCacheRequestError: it does not.
    """
    if not keep_tokens or keep_tokens >= prompt_len or not spans:
        return
    begin, end = droppable(spans, prompt_len)
    num_kept = prompt_len - (end - begin)
    if keep_tokens <= num_kept:
        problem = (
            f"{keep_tokens}, and {num_kept} tokens are kept in any case: what stands in front of the first chunk and "
            f"behind the last, and the last {WINDOW_LEN}"
        )
        raise request_error(path, problem, "give more, or 0 to keep all")
