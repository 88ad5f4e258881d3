"""Fit: checks that the implementation fits this model on this machine, before anything is said about quality.

layer 0     Are reused keys moved to the right positions? Keys of layer 0 depend on token and position only, so their
            deviation must be rounding: it is compared with the deviation of keys that were not shifted.
ratio 1     Does recomputing everything give what a full prefill gives?
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from chunk_cache_tools.server_client import ServerClient, ServerRefused, one_replica
from chunk_cache_tools.verify.session import Body, SetupError, content_of, custom_params
from chunk_cache_tools.verify.token_prompt import TokenPrompt

TOP = 20  # likeliest tokens of the full prefill that are compared
MAX_LAYER0 = 1e-3  # as a share of the deviation of unshifted keys; rounding in bf16 leaves about 1e-5
TOLERANCE_FP32 = 1e-3
TOLERANCE_16_BIT = 0.25  # kernels round differently; with 16 bits the check of layer 0 is the sharper one
_LAYER0 = "layer 0 of reused chunks is right after the position shift"
TOLERATED = ("too_short", "prompt_end")  # reasons for which chunks are computed for every user, too
_SHARE = 0.5  # ratio of the requests for layer 0; any ratio in (0, 1) shows the deviation of all tokens


@dataclass(frozen=True)
class Check:
    """One statement, whether it holds (None: the server could not be asked), and the numbers."""

    statement: str
    holds: bool | None
    numbers: str


NUM_STEPS = 5
"""Number of calls of `/generate` in `check_fit`; each has all prompts, or all their chunks."""


def check_fit(
    client: ServerClient, prompts: Sequence[TokenPrompt], salt: str, tolerance: float, step: Callable[[], object]
) -> list[Check]:
    """Does both checks with the first token behind some prompts; flushes no cache.

    Args:
        salt: beginning of the names of the cache partitions used here, which nobody else uses.
        tolerance: largest difference of log-probabilities at ratio 1.0.
        step: called after each of `NUM_STEPS` steps.

    Raises:
        SetupError: the server did not do what was asked for.
    """
    info = client.ask("GET", "/server_info", has=("page_size",))
    asked = _Asked(client, salt, step, one_replica(info))
    bodies = [prompt.body for prompt in prompts]
    full = asked.generate(bodies, {"mode": "off"}, "full", top_logprobs_num=TOP)
    tops = [{i: p for p, i, *_ in out["meta_info"]["output_top_logprobs"][0]} for out in full]
    asked.generate([body for prompt in prompts for body in prompt.priming(int(info["page_size"]))], {}, "reuse")
    try:
        layer0 = _layer0(asked, bodies)
    except ServerRefused as refused:  # a model with states, or a draft: no method may choose single rows
        layer0 = Check(_LAYER0, None, f"not compared: {refused}")
    ids = [list(top) for top in tops]
    outs = asked.generate(bodies, {"ratio": 1.0}, "reuse", token_ids_logprob=ids)
    off = 0.0
    for out, top in zip(outs, tops, strict=True):
        _reply(out)
        found = {i: p for p, i, *_ in out["meta_info"]["output_token_ids_logprobs"][0]}
        off = max(off, *(abs(top[i] - found[i]) for i in top))
    return [
        layer0,
        Check(
            "ratio 1.0 equals a full prefill",
            off <= tolerance,
            f"log-probabilities differ by at most {off:.1e}, tolerance {tolerance:g}",
        ),
    ]


def _layer0(asked: _Asked, bodies: Sequence[Body]) -> Check:
    scores = {}
    for shift in (0, 1):
        options = {"check_layer": 0, "shift": shift}
        request = {"method": "cacheblend", "ratio": _SHARE, "explain": True, "options": options}
        outs = asked.generate(bodies, request, "reuse")
        scores[shift] = [_reply(out)["selection"]["scores"] for out in outs]
    unshifted = sum(score["mean"] for score in scores[0]) / len(bodies)
    if unshifted == 0.0:
        raise SetupError("No chunk of these prompts stands at another position than it was computed at; use others.")
    layer0 = max(score["max"] for score in scores[1]) / unshifted
    numbers = f"deviation {layer0:.1e} of that without a shift, at most {MAX_LAYER0:.0e}"
    return Check(_LAYER0, layer0 <= MAX_LAYER0, numbers)


def tolerance_of(client: ServerClient) -> float:
    """Tolerance of log-probabilities, by the number format that the server computes in."""
    dtype = str(client.ask("GET", "/server_info").get("dtype", "auto"))
    return TOLERANCE_FP32 if dtype in ("float32", "float") else TOLERANCE_16_BIT


@dataclass(frozen=True)
class _Asked:
    client: ServerClient
    salt: str
    step: Callable[[], object]
    replica: dict[str, int]

    def generate(self, bodies: Sequence[Body], request: dict[str, Any], partition: str, **fields: Any) -> list[Any]:
        """Generates one token for each prompt, as one batch."""
        params = [{"max_new_tokens": 1, "temperature": 0.0, **custom_params(request, body)} for body in bodies]
        body = {
            **content_of(bodies),
            "extra_key": [f"{self.salt}fit/{partition}"] * len(bodies),
            "sampling_params": params,
            "return_logprob": True,
            **self.replica,
            **fields,
        }
        found: list[Any] = self.client.send("POST", "/generate", body).json()
        self.step()
        return found


def _reply(out: dict[str, Any]) -> dict[str, Any]:
    reply: dict[str, Any] | None = out["meta_info"].get("chunk_cache")
    if reply is None:
        raise SetupError("The server reuses no chunks; start it with --chunk-cache.")
    reasons = {chunk["reason"] for chunk in reply["chunks"] if chunk["status"] not in ("hit", "prefix")}
    if reasons - set(TOLERATED):
        raise SetupError(f"Chunks that were just computed are not reused: {reply}; raise --max-total-tokens.")
    if not reply["reused_tokens"]:
        raise SetupError(f"No chunk of these prompts is reused ({', '.join(sorted(reasons))}); use longer ones.")
    return reply
