"""Numbers against thresholds: `judge` (one line per check), `table` (what a user reads)."""

from __future__ import annotations

from dataclasses import dataclass

from sglang_chunk_cache.verify.measure import Distance, Findings

MAX_LAYER0 = 1e-3  # part of the deviation of unshifted keys; rounding in bf16 leaves about 1e-5


@dataclass(frozen=True)
class Thresholds:
    """What a model must reach.

    Attributes:
        tolerance: of log-probabilities at ratio 1.0.
        min_top1: share of prompts with the same likeliest first token, at the configured ratio.
        max_kl: mean KL divergence in nats, at the configured ratio.
    """

    tolerance: float
    min_top1: float
    max_kl: float


@dataclass(frozen=True)
class Check:
    """One statement, whether it holds, and the numbers."""

    statement: str
    holds: bool
    numbers: str


def judge(findings: Findings, thresholds: Thresholds) -> list[Check]:
    """All checks, in the order in which a failure should be looked at."""
    one, configured = findings.ratio_one, findings.configured
    return [
        Check(
            "layer 0 of reused chunks is right after the position shift",
            findings.layer0 <= MAX_LAYER0,
            f"deviation {findings.layer0:.1e} of that without a shift, at most {MAX_LAYER0:.0e}",
        ),
        Check(
            "ratio 1.0 equals a full prefill",
            one.max_logprob <= thresholds.tolerance,
            f"log-probabilities differ by at most {one.max_logprob:.1e}, tolerance {thresholds.tolerance:g}",
        ),
        Check(
            "the configured method keeps the likeliest first token",
            configured.top1 >= thresholds.min_top1,
            f"{configured.top1:.0%} of {findings.num_cases} prompts, at least {thresholds.min_top1:.0%}",
        ),
        Check(
            "the configured method keeps the distribution of the first token",
            configured.mean_kl <= thresholds.max_kl,
            f"mean KL {configured.mean_kl:.3f} nats, at most {thresholds.max_kl:g}",
        ),
    ]


def table(findings: Findings, configured: str) -> list[str]:
    """Lines of text; `configured` names method and ratio."""
    rows: list[tuple[str, Distance]] = [
        ("ratio 1.0", findings.ratio_one),
        ("full-reuse", findings.full_reuse),
        (configured, findings.configured),
    ]
    width = max(len(name) for name, _ in rows)
    lines = [f"{'':<{width}}  reused  recomputed  mean KL   max KL    same top token  largest logprob difference"]
    for name, d in rows:
        lines.append(
            f"{name:<{width}}  {d.reused:>6.0%}  {d.recomputed:>10.0%}  {d.mean_kl:<8.2g}  {d.max_kl:<8.2g}  "
            f"{d.top1:>14.0%}  {d.max_logprob:.2g}"
        )
    return lines
