"""Comparison: why a request reuses nothing of earlier ones; `compare` checks its head and each of its chunks.

Promise: what the prompts and the server's present state do not tell is reported as unknown, not guessed. A request that
has run has stored its chunks, so the server's present state is what the *next* request will find.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from enum import StrEnum

from chunk_cache.advice import ADVICE, Level
from chunk_cache.index.need import Need
from chunk_cache.options.request_options import EXACT_MODES
from chunk_cache.prompt.marks import word_end
from chunk_cache.types import REASONS
from chunk_cache_tools.doctor.checks import Check
from chunk_cache_tools.doctor.request_checks import Piece, Request
from chunk_cache_tools.doctor.server_checks import Stored
from chunk_cache_tools.explain.shown_prompt import visible

SHOWN_CHARS = 12


class Cause(StrEnum):
    """Why a chunk is not reused."""

    MODE = "mode"
    UNMARKED = "not marked"
    UNUSED = "mark not used"
    UNREAD = "not read"
    SYSTEM_PROMPT = "other system prompt"
    PARTITION = "other partition"
    TOO_SHORT = "too short"
    WHITE_SPACE = "other white space"
    TOKENIZATION = "other tokenization"
    BOUNDARIES = "other boundaries"
    OTHER_TEXT = "other text"
    NOT_STORED = "not stored"


REMEDIES = {
    Cause.MODE: 'leave out "mode", or ask for "auto"',
    Cause.UNMARKED: "mark the passage in every prompt; docs/api.md shows how",
    Cause.UNUSED: 'docs/clients.md says what counts; where marks are off, send "chunk_cache": {"marks": true}',
    Cause.UNREAD: "look at the reply of the request, or give its line of the server's log, which has token ids",
    Cause.SYSTEM_PROMPT: "no reason for chunks, which are reused behind any text; only the text in front is computed",
    Cause.PARTITION: "send the same extra_key, cache_salt and adapter, if these clients may share",
    Cause.TOO_SHORT: ADVICE["too_short"][1],
    Cause.WHITE_SPACE: "write the chunk the same way every time, behind a line break, or always behind a space",
    Cause.TOKENIZATION: "give its token ids the same way every time, or mark text and let the server do it",
    Cause.BOUNDARIES: "cut the passage at the same places every time",
    Cause.OTHER_TEXT: "nothing: a chunk is reused from its second time on",
    Cause.NOT_STORED: "send it once, or warm it",
}
_BEHIND_EACH = "keep the text in front the same, or warm the chunks behind each"


def compare(
    earlier: Sequence[Request],
    later: Request,
    stored: Callable[[bytes, Need], Stored],
    need: Need,
    *,
    min_reuse_len: int,
    page_size: int,
    discovers: bool = False,
) -> Iterator[Check]:
    """Checks what keeps `later` from reusing the chunks that `earlier` requests left.

    Args:
        stored: asks what the server has now of a chunk, by its key.
        need: which variants the server gives to any request; each chunk's own context is added here.
        min_reuse_len, page_size: settings of the server.
        discovers: whether the server looks for chunks in prompts without marks.
    """
    for request in (*earlier, later):
        if request.unread:
            found = f"{request.where} has {request.unread}, so this command does not know its chunks"
            yield _warning("prompt", Cause.UNREAD, found)
    earlier = [request for request in earlier if not request.unread]
    if later.unread:
        return
    if later.unused:
        found = ", ".join(f"{path} ({reason})" for path, reason in later.unused.items())
        level = Level.OK if later.chunks else Level.WARNING
        yield Check("prompt", level, f"{found} in {later.where}", REMEDIES[Cause.UNUSED], Cause.UNUSED)
    if not later.chunks and discovers:
        found = f"{later.where} marks no chunk; --chunk-cache-discover looks for passages that were there before"
        yield Check("prompt", Level.OK, f"{found}, and the reply of the request says which it found")
        return
    if not later.chunks:
        found = f"{later.where} has no chunk, so only an exact prefix of it is reused"
        yield _warning("prompt", Cause.UNMARKED, found)
        return
    if later.mode in ("off", *EXACT_MODES):
        yield _warning("prompt", Cause.MODE, f"{later.where} asks for mode {later.mode}")
    if earlier:
        yield _head(earlier[-1], later, need)
    for index, chunk in enumerate(later.chunks):
        name = f"chunk {index}"
        least = 1 if later.names_method else min_reuse_len
        if len(chunk.ids) < least:
            found = f"{len(chunk.ids)} tokens, and min_reuse_len is {least}"
            yield _warning(name, Cause.TOO_SHORT, found)
            continue
        difference = _difference(earlier, later, chunk)
        if difference is not None:
            yield _warning(name, *difference)
        behind = replace(need, context=later.prompt.context(index), system=later.prompt.system)
        yield _store(name, later, index, stored, behind, page_size)


def _warning(name: str, cause: Cause, found: str) -> Check:
    return Check(name, Level.WARNING, found, REMEDIES[cause], cause)


def _head(earlier: Request, later: Request, need: Need) -> Check:
    a, b = earlier.head, later.head
    if a.ids == b.ids:
        return Check("text in front", Level.OK, f"the same {len(b.ids)} tokens in both prompts")
    same = next((i for i, (x, y) in enumerate(zip(a.ids, b.ids, strict=False)) if x != y), min(len(a.ids), len(b.ids)))
    found = f"as in {earlier.where} up to token {same}, where the exact prefix ends"
    found += f" ({_first_difference(a.text, b.text)})"
    if need.is_system_fixed:
        found += "; this server gives a chunk only what was computed behind the same"
        return Check("text in front", Level.WARNING, found, _BEHIND_EACH, Cause.SYSTEM_PROMPT)
    return Check("text in front", Level.OK, found, REMEDIES[Cause.SYSTEM_PROMPT], Cause.SYSTEM_PROMPT)


def _difference(earlier: Sequence[Request], later: Request, chunk: Piece) -> tuple[Cause, str] | None:
    """How a chunk differs from the most similar chunk of the earlier requests; None if nothing prevents reuse."""
    if not earlier:
        return None
    same_ids = [request for request in earlier for one in request.chunks if one.ids == chunk.ids]
    sharing = [request for request in same_ids if _share(request, later)]
    if any(request.mode != "off" for request in sharing):
        return None
    if sharing:
        return Cause.MODE, f"{sharing[-1].where} asks for mode off, so nothing of it was remembered"
    if same_ids:
        other = same_ids[-1]
        return Cause.PARTITION, f"{_partition(other)} in {other.where}, {_partition(later)} in {later.where}"
    every = [(request, one) for request in reversed(earlier) for one in request.chunks]
    for request, one in every:
        if one.text == chunk.text:
            found = f"{len(one.ids)} tokens in {request.where}, {len(chunk.ids)} here, for the same text"
            return Cause.TOKENIZATION, found
    for request, one in every:
        if _words(one.text) == _words(chunk.text):
            return Cause.WHITE_SPACE, f"{_first_difference(one.text, chunk.text)}, in {request.where} and here"
    core = chunk.text.strip()
    for request, one in every:
        if core in one.text or one.text.strip() in chunk.text:
            lengths = f"{len(one.ids)} tokens in {request.where}, {len(chunk.ids)} here"
            return Cause.BOUNDARIES, f"one chunk is a part of the other ({lengths})"
    for request in reversed(earlier):
        if core in request.text:
            unused = "".join(f"; {path} is not used ({why})" for path, why in request.unused.items())
            return Cause.UNMARKED, f"the text stands in {request.where} outside of its chunks{unused}"
    return Cause.OTHER_TEXT, "no earlier prompt has this text"


def _words(text: str) -> list[str]:
    """The words of a chunk, without the punctuation at its end, which its tokens may leave out."""
    core = text.strip()
    return core[: word_end(core)].split()


def _share(one: Request, other: Request) -> bool:
    return (one.partition, one.adapter) == (other.partition, other.adapter)


def _partition(request: Request) -> str:
    fields = (request.partition.extra_key, request.partition.cache_salt, request.adapter)
    named = zip(("extra_key", "cache_salt", "adapter"), fields, strict=True)
    return ", ".join(f"{name} {value!r}" for name, value in named if value is not None) or "no partition"


def _first_difference(a: str, b: str) -> str:
    """Words such as `'one.' and 'one.\\n' at character 17`."""
    place = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    start = max(0, place - SHOWN_CHARS // 2)
    shown = (f"'{visible(text[start : place + SHOWN_CHARS])}'" for text in (a, b))
    return f"{' and '.join(shown)} at character {place}"


def _store(
    name: str, later: Request, index: int, stored: Callable[[bytes, Need], Stored], need: Need, page_size: int
) -> Check:
    """A check of what the next request with exactly this chunk will find."""
    if later.adapter is not None:
        return Check(name, Level.OK, "whether it is stored is unknown: chunks of an adapter cannot be asked for")
    found, length = stored(later.prompt.keys[index], need), later.prompt.length(index)
    if found.tokens:
        words = (
            f"{found.tokens} of {length} tokens are stored now ({', '.join(found.kinds)}), for the next request with it"
        )
        if length < page_size:
            words += f"; shorter than a page of {page_size}, it is reused only together with chunks behind it"
            return _warning(name, Cause.TOO_SHORT, words)
        return Check(name, Level.OK, words)
    if found.below:
        words = f"stored below the KV pool now ({', '.join(found.below)}), for the next request with it"
        if need.is_system_fixed:
            words += ", if that was computed behind what this server asks for, which is unknown"
        return Check(name, Level.OK, words)
    if found.reason != "not_stored":
        level, remedy = ADVICE[found.reason]
        return Check(name, level, REASONS[found.reason].rstrip("."), remedy, found.reason)
    words = f"not known to this server: never computed with {_partition(later)} since the start or a flush"
    return _warning(name, Cause.NOT_STORED, f"{words}, or evicted so long ago that it is forgotten")
