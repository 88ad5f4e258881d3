"""Checks of a running server: `server_checks`. `DoctorClient` sends the requests, which change nothing on the server.

Verbs of the client: `info`, `stats`, `chunk_counts` (marked chunks by status and reason), `stored` (what the server has
of one chunk).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from http import HTTPStatus
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from chunk_cache.advice import ADVICE, Level
from chunk_cache.index.need import Need
from chunk_cache.types import REASONS
from chunk_cache_tools.doctor.checks import Check
from chunk_cache_tools.requirements import pinned
from chunk_cache_tools.server_client import ServerClient

REUSED = ("hit", "prefix")
Counts = Counter[tuple[str, str]]
"""Number of chunks by (status, reason); the reason is `none` if there is none."""


@dataclass(frozen=True)
class Stored:
    """What a server has of one chunk.

    Attributes:
        tokens: most leading tokens in the KV pool of a variant that the request may be given.
        kinds: kinds of all variants in the pool that the request may be given.
        below: tiers below the pool that are known to have a variant.
        reason: why there are no tokens, one of `chunk_cache.types.REASONS`.
    """

    tokens: int = 0
    kinds: tuple[str, ...] = ()
    below: tuple[str, ...] = ()
    reason: str = "not_stored"


@dataclass(frozen=True)
class ToldVariant:
    """One variant, as a server describes it."""

    tokens: int
    kind: str
    generation: int
    is_prepared: bool
    system: bytes
    context: tuple[bytes, ...]
    statistics: None = None

    @classmethod
    def of(cls, told: Mapping[str, Any]) -> ToldVariant:
        """Reads the server's JSON."""
        context = tuple(map(bytes.fromhex, told["context"]))
        kind, system = told["kind"], bytes.fromhex(told["system"])
        return cls(told["stored_tokens"], kind, told["generation"], kind == "prepared", system, context)


class DoctorClient(ServerClient):
    """See the head of this file; its verbs raise as `ServerClient.send`."""

    @cached_property
    def info(self) -> dict[str, Any]:
        """SGLang's own options and version."""
        return self.ask("GET", "/server_info")

    @cached_property
    def stats(self) -> dict[str, Any]:
        """State of the chunk cache (docs/admin.md)."""
        return self.ask("GET", "/chunk_cache/stats", has=("config", "ranks"))

    def chunk_counts(self) -> Counts | None:
        """Counts since the start of the server; None if it does not count (no metrics)."""
        response = self._look("/metrics")
        return None if response.status_code == HTTPStatus.NOT_FOUND else count_chunks(response.text)

    def stored(self, key: bytes, need: Need) -> Stored:
        """What the server has of a chunk that a prompt may use, by its `Need`."""
        response = self._look(f"/chunk_cache/variants?key={key.hex()}")
        if response.status_code == HTTPStatus.NOT_FOUND:
            error = response.json()["error"]
            return Stored(below=tuple(error["tiers"]), reason=error["reason"])
        found = response.json()
        return stored_of([ToldVariant.of(one) for one in found["variants"]], tuple(found["tiers"]), need)

    def _look(self, path: str) -> httpx.Response:
        """The response to a GET, whose status is a success or 404."""
        with self._told():
            response = self.http.get(path, follow_redirects=True)
        if response.status_code != HTTPStatus.NOT_FOUND:
            self._check(response)
        return response


def stored_of(variants: Sequence[ToldVariant], below: tuple[str, ...], need: Need) -> Stored:
    """What a prompt may be given of the variants of a chunk, by the rules of `ChunkIndex.best`."""
    allowed, obstacle = need.sort_out(variants)
    there = [one for one in allowed if one.tokens]
    if there:
        return Stored(max(one.tokens for one in there), tuple(sorted({one.kind for one in there})), below)
    return Stored(below=below, reason=obstacle or "evicted")


def count_chunks(text: str) -> Counts:
    """The counts of chunks in the text of `/metrics`, summed over processes."""
    counts: Counts = Counter()
    with suppress(ValueError, KeyError):  # some page, of no SGLang server; what is asked next says so
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if sample.name == "sglang:chunk_cache_chunks_total":
                    counts[sample.labels["status"], sample.labels["reason"]] += int(sample.value)
    return counts


def server_checks(client: DoctorClient, counts: Counts | None) -> Iterator[Check]:
    """Checks of version, options, tiers and reuse.

    Args:
        counts: chunks of the requests that are judged; None = the server does not count.
    """
    yield _version(client.info)
    yield _options(client)
    for rank in client.stats["ranks"]:
        yield from tier_checks(rank)
    yield from reuse_checks(counts, client.stats["config"]["separator"])


def _version(info: Mapping[str, Any]) -> Check:
    wanted, found = pinned("sglang"), str(info.get("version"))
    if wanted.contains(found, prereleases=True):
        return Check("SGLang", Level.OK, found)
    return Check(
        "SGLang", Level.WARNING, f"{found}, and this command is of sglang{wanted}", "use the server's own environment"
    )


def _options(client: DoctorClient) -> Check:
    config, pool = client.stats["config"], client.stats["ranks"][0]["tiers"]["pool"]
    words = (
        str(client.info.get("model_path")),
        f"on {client.info.get('device')}",
        f"{config['method']} at {config['ratio']}",
        f"separator {config['separator']!r}",
        f"min_reuse_len {config['min_reuse_len']}",
        f"page size {client.info.get('page_size')}",
        f"{pool['tokens']} tokens of chunks in a pool of {pool['capacity_tokens']}",
    )
    return Check("server", Level.OK, ", ".join(words))


def tier_checks(rank: Mapping[str, Any]) -> Iterator[Check]:
    """Checks of the tiers of one scheduler process."""
    if rank.get("disabled"):
        yield Check("tiers", Level.FAILURE, f"off because {rank['disabled']}", "start the server anew")
    for name, tier in rank["tiers"].items():
        if name == "pool":
            continue
        label = f"tier {name}" + (f" of rank {rank['tp_rank']}" if rank["tp_rank"] or rank["dp_rank"] else "")
        found = f"{tier['entries']} entries, {tier['bytes'] / 1e6:.1f} MB, loaded {tier['hits']} times"
        if tier["hits"]:
            found += f", about {1e3 * tier['latency_s']:.1f} ms and {tier['bytes_per_s'] / 1e6:.0f} MB/s"
        if tier["corrupt"]:
            _, remedy = ADVICE["tier_corrupt"]
            yield Check(label, Level.FAILURE, f"{found}; {tier['corrupt']} were damaged", remedy)
        elif tier["failed_stores"]:
            remedy = "look into the server's log for why, and check the room and the rights of the tier"
            yield Check(label, Level.WARNING, f"{found}; {tier['failed_stores']} writes failed", remedy)
        else:
            yield Check(label, Level.OK, found)


def reuse_checks(counts: Counts | None, separator: str) -> Iterator[Check]:
    """Checks of how many chunks were reused; for each reason why chunks were not, how often and what to do."""
    if counts is None:
        yield Check("reuse", Level.WARNING, "the server does not count", "start it with --enable-metrics")
        return
    total = counts.total()
    reused = sum(num for (status, _), num in counts.items() if status in REUSED)
    if not total:
        remedy = f"put {separator!r} before, between and after the passages; docs/clients.md has other marks"
        yield Check("reuse", Level.WARNING, "no request had a marked chunk", remedy)
        return
    found = f"{reused} of {total} marked chunks were reused or in an exact prefix"
    remedy = "" if reused else "see the reasons, and compare two prompts with --prompt FILE --prompt FILE"
    yield Check("reuse", Level.OK if reused else Level.WARNING, found, remedy)
    by_reason: Counter[str] = Counter()
    for (_, reason), num in counts.items():
        if reason != "none":
            by_reason[reason] += num
    for reason, num in by_reason.most_common():
        if num:
            level, remedy = ADVICE.get(reason, (Level.WARNING, ""))
            said = REASONS.get(reason, f"reason {reason}, of another version").rstrip(".")
            yield Check("reuse", level, f"{num} of {total}; {said}", remedy, cause=reason)
