"""`chunk-cache doctor` against a real server, with each cause made on purpose."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from chunk_cache.advice import ADVICE
from chunk_cache.types import REASONS
from chunk_cache_tools.doctor.comparison import Cause
from chunk_cache_tools.doctor.doctor_command import main
from server.conftest import FLAGS, MAX_TOTAL_TOKENS, STRICT
from server.contract import encode, generated, marked, reasons, statuses
from server_fixture import Server

pytestmark = [pytest.mark.server, pytest.mark.all]

MIN_REUSE_LEN = 12
KEY = "key of the doctor"
Answer = Mapping[str, Mapping[str, str]]


@pytest.fixture(scope="module")
def patient(model_dir: Path) -> Iterator[Server]:
    """With an API key, metrics, and chunks that may be too short."""
    config = json.dumps({"min_reuse_len": MIN_REUSE_LEN})
    flags = ("--enable-metrics", "--chunk-cache", "--chunk-cache-config", config, "--api-key", KEY)
    server = Server(model_dir, *FLAGS, *flags, env=STRICT)
    server.client.http.headers["Authorization"] = f"Bearer {KEY}"
    with server:
        yield server


@pytest.fixture
def ask(patient: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    """`(requests, ...) -> (exit code, checks)`; each request is a body of /generate."""

    def run(
        *requests: Mapping[str, Any], flags: tuple[str, ...] = (), server: Server = patient
    ) -> tuple[int, list[dict[str, str]]]:
        file = tmp_path / "requests.jsonl"
        file.write_text("".join(json.dumps(request) + "\n" for request in requests))
        prompt = ("--prompt", str(file)) if requests else ()
        capsys.readouterr()
        code = main(["--url", server.url, "--api-key", KEY, "--json", *prompt, *flags])
        return code, json.loads(capsys.readouterr().out)

    return run


def send(server: Server, request: Mapping[str, Any]) -> Mapping[str, Any]:
    """The reply of the chunk cache to a request of `ask`."""
    body = {**request}
    params = body.pop("sampling_params", {})
    prompt = body.pop("text", None) or body.pop("input_ids")
    return generated(server.generate(prompt, max_new_tokens=1, sampling=params, **body))


def causes(checks: list[dict[str, str]], name: str) -> list[str]:
    return [check["cause"] for check in checks if check["name"] == name and check["cause"]]


def other_ids(chunk: str, tokenizer: Any) -> list[int]:
    """The same text, in tokens that another client might send."""
    ids = [i for char in chunk for i in encode(tokenizer, char)]
    assert tokenizer.decode(ids) == tokenizer.decode(encode(tokenizer, chunk))
    assert ids != encode(tokenizer, chunk)
    return ids


def test_white_space(patient, passages, ask):
    chunk = passages()
    first = {"text": marked([chunk]).text}
    second = {"text": marked([chunk.replace(" ", "\n", 1)], head="Look. ").text}  # else it is an exact prefix
    send(patient, first)
    assert reasons(send(patient, second)) == ["not_stored"]
    code, checks = ask(first, second)
    assert (code, causes(checks, "chunk 0")) == (0, [Cause.WHITE_SPACE])
    (check,) = (check for check in checks if check["cause"] == Cause.WHITE_SPACE)
    before, now = check["found"].split("' and '")
    assert ("↵" in before, "↵" in now) == (False, True)
    assert check["remedy"].startswith("write the chunk the same way every time")


def test_tokenization(patient, passages, ask, tokenizer):
    prompt = marked([passages()])
    first, ((start, end),) = {"text": prompt.text}, prompt.spans(tokenizer)
    chunk = tokenizer.decode(prompt.ids(tokenizer)[start:end])
    head, ids, tail = [tokenizer.bos_token_id], other_ids(chunk, tokenizer), encode(tokenizer, "Who?")
    spans = {"spans": [[1, 1 + len(ids)]]}
    second = {"input_ids": head + ids + tail, "sampling_params": {"custom_params": {"chunk_cache": spans}}}
    send(patient, first)
    assert reasons(send(patient, second)) == ["not_stored"]
    assert causes(ask(first, second)[1], "chunk 0") == [Cause.TOKENIZATION]


def test_system_prompt(patient, passages, ask):
    chunk = passages()
    first, second = ({"text": marked([chunk], head=head).text} for head in ("Read this. ", "Think hard. "))
    send(patient, first)
    assert statuses(send(patient, second)) == ["hit"], "which is what the remedy says"
    checks = ask(first, second)[1]
    assert (causes(checks, "text in front"), causes(checks, "chunk 0")) == ([Cause.SYSTEM_PROMPT], [])


def test_partition(patient, passages, ask):
    chunk = passages()
    first, second = ({"text": marked([chunk]).text, **more} for more in ({"extra_key": "a"}, {"cache_salt": "b"}))
    send(patient, first)
    assert reasons(send(patient, second)) == ["not_stored"]
    checks = ask(first, second)[1]
    assert causes(checks, "chunk 0") == [Cause.PARTITION]
    assert any("extra_key 'a' in" in check["found"] and "cache_salt 'b' in" in check["found"] for check in checks)


def test_too_short(patient, ask, tokenizer):
    chunk = "Ab.\n"
    assert len(encode(tokenizer, chunk)) < MIN_REUSE_LEN
    first, second = ({"text": marked([chunk], head=head).text} for head in ("Short. ", "Brief. "))
    send(patient, first)
    assert reasons(send(patient, second)) == ["too_short"]
    assert causes(ask(first, second)[1], "chunk 0") == [Cause.TOO_SHORT]


def test_evicted(patient, passages, ask):
    chunk = passages()
    first, second = ({"text": marked([chunk], head=head).text} for head in ("Once. ", "Again. "))
    send(patient, first)
    stored = ask(first, second)[1]
    for _ in range(2 * MAX_TOTAL_TOKENS // 500):
        patient.generate(passages(400), max_new_tokens=1)
    gone = ask(first, second)[1]
    assert (causes(stored, "chunk 0"), causes(gone, "chunk 0")) == ([], ["evicted"])
    assert reasons(send(patient, second)) == ["evicted"]


def test_weights_changed(patient, passages, ask, model_dir):
    chunk = passages()
    first, second = ({"text": marked([chunk], head=head).text} for head in ("Before. ", "Behind. "))
    send(patient, first)
    body = {"model_path": str(model_dir), "flush_cache": False}
    assert patient.client.http.post("/update_weights_from_disk", json=body).json()["success"]
    (check,) = (check for check in ask(first, second)[1] if check["name"] == "chunk 0")
    assert (check["cause"], check["remedy"]) == ("weights_changed", ADVICE["weights_changed"][1])
    assert reasons(send(patient, second)) == ["weights_changed"]


def test_a_server_that_trusts_what_was_warmed(model_dir, passages, ask):
    evil, chunk = passages(), passages()
    first, second = ({"text": marked(chunks).text} for chunks in ([evil, chunk], [chunk]))
    third = {"text": marked([chunk], head="Think.").text}
    flags = ("--chunk-cache", "--chunk-cache-config", '{"trust": "warmed"}')
    with Server(model_dir, *FLAGS, *flags, env=STRICT) as server:

        def told(*requests: Mapping[str, Any]) -> list[str]:
            return causes(ask(*requests, server=server)[1], "chunk 0")

        send(server, first)
        assert told(first, second) == ["untrusted"] == reasons(send(server, second))
        assert told(second) == [], "it is stored alone now"
        assert told(second, third) == ["other_system"] == reasons(send(server, third))


def test_never_sent(passages, ask):
    request = {"text": marked([passages()]).text}
    assert causes(ask(request)[1], "chunk 0") == [Cause.NOT_STORED]


def test_reasons_of_the_last_requests(patient, passages, ask):
    """The tests in front of this one have made each."""
    send(patient, {"text": marked([passages()]).text})
    code, checks = ask()
    reuse = [check for check in checks if check["name"] == "reuse"]
    assert code == 0
    assert "marked chunks were reused" in reuse[0]["found"]
    assert all(check["remedy"] for check in reuse[1:])
    assert {check["cause"] for check in reuse[1:]} <= set(REASONS)
    assert "not_stored" in {check["cause"] for check in reuse[1:]}
    _, checks = ask(flags=("--watch", "0.2"))
    assert "no request had a marked chunk" in [check["found"] for check in checks]


def test_a_wrong_key_is_a_failure(patient, capsys):
    assert main(["--url", patient.url, "--api-key", "no"]) == 1
    assert "failure  server" in capsys.readouterr().out
