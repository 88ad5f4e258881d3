"""The same replies measured without the gate: `measure_offline` asks for exact prefills, `compare` shows both.

Written apart from the gate's own code: distributions come from replies, with mode off, and are compared in numpy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from benchmark.common.server import Server
from benchmark.gate.live import Served

BATCH = 32
MEASURES = ("kl", "agreement", "nats_lost")


def measure_offline(server: Server, served: Sequence[Served], vocab_size: int) -> list[dict[str, float]]:
    """Measures of each reply, in order."""
    found = []
    for begin in range(0, len(served), BATCH):
        batch = served[begin : begin + BATCH]
        first = _ask(server, [one.prompt.ids for one in batch], vocab_size, {})
        starts = [len(one.prompt.ids) - 1 for one in batch]
        whole = _ask(server, [(*one.prompt.ids, *one.output_ids) for one in batch], 1, {"logprob_start_len": starts})
        for one, alone, forced in zip(batch, first, whole, strict=True):
            exact = {token: logprob for logprob, token, *_ in alone["meta_info"]["output_top_logprobs"][0]}
            tokens = sorted(exact)
            p, q = (np.array([side[token] for token in tokens]) for side in (exact, one.first))
            meta = forced["meta_info"]
            # Entry i tells of the token at position start + i; the first has none in front of it.
            sent = np.array([logprob for logprob, *_ in meta["input_token_logprobs"][1:]])
            tops = [top[0] for top in meta["input_top_logprobs"][1:]]
            assert len(sent) == len(one.output_ids), (len(sent), len(one.output_ids))
            best = np.array([top[0] for top in tops])
            found.append(
                {
                    "kl": float(np.sum(np.exp(p) * (p - q))),
                    "agreement": float(np.mean([top[1] == t for top, t in zip(tops, one.output_ids, strict=True)])),
                    "nats_lost": float(np.mean(best - sent)),
                }
            )
    return found


def _ask(
    server: Server, prompts: Sequence[Sequence[int]], num_top: int, fields: Mapping[str, Any]
) -> list[dict[str, Any]]:
    params = {"max_new_tokens": 1, "temperature": 0.0, "custom_params": {"chunk_cache": {"mode": "off"}}}
    body = {"input_ids": [list(ids) for ids in prompts], "sampling_params": params, **fields}
    return list(server.post("/generate", body | {"return_logprob": True, "top_logprobs_num": num_top}).json())


def compare(
    gate: Sequence[Mapping[str, float]], offline: Sequence[Mapping[str, float]], edges: Mapping[str, Sequence[float]]
) -> dict[str, dict[str, Any]]:
    """Per measure: histograms of both, and the largest difference of a reply's."""
    found = {}
    for name in MEASURES:
        mine, theirs = (np.array([one[name] for one in side]) for side in (gate, offline))
        bins = [-np.inf, *edges[name], np.inf]
        # A value on an edge lies below it; np.histogram puts it above, so both are turned round.
        counts = [
            np.histogram(-side, bins=[-edge for edge in reversed(bins)])[0][::-1].tolist() for side in (mine, theirs)
        ]
        found[name] = {
            "gate": counts[0],
            "offline": counts[1],
            "replies_in_another_bucket": int(sum(np.maximum(np.subtract(*counts), 0))),
            "largest_difference": float(np.max(np.abs(mine - theirs))),
            "means": [float(mine.mean()), float(theirs.mean())],
        }
    return found
