"""Long runs on one scheduler: memory pressure, retraction, and what fused requests leave behind.

    cd test && python -m exactness.stress --seeds 3 --requests 1000

Random requests of every method, each seed on the next of `PRESSURE` and of `SHARES`. What must equal stock SGLang
(ratio 1.0, modes exact and off, plain requests) is sent to stock SGLang as well, alone and with room.
"""

from __future__ import annotations

import argparse
import itertools
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest

from chunk_cache.errors import ChunkCacheRequestError
from chunk_cache.methods import METHODS, STATE_METHODS, Stage
from chunk_cache.methods.method_options import ChoiceOption, FloatOption, IntOption, LayersOption, Option
from chunk_cache.methods.selected import CacheClip
from chunk_cache.options.kept_tokens import droppable
from chunk_cache.options.request_options import MODES, parse_request
from chunk_cache.plan.selection_plan import is_selecting
from chunk_cache.types import REASONS
from exactness.cases import Session
from exactness.fp8_cases import assert_near, scaled
from exactness.image_cases import Illustrated, Image
from exactness.runner import Config, run_cases
from local_scheduler import Reply, Request
from sglang_chunk_cache.api.capabilities import has_states, what_keeps_all
from sglang_chunk_cache.start.model_refusals import REUSES_IMAGES

NUM_LAYERS = 4
SHARES = (0.6, 0.4, 1.0)  # of the pool and the index, that one partition may have
RATIOS = (0, 0.05, 0.15, 0.5, 0.9, 1.0)
SERVER_RATIO = 0.15
TOLERANCE = 3e-4  # log-probabilities, fp32; stock computes alone what is in batches here, which rounds otherwise
SELECTOR_REASONS = (None, None, *(reason for reason in REASONS if reason.startswith("selector_")))


@dataclass(frozen=True)
class Pressure(Config):
    """A configuration in which requests are in each other's way."""

    layers: int = NUM_LAYERS
    max_total_tokens: int = 900
    conservativeness: float = 0.05
    has_priorities: bool = False
    loading: str = ""  # of tiers below the pool, smaller than what is written to them; empty = none
    has_scales: bool = False  # of a KV cache in FP8

    def __str__(self) -> str:
        flags = [name for name in ("priorities", "scales") if getattr(self, f"has_{name}")]
        return "-".join([super().__str__(), *flags, self.loading]).rstrip("-")

    @property
    def flags(self) -> dict[str, Any]:
        return {**super().flags, "enable_priority_scheduling": self.has_priorities}

    def with_tiers(self, folder: str) -> Pressure:
        if not self.loading:
            return self
        disk = {"path": folder, "max_bytes": "1MB"}
        tiers = {"host_bytes": "200KB", "disk": disk, "loading": self.loading, "controller": False}
        return replace(self, options=(*self.options, ("tiers", tiers)))

    @property
    def relaxed(self) -> Config:
        """Stock SGLang with room for all."""
        same = ("page_size", "layers", "kind", "num_adapters", "server")
        return Config(**{name: getattr(self, name) for name in same}, max_total_tokens=16384)


UPKEEP = (("eviction", "frequency-reuse"), ("promote_uses", 2), ("refresh_uses", 2))
CONTEXTS = (("remember", "contexts"), ("max_variants_per_chunk", 4))
VERIFY = (("verify_share", 1.0),)
BOUNDS = (("max_variants", 30), ("max_variants_per_chunk", 2), ("max_generation", 1), ("max_path_tokens", 2000))
APART = (("system_prompts", "same"), ("remember", "contexts"))
FOR_ALL = (("options", {"focus_window": 2, "drift": 0.5, "deviation": "v", "seed": 3}),)
PRESSURE = [
    Pressure(force_retract=True, options=(*VERIFY, *FOR_ALL), target=(("kl", 0.01),), kind="deepseek_v2"),
    # Without the room for reused chunks, so that requests are admitted until the pool overflows.
    Pressure(
        max_total_tokens=1024,
        page_size=16,
        chunked=True,
        options=(("keep_share", 0.0), *VERIFY),
        typed=True,
        kind="gemma3",
    ),
    Pressure(
        overlap=False,
        chunked=True,
        force_retract=True,
        tree_core="python",
        loading="layerwise",
        options=VERIFY,
        kind="qwen3_moe",
    ),
    Pressure(
        max_total_tokens=2048,  # adapters and tenants have chunks of their own, which must meet again
        chunked=True,
        step_len=16,
        options=(*UPKEEP, *CONTEXTS),
        has_priorities=True,
        num_adapters=2,
    ),
    Pressure(
        max_total_tokens=2048,
        page_size=16,
        chunked=True,
        step_len=256,
        loading="prefetch",
        options=(*UPKEEP, *VERIFY),
        target=(("kl", 0.01),),
        server=(("enable_mixed_chunk", True),),
        kind="gpt_oss",
    ),
    Pressure(
        max_total_tokens=3072,  # a chunk is reused behind the same system prompt only
        overlap=False,
        options=(*BOUNDS, *VERIFY, *APART),
        has_priorities=True,
        tree_core="python",
        typed=True,
    ),
    Pressure(
        chunked=True,
        force_retract=True,
        loading="layerwise",
        options=(*VERIFY, *FOR_ALL),
        has_scales=True,
        server=(("kv_cache_dtype", "fp8_e4m3"),),
    ),
    Pressure(
        max_total_tokens=2048,
        page_size=16,
        overlap=False,
        loading="prefetch",
        options=(*UPKEEP, *CONTEXTS),
        kind="deepseek_v2",
        server=(("kv_cache_dtype", "fp8_e5m2"),),
    ),
    Pressure(
        max_total_tokens=1536,
        chunked=True,
        force_retract=True,
        tree_core="python",
        method="seams",
        loading="prefetch",
        options=(*UPKEEP, ("seam_len", 8), ("state_bytes", "400KB")),  # for most of the chunks
        kind="qwen3_5",
    ),
    Pressure(
        max_total_tokens=2048,
        page_size=16,
        chunked=True,
        force_retract=True,
        loading="prefetch",
        options=(*UPKEEP, *CONTEXTS),
        kind="qwen3_vl",
    ),
    Pressure(
        max_total_tokens=1024,
        tp_size=2,
        attn_dp_size=2,
        chunked=True,
        force_retract=True,
        loading="prefetch",
        options=(*UPKEEP, *CONTEXTS),
        kind="deepseek_v2",
    ),
]


def methods_of(model_config: Any, *, rows_are_fixed: bool) -> list[str]:
    """Names of those that a model is served with."""
    names = STATE_METHODS if has_states(model_config) else METHODS
    return [
        name
        for name in names
        if not rows_are_fixed or (METHODS[name].stage is Stage.BEFORE and not METHODS[name].asks_selector)
    ]


def random_recipe(rng: random.Random, names: Sequence[str], *, rows_are_fixed: bool) -> dict[str, Any]:
    """Some method of these, any of its options, any ratio; each may be left to the server.

    Drawn apart, so that a method or an option more changes recipes, and no other request.
    """
    rng = random.Random(rng.random())
    while True:
        method = METHODS[rng.choice(names)]
        recipe: dict[str, Any] = {"explain": rng.random() < 0.3}
        if rng.random() < 0.6:
            recipe["ratio"] = rng.choice(RATIOS)
        if rng.random() < 0.9:
            recipe["method"] = method.name
        if "method" in recipe and rng.random() < 0.5 and len(names) > len(STATE_METHODS):
            chosen = [option for option in method.options_schema if rng.random() < 0.4]
            recipe["options"] = {option.name: random_value(rng, option) for option in chosen}
        try:
            options = parse_request(recipe).options
            method.check_model(options, NUM_LAYERS, "")
        except ChunkCacheRequestError:
            continue  # two that do not fit
        if not (rows_are_fixed and is_selecting(method, options)):
            return recipe


def random_value(rng: random.Random, option: Option) -> Any:
    match option:
        case IntOption():
            return rng.randrange(option.minimum, min(option.maximum, 9) + 1)
        case FloatOption():
            return rng.choice([option.minimum, option.default, rng.uniform(option.minimum, min(option.maximum, 4.0))])
        case ChoiceOption():
            return rng.choice(option.choices)
        case LayersOption():
            layers = sorted(rng.sample(range(NUM_LAYERS), rng.randrange(1, NUM_LAYERS + 1)))
            return rng.choice(["last", "all", layers])
    raise AssertionError(f"no values for {option}")


def random_requests(s: Session, total: int, *, rows_are_fixed: bool) -> list[Request]:
    """Any mixture of stored and new chunks, plain text, modes, methods, ratios, tenants, adapters and priorities.

    Args:
        rows_are_fixed: none chooses rows during the forward.
    """
    rng = s.rng
    server_args, model_config = s.local.scheduler.server_args, s.local.scheduler.model_config
    more, is_mixed = random.Random(total), server_args.enable_mixed_chunk
    may_drop = what_keeps_all(server_args, model_config) is None
    names = methods_of(model_config, rows_are_fixed=rows_are_fixed)
    if CacheClip.name in names:
        names += [CacheClip.name] * 2  # each answer of the selector is to come
    num_chunks = 24 // (1 + len(s.local.adapters))  # those of an adapter are its own, and must meet again
    chunks = s.chunks(*(rng.randrange(1, 90) for _ in range(num_chunks)))
    sees = not REUSES_IMAGES.isdisjoint(model_config.hf_config.architectures)
    images = [Image(n, 2 * more.randrange(1, 6)) if sees and more.random() < 0.4 else None for n in range(num_chunks)]
    requests = []
    for i in range(total):
        prompt = Illustrated()
        prompt.text(s.system if rng.random() < 0.9 else s.tokens(rng.randrange(0, 6)))
        for _ in range(rng.randrange(0, 6)):
            if rng.random() < 0.15:
                prompt.text(s.tokens(rng.randrange(1, 20)))
            if sees and more.random() < 0.1:
                prompt.put(Image(100 + more.randrange(5), 2 * more.randrange(1, 6)))
            if rng.random() < 0.9:
                n = rng.choice(range(num_chunks))
                place = len(chunks[n]) // 2
                prompt.mark(chunks[n][:place], *filter(None, [images[n]]), chunks[n][place:])
            else:
                prompt.chunk(s.tokens(rng.randrange(1, 60)))
        if rng.random() < 0.9 or not prompt.ids:
            prompt.text(s.tokens(rng.randrange(1, 25)))
        options = {"spans": prompt.spans, **random_recipe(rng, names, rows_are_fixed=rows_are_fixed)}
        if rng.random() < 0.15:
            options["mode"] = rng.choice(MODES)
        elif rng.random() < 0.1:
            options["mode"] = "prepare"  # so that some are there to be used
        if rng.random() < 0.2:
            behind = len(prompt.ids) - (prompt.spans[-1][1] if prompt.spans else 0)
            options["answer_tokens"] = rng.randrange(behind + 1)
        if prompt.spans and may_drop and more.random() < 0.2:
            begin, end = droppable(prompt.spans, len(prompt.ids))
            most = max(len(prompt.ids) - (end - begin) + 1, more.randrange(20, len(prompt.ids) + 40))
            options["keep_tokens"] = most if begin < end else len(prompt.ids)
        request = Request(
            prompt.ids,
            options if rng.random() < 0.85 else None,
            mm_inputs=prompt.inputs(s) if prompt.images else None,
            max_new_tokens=rng.choice([0, 1, 2, 5, 20, 40]),
            logprobs=not is_mixed or more.random() < 0.5,  # SGLang mixes batches without them only
            adapter=more.choice([None, *range(len(s.local.adapters))]),
            logprob_start=rng.choice([-1, -1, -1, rng.randrange(0, len(prompt.ids))]),
            extra_key=rng.choice([None, None, None, "tenant"]),
            cache_salt="salt" if rng.random() < 0.1 else None,
            priority=rng.randrange(0, 3),
            rid=f"r{i:05d}",  # SGLang aborts all that begin with an id
            ignore_eos=rng.random() < 0.5,
        )
        requests.append(request)
    return requests


def equals_stock(options: dict[str, Any] | None) -> bool:
    if options is None:
        return True
    if options.get("keep_tokens"):
        return False
    if options.get("mode") in ("exact", "off"):
        return True
    if any((options.get("options") or {}).get(name) for name in ("alpha", "ends")):
        return False
    method = METHODS.get(options.get("method", ""))
    ratio = options.get("ratio")
    return (
        (SERVER_RATIO if ratio is None else ratio) == 1.0
        if method is None
        else (method.effective_ratio(ratio, SERVER_RATIO) == 1.0)
    )


def case_random_requests(s: Session, total: int, seed: int, num_replicas: int) -> tuple[Counter[str], dict[str, Reply]]:
    """Random requests, some aborted, in a pool that holds a few of them; integrity after every step.

    With replicas, which attend apart, none chooses rows during the forward.

    Returns:
        What happened, how often; and the replies, by request, that must be those of stock SGLang.
    """
    s.rng.seed(seed)
    requests = random_requests(s, total, rows_are_fixed=num_replicas > 1)
    by_rid = {request.rid: request for request in requests}
    live: list[str] = []
    asking: list[Request] = []  # of the selector, which answers sooner or later, or not
    counts: Counter[str] = Counter()
    gate = s.local.cache.chunks.gate
    if gate is not None:
        from sglang_chunk_cache.verification import exact_pass

        exact_pass.STEP_LEN = 16  # so that requests come between steps
    lull = 0
    answers = itertools.cycle(SELECTOR_REASONS)  # few requests ask the selector, and each reason is to come

    def on_step(step: int) -> list[Any] | None:
        nonlocal lull
        s.local.cache.chunks.check_integrity()
        if counts["sent"] == total and not asking:
            return None
        if lull > 0:  # so that something is verified
            lull -= 1
            return []
        lull = s.rng.randrange(100) if s.rng.random() < 0.05 else 0
        if gate is not None and s.rng.random() < 0.0005:
            gate.forget()
        messages: list[Any] = []
        while counts["sent"] < total and s.rng.random() < 0.35:
            request = requests[counts["sent"]]
            messages.append(s.local.prepare(request))
            live.append(request.rid)
            counts["sent"] += 1
            if s.local.asks_selector(request):
                asking.append(request)
        for request in [request for request in asking if s.rng.random() < 0.1]:
            asking.remove(request)
            messages.append(s.local.answer(request, next(answers)))
        if live and s.rng.random() < 0.05:
            newest = range(len(live))[-10:]  # older ones have finished
            messages.append(s.local.abort(live.pop(s.rng.choice(newest))))
            counts["aborts sent"] += 1
        return messages

    exact = {}
    for reply in s.local.run(on_step):
        assert reply.finish is not None, reply
        counts["finished"] += 1
        counts["aborted"] += reply.finish["type"] == "abort"
        counts["retracted"] += reply.retractions > 0
        request = by_rid[reply.rid]
        if equals_stock(request.chunk_cache) and reply.finish["type"] != "abort":
            exact[reply.rid] = reply
        if reply.info is not None:
            count_reply(counts, request, reply)
    counts["given way for a share"] = s.local.cache.chunks.store.num_evicted_above
    if gate is not None:
        numbers = gate.queue.stats()
        counts.update({name: numbers[name] for name in ("chosen", "verified", "given_up")})
        counts.update({f"not verified, {reason}": num for reason, num in numbers["dropped"].items()})
    return counts, exact


def count_reply(counts: Counter[str], request: Request, reply: Reply) -> None:
    info = reply.info
    assert info is not None
    assert info["prefix_tokens"] + info["reused_tokens"] + info["computed_tokens"] == len(request.ids), info
    assert 0 <= info["recomputed_tokens"] <= info["reused_tokens"], info
    assert [[chunk["start"], chunk["end"]] for chunk in info["chunks"]] == request.chunk_cache["spans"], info
    if equals_stock(request.chunk_cache):
        assert info["recomputed_tokens"] == info["reused_tokens"], info
    keep_tokens = min(request.chunk_cache.get("keep_tokens") or len(request.ids), len(request.ids))
    assert info.get("kept_tokens", len(request.ids)) >= keep_tokens, info
    counts["packed"] += info.get("kept_tokens", len(request.ids)) < len(request.ids)
    counts["retracted_packed"] += reply.retractions > 0 and info.get("kept_tokens", len(request.ids)) < len(request.ids)
    counts.update(chunk["status"] for chunk in info["chunks"])
    counts["preparing"] += sum(chunk["reason"] == "preparing" for chunk in info["chunks"])
    counts["prepared"] += sum(chunk.get("kind") == "prepared" for chunk in info["chunks"])
    counts.update(f"tier {chunk['tier']}" for chunk in info["chunks"] if chunk.get("tier"))
    if info["fallback_reason"]:
        counts[f"fallback {info['fallback_reason']}"] += 1
    if info["reused_tokens"]:
        counts[f"fused {info['method']}"] += 1
        counts["retracted_fused"] += reply.retractions > 0


def case_same_requests(s: Session, total: int, seed: int, num_replicas: int) -> dict[str, Reply]:
    """Those of `case_random_requests` that must equal stock SGLang, without chunks."""
    s.rng.seed(seed)
    requests = random_requests(s, total, rows_are_fixed=num_replicas > 1)
    requests = [one for one in requests if equals_stock(one.chunk_cache)]
    for request in requests:
        request.chunk_cache = None
    return {reply.rid: reply for i in range(0, len(requests), 8) for reply in s.local.generate(requests[i : i + 8])}


def share_of(seed: int) -> float:
    """Another one for each configuration, and when it comes again."""
    return SHARES[(seed + seed // len(PRESSURE)) % len(SHARES)]


def check_random_requests(config: Pressure, total: int, seed: int) -> Counter[str]:
    """Runs them on ours and on stock SGLang.

    Raises:
        AssertionError: something was lost, leaked or differs.
    """
    if config.kind != "qwen3_5":
        config = replace(config, options=(*config.options, ("partition_share", share_of(seed))))
    prefix = "scaled_" if config.has_scales else ""
    # Ranks that attend apart have the same requests, in another order.
    num = config.attn_dp_size
    each = [f"{total // num**2} {seed + part} {num}" for part in range(num)]
    with tempfile.TemporaryDirectory() as folder:
        results = run_cases(
            config.with_tiers(folder),
            is_ours=True,
            names=[f"{prefix}random_requests {one}" for one in each],
            module="exactness.stress",
        )
    counts: Counter[str] = Counter()
    for one in each:
        result = results[f"{prefix}random_requests {one}"]
        assert not isinstance(result, str), result
        stock = run_case(config.relaxed, False, f"{prefix}same_requests {one}")
        for own_counts, ours in zip(result[::2], result[1::2], strict=True):
            check_exact(config, ours, stock)
            counts += own_counts + Counter({"equal to stock": len(ours)})
    return counts


def check_exact(config: Pressure, ours: dict[str, Reply], stock: dict[str, Reply]) -> None:
    """Raises: AssertionError: a reply is not stock's."""
    if "kv_cache_dtype" in dict(config.server):
        assert_near(((mine, stock[rid]) for rid, mine in ours.items()), with_inputs=not config.overlap)
        return
    for rid, mine in ours.items():
        # What a state answers is normed, also where it is next to nothing: single tokens show rounding of 1e-3.
        tolerance = (10 if config.kind == "qwen3_5" else 1) * TOLERANCE
        assert_same(mine, stock[rid], with_inputs=not config.overlap, tolerance=tolerance)


def assert_same(mine: Reply, theirs: Reply, *, with_inputs: bool, tolerance: float = TOLERANCE) -> None:
    """Not `logprobs`: of a request for no token, stock SGLang gives one or none, as all its batch is such or not.

    Args:
        with_inputs: also log-probabilities of the prompt. With overlap, stock SGLang gives requests behind one that was
            retracted or aborted while their batch ran those of other positions: it goes on without passing over the
            rows of that one (0.5.23, `process_batch_result_prefill`).
    """
    assert mine.output_ids == theirs.output_ids, f"{mine} is not stock's {theirs}"
    tops = [pytest.approx(sorted(top.values()), abs=tolerance) for top in theirs.top_logprobs]
    assert [sorted(top.values()) for top in mine.top_logprobs] == tops, f"{mine} is not stock's {theirs}"
    if with_inputs:
        inputs = pytest.approx(theirs.input_logprobs[1:], abs=tolerance)
        assert mine.input_logprobs[1:] == inputs, f"{mine} is not stock's {theirs}"


def run_case(config: Config, is_ours: bool, name: str) -> Any:
    result = run_cases(config, is_ours=is_ours, names=[name], module="exactness.stress")[name]
    assert not isinstance(result, str), result
    return result


def case_22_retraction_of_fused_requests(s: Session) -> list[Reply]:
    """Fused requests that decode together until the pool is full; all at ratio 1.0, so each must equal stock."""
    chunks = s.chunks(40, 33, 51, 64, 45, 38)
    s.prime(chunks)
    requests = []
    for _ in range(10):
        order = s.rng.sample(range(6), 3)
        request = s.request(s.prompt([chunks[i] for i in order]), max_new_tokens=60)
        request.ignore_eos = False
        requests.append(request)
    s.replies += s.local.generate(requests)
    return s.replies


def case_exact_after_fused(s: Session) -> list[Reply]:
    """Hundreds of fused requests, then exact ones: nothing approximate may be left in the exact cache.

    The exact ones run both unmarked and in mode exact, over prompts that the fused ones used as well.
    """
    chunks = s.chunks(40, 33, 51, 64, 45, 38, 29, 70)
    orders = [s.rng.sample(range(8), s.rng.randrange(1, 5)) for _ in range(300)]
    prompts = [s.prompt([chunks[i] for i in order]) for order in orders]
    if s.is_ours:
        for i in range(0, len(prompts), 4):
            s.local.generate(
                [s.request(p, ratio=s.rng.choice([0, 0.1, 0.3]), max_new_tokens=2) for p in prompts[i : i + 4]]
            )
    sample = prompts[::10]
    exact = [s.request(p, marked=i % 2 == 0, options={"mode": "exact"}) for i, p in enumerate(sample)]
    for request in exact:
        s.replies += s.local.generate([request])
    return s.replies


def case_full_reuse_is_another_result(s: Session) -> list[tuple[Reply, Reply]]:
    """Pairs of the same prompt at ratio 0 and in full."""
    chunks = s.chunks(60, 55, 71, 64)
    s.prime(chunks)
    pairs = []
    for order in ([3, 2, 1, 0], [1, 3, 0, 2], [2, 0, 3, 1]):
        prompt = s.prompt([chunks[i] for i in order])
        reused = s.local.generate([s.request(prompt, options={"method": "full-reuse"})])[0]
        exact = s.local.generate([s.request(prompt, options={"mode": "off"})])[0]
        pairs.append((reused, exact))
    return pairs


def case_plain_beside_fused(s: Session) -> list[Reply]:
    """Plain prompts in the steps in which fused ones are computed below ratio 1, and what goes on from them."""
    chunks = s.chunks(40, 33, 51)
    s.prime(chunks)
    for order in ((2, 1, 0), (1, 0), (0, 2, 1)):
        fused = [s.request(s.prompt([chunks[i] for i in order]), ratio=0.0) for _ in range(2)]
        plain = [s.prompt([], question=length) for length in (100, 150)]
        ours = [s.request(prompt, marked=False) for prompt in plain]
        s.replies += s.local.generate([fused[0], ours[0], fused[1], ours[1]])[1::2]
        s.send(*(prompt.text(s.tokens(20)) for prompt in plain), marked=False)
    return s.replies


CASES = {
    "plain_beside_fused": case_plain_beside_fused,
    "random_requests": case_random_requests,
    "same_requests": case_same_requests,
    "22_retraction": case_22_retraction_of_fused_requests,
    "exact_after_fused": case_exact_after_fused,
    "full_reuse": case_full_reuse_is_another_result,
    "scaled_random_requests": scaled(case_random_requests),
    "scaled_same_requests": scaled(case_same_requests),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3, metavar="N", help="0 to N - 1")
    parser.add_argument("--first-seed", type=int, default=0, metavar="N", help="begin with this one")
    parser.add_argument("--requests", type=int, default=1000, metavar="N", help="of each seed")
    args = parser.parse_args()
    num_findings = 0
    for seed in range(args.first_seed, args.first_seed + args.seeds):
        config, start = PRESSURE[seed % len(PRESSURE)], time.monotonic()
        try:
            found = ", ".join(
                f"{name} {num}" for name, num in sorted(check_random_requests(config, args.requests, seed).items())
            )
        except (AssertionError, RuntimeError) as error:
            found = f"FINDING: {error}"
            num_findings += 1
        print(f"seed {seed}, {config}, {time.monotonic() - start:.0f} s: {found}", flush=True)
    return int(num_findings > 0)


if __name__ == "__main__":
    sys.exit(main())
