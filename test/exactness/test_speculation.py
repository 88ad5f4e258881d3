"""Speculative decoding: recompute ratio 1.0 equals stock SGLang with the same flags, whatever drafts."""

from __future__ import annotations

from typing import Any

import pytest

from exactness import cases, speculation_cases
from exactness.runner import Config, run_cases
from exactness.test_ratio_one import RUNS, compare

TREES = {"speculative_num_draft_tokens": 8, "speculative_ngram_max_bfs_breadth": 4}
CHAINS = {"speculative_num_draft_tokens": 8, "speculative_ngram_max_bfs_breadth": 1}
DRAFTED_CHAIN = {"speculative_num_steps": 3, "speculative_eagle_topk": 1, "speculative_num_draft_tokens": 4}
DRAFTED_TREE = {"speculative_num_steps": 3, "speculative_eagle_topk": 2, "speculative_num_draft_tokens": 6}


def drafted(algorithm: str, flags: dict[str, int], **fields: Any) -> Config:
    return Config(server=tuple({"speculative_algorithm": algorithm, **flags}.items()), **fields)


# SGLang verifies no trees with pages of more than one token here.
PAGES = {"page_size": 16, "chunked": True, "overlap": False, "options": RUNS}
CONFIGS = [
    drafted("NGRAM", TREES),
    drafted("STANDALONE", DRAFTED_CHAIN, draft="self", **PAGES),
    drafted("EAGLE3", DRAFTED_TREE, draft="llama_eagle3", layers=4, tree_core="python", typed=True),
]
WITH_EVERY_CASE = CONFIGS[1]
OTHERS = [
    drafted("NGRAM", CHAINS, **PAGES),
    drafted("NGRAM", TREES, tp_size=2, chunked=True),
    drafted("NGRAM", TREES, kind="gpt_oss", layers=4),
    drafted("STANDALONE", DRAFTED_CHAIN, draft="self"),
    drafted("STANDALONE", DRAFTED_TREE, draft="qwen3", tree_core="python", overlap=False),
    drafted("EAGLE", DRAFTED_CHAIN, draft="llama_eagle", **PAGES),
    drafted("EAGLE", DRAFTED_TREE, draft="llama_eagle"),
    drafted("EAGLE3", DRAFTED_CHAIN, draft="llama_eagle3", layers=4, **PAGES),
    drafted("STANDALONE", DRAFTED_CHAIN, draft="self", tp_size=2),
    drafted("EAGLE", DRAFTED_CHAIN, draft="llama_eagle", tp_size=2, chunked=True),
]
# Stock loads new weights into the draft too, and a head of EAGLE3 is no model of the same shapes.
UNLIKE = "weights_without_a_flush"
NOT_OF_STOCK = ("accepted_with_reuse", "answers_by_method", "retraction")
SPECULATION = tuple(name for name in speculation_cases.CASES if name not in NOT_OF_STOCK)


def matrix(configs: list[Config], names: Any) -> Any:
    return pytest.mark.parametrize(
        ("config", "case"),
        [pytest.param(config, case, id=f"{config}-{case}") for config in configs for case in names_for(config, names)],
    )


def names_for(config: Config, names: Any) -> list[str]:
    """Of these cases those that stock serves with this draft."""
    return [name for name in names if name != UNLIKE or config.draft != "llama_eagle3"]


@pytest.mark.slow
@matrix([WITH_EVERY_CASE], cases.CASES)
def test_equals_stock(config: Config, case: str) -> None:
    compare(config, case, tuple(names_for(config, cases.CASES)))


@pytest.mark.slow
@matrix(CONFIGS, SPECULATION)
def test_answers_that_are_drafted_equal_stock(config: Config, case: str) -> None:
    compare(config, case, SPECULATION, "exactness.speculation_cases")


@pytest.mark.all
@matrix([*(config for config in CONFIGS if config is not WITH_EVERY_CASE), *OTHERS], cases.CASES)
def test_equals_stock_everywhere(config: Config, case: str) -> None:
    compare(config, case, tuple(names_for(config, cases.CASES)))


@pytest.mark.all
@matrix(OTHERS, SPECULATION)
def test_answers_that_are_drafted_equal_stock_everywhere(config: Config, case: str) -> None:
    compare(config, case, SPECULATION, "exactness.speculation_cases")


@pytest.mark.slow
@pytest.mark.parametrize(
    "config",
    [
        pytest.param(drafted("NGRAM", TREES, force_retract=True), marks=pytest.mark.all),
        drafted("EAGLE", DRAFTED_CHAIN, draft="llama_eagle", force_retract=True),
    ],
    ids=str,
)
def test_retraction(config: Config) -> None:
    compare(config, "retraction", ("retraction",), "exactness.speculation_cases")


@pytest.mark.slow
@pytest.mark.parametrize(
    "config",
    [
        pytest.param(drafted("NGRAM", TREES), marks=pytest.mark.all),
        pytest.param(drafted("STANDALONE", DRAFTED_CHAIN, draft="self"), marks=pytest.mark.all),
        drafted("EAGLE", DRAFTED_CHAIN, draft="llama_eagle"),
    ],
    ids=str,
)
def test_drafts_change_no_token_of_any_method(config: Config) -> None:
    names = ["answers_by_method"]
    (drafting,), (plain,) = (
        run_cases(one, is_ours=True, names=names, module="exactness.speculation_cases").values()
        for one in (config, Config())
    )
    assert not isinstance(drafting, str), drafting
    assert not isinstance(plain, str), plain
    assert drafting == plain[: len(drafting)]


@pytest.mark.slow
def test_the_draft_follows_its_chunks() -> None:
    """A draft that is the model itself is right as long as it sees what the model sees."""
    config = drafted("STANDALONE", DRAFTED_CHAIN, draft="self")
    names = ["accepted_with_reuse 1", "accepted_with_reuse 0"]
    found = run_cases(config, is_ours=True, names=names, module="exactness.speculation_cases")
    (full, follows), (_, stays) = (found[name] for name in names)
    assert follows <= 1.1 * full < 1.5 * full < stays, found
