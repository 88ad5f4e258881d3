"""The gate on answers: a trained model behind a real server does what the theory of chunk reuse says.

It judges the implementation and never the order of methods (docs/quality.md). Another model of the same kind can be
judged with QUALITY_GATE_MODEL=FOLDER.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
from benchmark.quality.checks import COLLAPSED, RECOVERED, REQUIRED, Check, check_rows
from benchmark.quality.conditions import (
    FULL_REUSE,
    NO_SHIFT,
    built_methods,
    conditions_of,
)
from benchmark.quality.experiment import Experiment, table_of
from benchmark.quality.prompts import Prompt
from benchmark.quality.table import Row, tabulate
from benchmark.quality.tasks import TaskOptions, synthetic_task

from chunk_cache_tools.conditions import REFERENCE, Condition, MethodSpec
from chunk_cache_tools.verify.reply_log import Reply, ReplyLog
from chunk_cache_tools.verify.session import ALONE, PREPARED, WARMED, Asking, Session, SetupError
from server.conftest import TRAINED_MODEL as MODEL
from server_fixture import Server

pytestmark = [
    pytest.mark.server,
    pytest.mark.skipif(not MODEL.exists(), reason=f"no trained model in {MODEL.name}; see docs/benchmarks.md"),
]
RANDOM = MethodSpec("random")
# What is asked of each family, and of how many prompts: the whole gate must not take more than three minutes.
ASKED: dict[str, tuple[int, list[Condition]]] = {
    "needle": (100, conditions_of([FULL_REUSE], [0.0])),
    "number": (30, conditions_of([spec for spec in built_methods() if spec != NO_SHIFT], [0.3, 1.0])),
    "multi": (100, conditions_of([NO_SHIFT, FULL_REUSE], [0.0])),
    "carry": (100, conditions_of([FULL_REUSE, RANDOM], [0.0, 0.5, 1.0])),
}


@pytest.fixture(scope="module")
def rows(trained_server: Server, tmp_path_factory: pytest.TempPathFactory) -> list[Row]:
    """The table of everything in `ASKED`."""
    found: list[Row] = []
    for family, (num, conditions) in ASKED.items():
        task = synthetic_task(family, TaskOptions(num=num))
        with ReplyLog(tmp_path_factory.mktemp("replies") / family, {}) as log:
            experiment = Experiment(MODEL.name, task, task.prompts(), log)
            experiment.ask(trained_server, conditions, lambda _: None)
            assert experiment.num_missing(conditions) == 0
            found += table_of(task.family, [experiment])
    return found


@pytest.fixture(scope="module")
def checks(rows: list[Row]) -> list[Check]:
    return check_rows(rows)


@pytest.fixture
def only(checks: list[Check]) -> Callable[[str], Check]:
    def find(words: str) -> Check:
        (check,) = [check for check in checks if words in check.statement]
        return check

    return find


@pytest.mark.parametrize("family", REQUIRED)
def test_full_prefill_answers_right(only: Callable[[str], Check], family: str) -> None:
    check = only(f"`{family}` right")
    assert check.holds, check.numbers


def test_ratio_one_gives_the_answers_of_full_prefill(only: Callable[[str], Check], rows: list[Row]) -> None:
    check = only("ratio 1.0")
    assert check.holds, check.numbers
    asked = {row.method for row in rows if row.family == "number" and row.ratio == 1.0}
    assert asked == {spec.label for spec in built_methods() if spec not in (FULL_REUSE, NO_SHIFT)}


def test_multi_needs_the_position_shift(only: Callable[[str], Check]) -> None:
    check = only("`multi` collapses")
    assert check.holds, check.numbers


def test_carry_needs_recomputation(only: Callable[[str], Check]) -> None:
    check = only("`carry` collapses")
    assert check.holds, check.numbers


def test_what_lies_inside_one_chunk_needs_neither(rows: list[Row]) -> None:
    """The control: it survives reuse under any method."""
    for row in rows:
        if row.family in ("needle", "number"):
            assert row.score is not None, row
            assert row.score >= COLLAPSED + RECOVERED, row


def test_recomputed_share_is_the_ratio(rows: list[Row]) -> None:
    """Up to rounding up, per chunk at most one token."""
    for row in rows:
        if row.ratio is None:
            assert (row.reused_len, row.recomputed) == (0, None), row
        elif row.ratio in (0.0, 1.0):
            assert row.recomputed == row.ratio, row
        else:
            assert row.ratio <= row.recomputed <= row.ratio + 0.05, row


ANSWER_PARAMS = {"temperature": 0.0, "custom_params": {"chunk_cache": {"mode": "off"}}}


def referenced(
    server: Server, asking: Asking, prompts: Sequence[Prompt], stored: str = WARMED
) -> tuple[Session, dict[str, Reply]]:
    """A session, and its full prefills by the keys of the prompts."""
    session = Session(server.client, asking, stored)
    return session, {reply.prompt: reply for replies in session.ask_reference(prompts) for reply in replies}


def test_chunks_that_were_not_primed_are_noticed(trained_server: Server) -> None:
    task = synthetic_task("needle", TaskOptions(num=2))
    prompts = task.prompts()
    session, references = referenced(trained_server, task.asking, prompts)
    asks = [(prompt, Condition(RANDOM, 0.5)) for prompt in prompts]
    with pytest.raises(SetupError, match=r"was not reused but miss \(not_stored\) with random, ratio 0\.5"):
        list(session.ask(asks, references))
    session.prime(prompts)
    assert sum(len(replies) for replies in session.ask(asks, references)) == 2


def test_reference_leaves_nothing_behind_that_helps(trained_server: Server) -> None:
    """After the references the caches are empty: a primed prompt has its system prompt and first chunk as prefix."""
    task = synthetic_task("needle", TaskOptions(num=3))
    prompts = task.prompts()
    session, references = referenced(trained_server, task.asking, prompts, ALONE)
    session.prime(prompts)
    asks = [(prompt, Condition(FULL_REUSE, 0.0)) for prompt in prompts]
    for _ in range(2):
        replies = [reply for some in session.ask(asks, references) for reply in some]
        for prompt, reply in zip(prompts, replies, strict=True):
            # A chunk ends with its last letter or digit.
            expected = sum(len(chunk.rstrip(" .,?").split()) for chunk in prompt.chunks[1:])
            assert reply.reused_len == expected


def test_prepared_chunks_stand_behind_similar_ones_when_they_are_asked_for(trained_server: Server) -> None:
    task = synthetic_task("needle", TaskOptions(num=2))
    prompts = task.prompts()
    session, references = referenced(trained_server, task.asking, prompts, PREPARED)
    session.prime(prompts)
    listed = trained_server.client.ask("GET", "/chunk_cache/variants?limit=1000")["variants"]
    behind_similar = {variant["key"] for variant in listed if variant["neighbours"]}
    assert len(behind_similar) == len({chunk for prompt in prompts for chunk in prompt.chunks})
    replies = list(session.ask([(prompt, Condition(FULL_REUSE, 0.0)) for prompt in prompts], references))
    assert sum(map(len, replies)) == 2  # the session checks that every chunk was reused


def test_likelihood_of_given_answers(trained_server: Server) -> None:
    """The reference's own answer is as likely as when generated; ratio 1 loses nothing, reuse of `carry` does."""
    task = synthetic_task("carry", TaskOptions(num=12))
    prompts = task.prompts()
    session, references = referenced(trained_server, replace(task.asking, likelihood=True), prompts)
    for prompt in prompts:
        body = {
            "text": prompt.text,
            "sampling_params": {**ANSWER_PARAMS, "max_new_tokens": task.asking.max_new_tokens},
            "return_logprob": True,
        }
        meta = trained_server.post("/generate", body).json()["meta_info"]
        generated = [logprob for logprob, token, _ in meta["output_token_logprobs"]]
        own = references[prompt.key].own
        assert own.logprob == pytest.approx(sum(generated[: own.num_tokens]) / own.num_tokens, abs=1e-4)
    session.prime(prompts)
    conditions = [Condition(MethodSpec("a3"), 1.0), Condition(FULL_REUSE, 0.0), Condition(MethodSpec("a3"), 0.15)]
    asks = [(prompt, condition) for condition in conditions for prompt in prompts]
    replies = [reply for some in session.ask(asks, references) for reply in some]
    by_condition = {c: {r.prompt: r for r in replies if (r.method, r.ratio) == (c.label, c.ratio)} for c in conditions}
    asked = [(question, prompt.key) for question, prompt in zip(task.questions, prompts, strict=True)]
    _, at_one, reused, _ = tabulate(
        "m", "carry", task.metric, asked, {REFERENCE: references, **by_condition}, conditions
    )
    assert max(abs(at_one.gold_loss), abs(at_one.own_loss)) < 1e-4
    assert reused.gold_loss > 0.1
    assert reused.own_loss > 0.1
