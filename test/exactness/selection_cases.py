"""Requests of every method, as scenarios for `exactness.runner`; `exactness.selection_reference` says what they give.

A case returns all that it sent, in order, as `Run`s, so that the reference can follow what the server had stored. Every
request asks to be explained. Nothing here knows what is right.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from chunk_cache.methods import METHODS
from exactness.cases import Prompt, Session
from local_scheduler import Reply, Request

__all__ = ["CASES", "Recipe", "Run", "Session"]

PRIME_QUESTION_LEN = 20
"""Behind a chunk that is to be stored whole: more than a page."""


@dataclass(frozen=True)
class Recipe:
    """One way to choose rows; the options are those of the method."""

    method: str
    ratio: float | None
    options: dict[str, Any]


@dataclass(frozen=True)
class Run:
    """One request that was sent."""

    ids: list[int]
    chunk_cache: dict[str, Any] | None
    """None = a plain request."""
    reply: Reply


def recipe(method: str, ratio: float | None, **options: Any) -> Recipe:
    return Recipe(method, ratio, options)


GROUPING = {"group_size": 4, "group_threshold": 1}
FILTERED = {"check_layer": 2, "first_ratio": 2.0, "last_ratio": 0.5, "filter_share": 1.0}
RECIPES = [
    recipe("full-reuse", 0.3),
    recipe("epic", 0.2),
    recipe("near", 0.2),
    recipe("near", 0.4, drift=1),
    recipe("epic", 0.3, shift=0),
    recipe("epic", 0.34, **GROUPING),
    recipe("epic", 0.34, group_size=8, group_threshold=5),
    recipe("epic", 0.5, focus_window=2),
    recipe("lego-link", 0.3),
    recipe("lego-link", 0.4, block_size=4),
    recipe("epic", 0.4, block_size=4, **GROUPING),
    recipe("random", 0.3, block_size=4),
    recipe("h2o", 0.3, block_size=8),
    recipe("cache-craft", 0.3, block_size=4, focus_window=2, **GROUPING),
    recipe("cacheblend", 0.3, block_size=4),
    recipe("cacheblend", 0.4, first_ratio=3.0, last_ratio=0.5, filter_share=1.0, block_size=8, top_k="chunk"),
    recipe("a3", 0.3, block_size=8, drift=1, **GROUPING),
    recipe("fusionrag", 0.3, block_size=4),
    recipe("infoflow", 0.3, block_size=16, top_k="chunk"),
    recipe("question-drift", 0.2, block_size=8),
    recipe("lego-link", None, ends=3),
    recipe("lego-link", 0.4, focus_window=1, **GROUPING),
    recipe("random", 0.3, seed=7),
    recipe("random", 0.4, **GROUPING),
    recipe("random", 0.5, focus_window=1),
    recipe("h2o", 0.2),
    recipe("h2o", 0.4, **GROUPING),
    recipe("h2o", 0.4, focus_window=2),
    recipe("cache-craft", 0.2),
    recipe("cache-craft", 0.4, **GROUPING),
    recipe("cache-craft", 0.4, focus_window=3),
    recipe("cache-craft", None, alpha=0.4),
    recipe("cache-craft", None, alpha=1.0, focus_window=2),
    recipe("cache-craft", None, alpha=3.0),
    recipe("h2o", None, alpha=0.6, **GROUPING),
    recipe("epic", None, alpha=0.8),
    recipe("random", None, alpha=0.8),
    recipe("cacheblend", 0.15),
    recipe("cacheblend", 0.5),
    recipe("cacheblend", 0.95),
    recipe("cacheblend", 0.3, top_k="chunk"),
    recipe("cacheblend", 0.2, shift=0),
    recipe("cacheblend", 0.3, deviation="v"),
    recipe("cacheblend", 0.3, first_ratio=3.0, last_ratio=0.5, filter_share=1.0),
    recipe("cacheblend", 0.3, first_ratio=3.0, last_ratio=0.5, filter_share=1.0, check_layer=2, top_k="chunk"),
    recipe("cacheblend", 0.4, **GROUPING),
    recipe("cacheblend", 0.5, first_ratio=2.0, last_ratio=0.5, filter_share=1.0, group_size=8, group_threshold=5),
    recipe("cacheblend", 0.5, first_ratio=2.0, last_ratio=0.5, filter_share=1.0, focus_window=2),
    recipe("cacheblend", 0.4, focus_window=1, check_layer=2),
    recipe("cacheblend", 0.4, focus_window=2, **GROUPING),
    recipe("a3", 0.15),
    recipe("a3", 0.5),
    recipe("a3", 0.3, top_k="chunk"),
    recipe("a3", 0.3, check_layer=0),
    recipe("a3", 0.3, check_layer=3),
    recipe("a3", 0.4, **GROUPING),
    recipe("a3", 0.4, top_k="chunk", group_size=8, group_threshold=5),
    recipe("a3", 0.4, focus_window=1),
    recipe("a3", 0.4, focus_window=2, **GROUPING),
    recipe("a3", 0.4, focus_window=1, check_layer=2),
    recipe("fusionrag", 0.15),
    recipe("fusionrag", 0.5),
    recipe("fusionrag", 0.3, layers="all"),
    recipe("fusionrag", 0.3, layers=[0, 2]),
    recipe("fusionrag", 0.3, top_k="chunk"),
    recipe("infoflow", 0.2),
    recipe("infoflow", 0.4, layers="all", top_k="chunk", focus_window=1, **GROUPING),
    recipe("fusionrag", 0.4, **GROUPING),
    recipe("fusionrag", 0.4, focus_window=2),
    recipe("fusionrag", 0.4, layers="all", focus_window=1, top_k="chunk", **GROUPING),
    recipe("question-drift", 0.1),
    recipe("question-drift", 0.3, top_k="chunk", focus_window=2, **GROUPING),
    recipe("question-drift", 0.3, shift=0),
    recipe("question-drift", 0.2, drift=1.0, layers=[1, 2]),
    recipe("epic", 0.2, drift=1),
    recipe("cache-craft", 0.4, drift=1, focus_window=2),
    recipe("cacheblend", 0.3, drift=1, first_ratio=3.0, last_ratio=0.5, filter_share=1.0),
    recipe("a3", 0.4, drift=1, **GROUPING),
    recipe("near-words", 0.15),
    recipe("near-words", 0.4, **GROUPING),
    recipe("near-words", 0.3, drift=0.5),
    recipe("near-words", 0.3, block_size=8),
]
"""For models of at least four layers."""
LOSES_FOCUS = recipe("cacheblend", 0.5, **FILTERED, top_k="chunk", focus_window=1, group_size=4, group_threshold=0)
"""A chunk that loses the focus leaves no row, and what is left is chosen from once more."""
SELECTOR_RECIPES = [
    recipe("cacheclip", 0.2),
    recipe("cacheclip", 0.5),
    recipe("cacheclip", 0.9),
    recipe("cacheclip", 0.3, group_size=0),
    recipe("cacheclip", 0.3, group_size=0, top_k="chunk"),
    recipe("cacheclip", 0.5, focus_window=1, **GROUPING),
    recipe("cacheclip", 0.3, block_size=8),
    recipe("cacheclip", 0.3, block_size=4, group_size=0, top_k="chunk"),
]
"""With scores that `local_scheduler` sends in the place of the selector's process."""

SELECTING = [method.name for method in METHODS.values() if method.name not in ("full", "full-reuse")]


def _options(prompt: Prompt, one: Recipe | None, answer_tokens: int = 0) -> dict[str, Any] | None:
    if one is None:
        return None
    how = {"method": one.method, "options": one.options} | ({} if one.ratio is None else {"ratio": one.ratio})
    return {"spans": prompt.spans, **how, "explain": True, "answer_tokens": answer_tokens}


class Recorder:
    """Sends requests and remembers them."""

    def __init__(self, session: Session, seed: int) -> None:
        self.s = session
        session.rng.seed(seed)
        self.runs: list[Run] = []
        self.library: list[list[int]] = []

    def send(self, *requests: tuple[Prompt, Recipe | None], answer_tokens: int = 0) -> list[Run]:
        """All in one batch; a request without a recipe is a plain one."""
        messages = [
            Request(prompt.ids, _options(prompt, one, answer_tokens), max_new_tokens=2) for prompt, one in requests
        ]
        replies = self.s.local.generate(messages)
        sent = [Run(list(m.ids), m.chunk_cache, reply) for m, reply in zip(messages, replies, strict=True)]
        self.runs += sent
        return sent

    def prime(self, num_chunks: int) -> None:
        """Stores chunks: most behind the system prompt alone, some behind other chunks."""
        rng = self.s.rng
        while len(self.library) < num_chunks:
            chunks = self.s.chunks(*(rng.randrange(2, 45) for _ in range(rng.choice([1, 1, 1, 3]))))
            self.send((self.s.prompt(chunks, question=PRIME_QUESTION_LEN), Recipe("full", 1.0, {})))
            self.library += chunks

    def prompt(self, *, has_misses: bool) -> Prompt:
        """Stored chunks in any order; perhaps new ones, and text that no chunk covers, between them."""
        rng, s = self.s.rng, self.s
        prompt = Prompt().text(s.system if rng.random() < 0.9 else s.tokens(rng.randrange(1, 30)))
        pieces = rng.sample(self.library, rng.randrange(1, 6))
        if rng.random() < 0.15:
            pieces.append(rng.choice(pieces))
        for i, piece in enumerate(pieces):
            if has_misses and rng.random() < 0.15:
                prompt.chunk(s.tokens(rng.randrange(1, 30)))
                if rng.random() < 0.3:
                    self.library.append(prompt.ids[slice(*prompt.spans[-1])])
            if rng.random() < (0.5 if i == 0 else 0.1):  # a first chunk right behind the system prompt is exact
                prompt.text(s.tokens(rng.randrange(1, 8)))
            prompt.chunk(piece)
        return prompt.text(s.tokens(rng.randrange(1, 12) if rng.random() < 0.9 else 0))


def case_methods(s: Session) -> list[Run]:
    """Every recipe, one by one."""
    recorder = Recorder(s, seed=1)
    recorder.prime(14)
    for one in (*RECIPES, *SELECTOR_RECIPES, LOSES_FOCUS):
        for _ in range(2):
            recorder.send((recorder.prompt(has_misses=True), one))
    return recorder.runs


def case_many_prompts(s: Session) -> list[Run]:
    """Many prompts for the methods that choose in the forward, at any ratio and with any options."""
    recorder = Recorder(s, seed=2)
    recorder.prime(20)
    rng = s.rng
    for _ in range(120):
        method = rng.choice(["h2o", "cache-craft", "cacheblend", "cacheblend", "a3", "a3", "fusionrag", "infoflow"])
        prompt = recorder.prompt(has_misses=True)
        answer = rng.randrange(len(prompt.ids) - prompt.spans[-1][1] + 1) if rng.random() < 0.3 else 0
        recorder.send((prompt, random_recipe(rng, method, s.local)), answer_tokens=answer)
    for _ in range(15):
        recorder.send((recorder.prompt(has_misses=True), random_recipe(rng, "cacheclip", s.local)))
    return recorder.runs


def case_mixed_batches(s: Session) -> tuple[list[Run], list[tuple[int, int]]]:
    """Many methods in one forward, then each request alone; the pairs of them by their place in the list.

    Then batches with missing chunks and a plain request among them.
    """
    from sglang_chunk_cache.forward.runs import WORTHWHILE_LEN

    chunks = s.local.scheduler.tree_cache.chunks
    if chunks.min_run_len is not None:  # by runs, and as on a GPU only where they are long
        s.local.scheduler.tree_cache.chunks = replace(chunks, min_run_len=WORTHWHILE_LEN)
    recorder = Recorder(s, seed=3)
    recorder.prime(14)
    pairs = []
    for num in (3, 6, 10):
        batch = [(recorder.prompt(has_misses=False), one) for one in s.rng.sample(RECIPES, num)]
        first = len(recorder.runs)
        recorder.send(*batch)
        for i, request in enumerate(batch):
            pairs.append((first + i, len(recorder.runs)))
            recorder.send(request)
    for _ in range(3):
        batch = [(recorder.prompt(has_misses=True), one) for one in s.rng.sample(RECIPES, 8)]
        recorder.send(*batch[:4], (Prompt().text(s.tokens(40)), None), *batch[4:])
    others = [one for one in RECIPES if one.method in ("a3", "fusionrag", "epic")][::4]
    batch = [(recorder.prompt(has_misses=False), one) for one in (*SELECTOR_RECIPES, *others)]
    first = len(recorder.runs)
    recorder.send(*batch)
    for i, request in enumerate(batch):
        pairs.append((first + i, len(recorder.runs)))
        recorder.send(request)
    return recorder.runs, pairs


def case_ends_of_the_ratio(s: Session) -> list[dict[str, Run]]:
    """The same prompt at ratio 1 and 0 of every method, with grouping and focus on; and in full, and reused in full."""
    recorder = Recorder(s, seed=4)
    recorder.prime(10)
    outcomes = []
    for _ in range(3):
        prompt = recorder.prompt(has_misses=False)
        recipes = {f"{method} {ratio}": recipe(method, ratio) for method in SELECTING for ratio in (0.0, 1.0)}
        for method in SELECTING:
            recipes[f"{method} 1.0 with options"] = recipe(method, 1.0, focus_window=1, **GROUPING)
        recipes |= {"full": recipe("full", 0.5), "full-reuse": recipe("full-reuse", 0.5)}
        outcomes.append({name: recorder.send((prompt, one))[0] for name, one in recipes.items()})
        outcomes[-1]["plain"] = recorder.send((prompt, None))[0]
        s.local.flush()  # that prompt is exact now
        recorder.library.clear()
        recorder.prime(10)
    return outcomes


def case_deviation_at_layer_0(s: Session) -> list[Run]:
    """CacheBlend that compares K and V of layer 0, which depend on token and position only."""
    recorder = Recorder(s, seed=5)
    recorder.prime(10)
    for _ in range(5):
        recorder.send((recorder.prompt(has_misses=True), recipe("cacheblend", 0.3, check_layer=0)))
    return recorder.runs


def random_recipe(rng: Any, method: str, local: Any) -> Recipe:
    """Any legal options of a method, at any ratio."""
    num_layers = local.scheduler.model_config.num_hidden_layers
    options: dict[str, Any] = {}
    if rng.random() < 0.3:
        options |= rng.choice(
            [GROUPING, {"group_size": 8, "group_threshold": 3}, {"group_size": 3, "group_threshold": 1}]
        )
    if rng.random() < 0.3:
        options["block_size"] = rng.choice([1, 3, 4, 8])
    if rng.random() < 0.3:
        options["focus_window"] = rng.choice([1, 2, 3])
    if method in ("cacheclip", "cacheblend", "a3", "fusionrag", "infoflow") and rng.random() < 0.3:
        options["top_k"] = "chunk"
    if method in ("cacheblend", "a3") and rng.random() < 0.4:
        # At layer 0 nothing deviates, so CacheBlend would choose by rounding.
        options["check_layer"] = rng.randrange(1 if method == "cacheblend" else 0, num_layers)
    if method == "cacheblend" and rng.random() < 0.5:
        options |= {"first_ratio": rng.uniform(1, 4), "last_ratio": rng.uniform(0.2, 1), "filter_share": rng.random()}
    if method == "cacheblend" and rng.random() < 0.3:
        options["deviation"] = "v"
    if method in ("fusionrag", "infoflow") and rng.random() < 0.5:
        layers: Sequence[int] = sorted(rng.sample(range(num_layers), rng.randrange(1, num_layers)))
        options["layers"] = rng.choice(["all", list(layers)])
    ratio: float | None = rng.choice([0.02, 0.1, 0.15, 0.3, 0.5, 0.8])
    if method in ("h2o", "cache-craft") and rng.random() < 0.4:
        options["alpha"], ratio = rng.choice([0.2, 0.5, 1.0, 2.0]), None
    return Recipe(method, ratio, options)


CASES: dict[str, Callable[[Session], Any]] = {
    name.removeprefix("case_"): function for name, function in list(globals().items()) if name.startswith("case_")
}
