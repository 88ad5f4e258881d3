"""The command line: pictures from kept replies, and one sentence for every mistake."""

from __future__ import annotations

import importlib.util
import json
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any, ClassVar

import pytest

pytest.importorskip("matplotlib")
from chunk_cache_tools.explain import replies
from chunk_cache_tools.explain.explain_command import PROG, main

PROMPT = "Read.<|chunk|>Paris.<|chunk|>Rome.<|chunk|>Where?"


@pytest.fixture
def kept(tmp_path, tokens, make_reply, layer_reply) -> str:
    """A file of two replies."""
    path = str(tmp_path / "replies.jsonl")
    answers = [("epic", make_reply(tokens.spans, len(tokens.texts))), ("cacheblend", layer_reply)]
    replies.save(path, [(label, {"text": "Rome", "meta_info": {"chunk_cache": one}}) for label, one in answers], tokens)
    return path


@pytest.fixture
def prompt(tmp_path) -> str:
    (tmp_path / "prompt.txt").write_text(PROMPT + "\n", encoding="utf-8")
    return str(tmp_path / "prompt.txt")


@pytest.fixture
def model_path(tmp_path, tokenizer) -> str:
    tokenizer.save_pretrained(tmp_path / "model")
    return str(tmp_path / "model")


class Answers(BaseHTTPRequestHandler):
    """Gives every POST the same answer, whatever it asks for; keeps what was asked."""

    status = 200
    body = b"{}"
    info = b"{}"
    asked: ClassVar[list[dict[str, Any]]] = []

    def do_GET(self) -> None:
        if self.path == "/server_info":
            self._answer(200, self.info)
        else:
            self.send_error(501)

    def do_POST(self) -> None:
        self.asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self._answer(self.status, self.body)

    def _answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture
def answering() -> Iterator[Any]:
    """`(status, body, info=, asked=)` -> the address of a server that answers so."""
    servers = []

    def start(status: int, body: bytes, **more: Any) -> str:
        handler = type("Handler", (Answers,), {"status": status, "body": body, **more})
        server = HTTPServer(("127.0.0.1", 0), handler)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        servers.append(server)
        return f"http://127.0.0.1:{server.server_port}"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def refusal(capsys, *argv: str) -> str:
    """The one sentence that these arguments give."""
    assert main(argv) == 2
    captured = capsys.readouterr()
    (line,) = captured.err.splitlines()
    assert line.startswith(f"{PROG}: ")
    return line.removeprefix(f"{PROG}: ")


def test_pictures_from_kept_replies(tmp_path, kept, capsys):
    outputs = [str(tmp_path / f"out{ending}") for ending in (".png", ".svg", ".html")]
    assert main(["--replies", kept, *(word for path in outputs for word in ("--out", path)), "--tokens", "5:40"]) == 0
    captured = capsys.readouterr()
    assert "cacheblend" in captured.out
    assert "layer 1: median 0.25" in " ".join(captured.out.split())
    assert f"Wrote {', '.join(outputs)}." in captured.out
    assert "Note: cacheblend found other chunks in the store than epic" in captured.err
    for path in outputs:
        with open(path, "rb") as file:
            assert len(file.read()) > 1000
    assert "Tokens 5 to 40 of" in (tmp_path / "out.html").read_text(encoding="utf-8")


@pytest.mark.parametrize("text", ["5", "x:3", "7:7", "9:3", "-4:3", "5000:6000", "5000:"])
def test_a_bad_range_is_named(kept, tmp_path, capsys, text):
    line = refusal(capsys, "--replies", kept, f"--tokens={text}", "--out", str(tmp_path / "out.html"))
    assert line.startswith(f"--tokens: {text!r} is no range of the prompt of ")


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--out", "explain.pdf"], "--out explain.pdf: unknown ending '.pdf'; known endings: .png, .svg, .html"),
        (["--out", "nowhere/explain.png"], "--out nowhere/explain.png: no such folder; make it, or name another"),
        (["--prompt", "nowhere.txt"], "--prompt nowhere.txt: cannot be read"),
        ([], "--prompt: missing; give a text file, or kept replies by --replies"),
        (["--replies", "nowhere.jsonl"], "nowhere.jsonl: cannot be read"),
        (["--replies", "a.jsonl", "--methods", "epic"], "--methods: is for asking a server, and --replies asks none; "),
        (["--replies", "a.jsonl", "--ratio", "9"], "--ratio: is for asking a server, and --replies asks none; "),
        (["--replies", "a.jsonl", "--save", "b.jsonl"], "--save: is for asking a server, and --replies asks none; "),
        (["--prompt", "p", "--method", "best"], "--methods best: unknown method 'best'; known methods: "),
        (["--prompt", "p", "--ratio", "7"], "--ratio: 7.0 is not a number from 0 to 1"),
        (["--prompt", "p", "--options", "["], "--options: not JSON"),
        (["--prompt", __file__, "--options", '{"drift": null}', "--separator", " "], "separator: has no visible char"),
        (["--prompt", "p", "--max-new-tokens", "0"], "--max-new-tokens: below 1; give 1 or more"),
    ],
)
def test_a_bad_argument_is_named(capsys, monkeypatch, tmp_path, argv, words):
    monkeypatch.chdir(tmp_path)
    assert refusal(capsys, *argv).startswith(words)


def test_a_package_that_is_missing_is_named(capsys, monkeypatch):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "matplotlib" else find_spec(name))
    line = refusal(capsys)
    assert line.startswith("matplotlib: not installed; run `pip install matplotlib`, or write a")
    assert refusal(capsys, "--out", "explain.html").startswith("--prompt: missing")


def test_no_server(capsys, prompt):
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{closed.getsockname()[1]}"
        line = refusal(capsys, "--prompt", prompt, "--url", url)
    assert line.startswith(f"--url {url}: no server answers (")
    assert line.endswith(
        "start one with `python -m sglang.launch_server --model-path DIR --chunk-cache`, or name its address"
    )


@pytest.mark.parametrize("url", ["127.0.0.1:30000", "ftp://127.0.0.1", "http://[::1", "nothing"])
def test_a_bad_address(capsys, prompt, url):
    assert refusal(capsys, "--prompt", prompt, "--url", url).startswith(f"--url {url}: ")


@pytest.mark.parametrize(
    ("status", "body", "words"),
    [
        (200, {"text": "", "meta_info": {}}, "the server runs without --chunk-cache; start one with"),
        (400, {"error": {"message": "max_new_tokens is too large"}}, "with 400 (max_new_tokens is too large)"),
        (500, "oops", "with 500 (oops)"),
        (503, "", "with 503 (Service Unavailable)"),
        (200, "<html>", "was not answered with a JSON object; name the address of an SGLang server"),
        (200, {"meta_info": {"chunk_cache": {"chunks": []}}}, "--separator: the server found 0 chunks instead of 1"),
    ],
)
def test_what_a_server_may_answer(capsys, answering, prompt, model_path, status, body, words):
    url = answering(status, body.encode() if isinstance(body, str) else json.dumps(body).encode())
    line = refusal(capsys, "--prompt", prompt, "--url", url, "--tokenizer", model_path, "--methods", "epic")
    assert line.startswith(f"--url {url}: " if not words.startswith("--") else words)
    assert words in line


@pytest.mark.parametrize(
    ("info", "rank"), [({"dp_size": 1, "attn_dp_size": 1}, None), ({"dp_size": 2}, 0), ({"attn_dp_size": 2}, 0)]
)
def test_of_several_replicas_one_is_asked(answering, capsys, prompt, model_path, info, rank):
    asked: list[dict[str, Any]] = []
    body = json.dumps({"meta_info": {"chunk_cache": {"chunks": [1]}}}).encode()  # fits what primes, not the question
    url = answering(200, body, info=json.dumps(info).encode(), asked=asked)
    refusal(capsys, "--prompt", prompt, "--url", url, "--tokenizer", model_path, "--methods", "epic")
    assert [one.get("routed_dp_rank") for one in asked] == [rank] * 3


def test_a_password_in_the_address_is_not_printed(capsys, prompt):
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
        line = refusal(capsys, "--prompt", prompt, "--url", f"http://user:SECRET@127.0.0.1:{port}")
    assert line.startswith(f"--url http://127.0.0.1:{port}: no server answers (")


def test_the_tokenizer_is_asked_for(capsys, answering, prompt):
    url = answering(200, b"{}")
    assert refusal(capsys, "--prompt", prompt, "--url", url).startswith(
        f"--url {url}: /model_info was answered with 501"
    )


def test_help_names_all_methods(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    assert "cacheblend" in capsys.readouterr().out
