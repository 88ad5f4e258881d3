"""The session with a server that is made up: what is sent, and which replies end a run."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from chunk_cache_tools.conditions import REFERENCE, Condition, MethodSpec, grid, parse_method
from chunk_cache_tools.verify.measurement import rows_of
from chunk_cache_tools.verify.reply_log import Reply
from chunk_cache_tools.verify.session import ALONE, PREPARED, SHUFFLED, Asking, Session, SetupError
from chunk_cache_tools.verify.token_prompt import TokenPrompt

PROMPT = TokenPrompt((9, 1, 2, 3, 4, 8), ((1, 3), (3, 5)))
CRAFT = Condition(MethodSpec("cache-craft", (("alpha", 1.0),)))
EPIC = Condition(MethodSpec("epic"), 0.3)


class MadeUpClient:
    """Answers as a server would, without a model; keeps all bodies."""

    num_replicas = 1

    def __init__(self, **change: Any) -> None:
        self.change = change
        self.bodies: list[dict[str, Any]] = []
        self.num_flushes = 0

    def ask(self, method: str, path: str, has: tuple[str, ...]) -> dict[str, Any]:
        info = {"page_size": 1, "dp_size": self.num_replicas}
        return {"/v1/loads": {"loads": [{"max_total_num_tokens": 1000}]}, "/server_info": info}[path]

    def flush(self) -> None:
        self.num_flushes += 1

    def send(self, method: str, path: str, body: dict[str, Any]) -> httpx.Response:
        self.bodies.append(body)
        params = body["sampling_params"]
        outs = [self._out(ids, one, body) for ids, one in zip(body["input_ids"], params, strict=True)]
        return httpx.Response(200, json=outs)

    def lines(self, path: str, body: dict[str, Any]) -> Iterator[str]:
        self.bodies.append({"path": path, **body})
        yield from ('{"stored": 2}', json.dumps({"summary": True, "present": self.change.get("present", 2)}))

    def _out(self, ids: list[int], params: dict[str, Any], body: dict[str, Any]) -> dict[str, Any]:
        request = params["custom_params"]["chunk_cache"]
        is_reference = request.get("mode") == "off"
        first = [[[-0.1, 7, None], [-3.0, 5, None]]]
        chunk_cache = {
            "method": request.get("method"),
            "ratio": request.get("ratio"),
            "prefix_tokens": 3,
            "reused_tokens": 0 if is_reference else 2,
            "recomputed_tokens": 1,
            "chunks": [{"status": "hit", "reason": None, "ranked_by": "outside", "cfo": 0.5}],
            **({} if is_reference else self.change),
        }
        name = "output_top_logprobs" if "top_logprobs_num" in body else "output_token_ids_logprobs"
        answer = len(ids) - len(PROMPT.ids)
        return {
            "text": "x",
            "output_ids": [7, 5],
            "meta_info": {
                "prompt_tokens": len(ids),
                "output_token_logprobs": [[-0.1, 7, None]],
                "input_token_logprobs": [[None, 8, None], *([-0.25 if is_reference else -0.75, 7, None],) * answer],
                "chunk_cache": chunk_cache,
                name: first,
            },
        }


def ask(client: MadeUpClient, condition: Condition, stored: str = ALONE, **asking: Any) -> tuple[Reply, Reply]:
    """The reference's reply and the condition's."""
    session = Session(client, Asking(4, **asking), stored, salt="salt-")  # type: ignore[arg-type]
    ((reference,),) = session.ask_reference([PROMPT])
    session.prime([PROMPT])
    ((reply,),) = session.ask([(PROMPT, condition)], {reference.prompt: reference})
    return reference, reply


def test_token_ids_are_sent_with_their_spans_in_partitions_of_the_run() -> None:
    client = MadeUpClient()
    ask(client, EPIC)
    full, primed, fused = client.bodies
    assert client.num_flushes == 0
    assert full["input_ids"] == fused["input_ids"] == [PROMPT.ids]
    sent = fused["sampling_params"][0]["custom_params"]["chunk_cache"]
    assert sent == {"method": "epic", "ratio": 0.3, "spans": PROMPT.spans}
    assert full["extra_key"] == [f"salt-{PROMPT.partition}/full"]
    assert set(primed["extra_key"]) == set(fused["extra_key"]) == {f"salt-{PROMPT.partition}"}


def test_of_several_replicas_one_is_asked() -> None:
    client = MadeUpClient()
    ask(client, EPIC, likelihood=True)
    assert not any("routed_dp_rank" in body for body in client.bodies)
    client = MadeUpClient()
    client.num_replicas = 2
    ask(client, EPIC, likelihood=True)
    assert [body["routed_dp_rank"] for body in client.bodies] == [0] * 5


def test_the_loss_is_that_of_full_prefills_own_tokens() -> None:
    client = MadeUpClient()
    reference, reply = ask(client, EPIC, likelihood=True, first_only=True)
    assert reference.ids == (7, 5)
    assert reference.own is not None
    assert reply.own is not None
    assert (reference.own.num_tokens, reference.own.logprob - reply.own.logprob) == (2, 0.5)
    *_, asked, forced = client.bodies
    assert asked["sampling_params"][0]["max_new_tokens"] == 1
    assert forced["input_ids"][0] == (*PROMPT.ids, 7, 5)
    assert forced["sampling_params"][0]["custom_params"]["chunk_cache"]["answer_tokens"] == 2
    assert client.bodies[0]["sampling_params"][0]["max_new_tokens"] == 4


def test_alpha_is_asked_without_a_ratio_of_chunks_computed_exactly_in_another_order() -> None:
    client = MadeUpClient()
    _, reply = ask(client, CRAFT, SHUFFLED)
    assert (reply.ratio, reply.recomputed_len, reply.reused_len, reply.prefix_len, reply.kl) == (None, 1, 2, 3, 0.0)
    primed, fused = client.bodies[1:]
    assert primed["input_ids"] == [(9, 3, 4, 1, 2)]
    assert primed["sampling_params"][0]["custom_params"]["chunk_cache"]["mode"] == "exact"
    sent = fused["sampling_params"][0]["custom_params"]["chunk_cache"]
    assert {name: sent[name] for name in ("method", "options")} == {"method": "cache-craft", "options": {"alpha": 1.0}}
    assert "ratio" not in sent


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"method": "epic"}, "and answered with epic"),
        ({"chunks": [{"status": "miss", "reason": "not_stored"}]}, r"was not reused but miss \(not_stored\)"),
        (
            {"chunks": [{"status": "hit", "cfo": 0.5, "ranked_by": "position"}]},
            "No statistics were stored with chunk 1",
        ),
        ({"chunks": [{"status": "hit", "cfo": None}]}, "The CFO of chunk 1 of prompt .* is unknown"),
    ],
)
def test_a_reply_that_is_not_what_was_asked_ends_the_run(change: dict[str, Any], message: str) -> None:
    with pytest.raises(SetupError, match=message):
        ask(MadeUpClient(**change), CRAFT)


def test_what_is_computed_for_every_user_is_tolerated_where_that_is_asked_for() -> None:
    client = MadeUpClient(chunks=[{"status": "skipped", "reason": "too_short"}])
    ask(client, EPIC, tolerated=("too_short",))
    with pytest.raises(SetupError, match="too_short"):
        ask(client, EPIC)


def test_a_grid_asks_nothing_twice() -> None:
    specs = [parse_method(text) for text in ("full-reuse", "epic", "cache-craft:alpha=2")]
    assert grid(specs, (0.1, 0.3)) == [
        Condition(specs[0], 0.0),
        Condition(specs[1], 0.1),
        Condition(specs[1], 0.3),
        Condition(specs[2]),
    ]
    assert REFERENCE.request == {"mode": "off"}


@pytest.mark.parametrize(
    ("method", "rows"),
    [
        ("epic", 30.0),  # as the reply says
        ("a3", (100 + 3 * 30 + 30 + 1) / 4),  # below the check layer all rows, and what is chosen again
        ("fusionrag", 30 + 1),  # the question runs twice
    ],
)
def test_rows_count_what_a_method_computes_to_choose(method: str, rows: float) -> None:
    reply = Reply("p", method, 0.3, "x", 7, 106, 100, 30)
    assert rows_of(Condition(MethodSpec(method), 0.3), PROMPT, reply, num_layers=4) == pytest.approx(rows)
    full_reuse = Reply("p", method, 0.0, "x", 7, 106, 100, 0)
    assert rows_of(Condition(MethodSpec(method), 0.0), PROMPT, full_reuse, num_layers=4) == 0


def test_prepared_chunks_are_warmed_behind_each_other_in_the_partition_of_the_run() -> None:
    client = MadeUpClient()
    ask(client, EPIC, PREPARED)
    assert client.bodies[1] == {
        "path": "/chunk_cache/warm",
        "input_ids": [(1, 2), (3, 4)],
        "prefix_ids": (9,),
        "neighbours": 10,
        "extra_key": f"salt-{PROMPT.partition}",
    }


def test_chunks_that_could_not_be_prepared_end_the_run() -> None:
    with pytest.raises(SetupError, match="Only 1 of 2 chunks"):
        ask(MadeUpClient(present=1), EPIC, PREPARED)
