"""The command that warms a corpus, against a server in our hands: resuming, bad lines, restarts."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from chunk_cache_tools.server_client import KEY_ENV
from chunk_cache_tools.warm import warm_command as command
from chunk_cache_tools.warm.corpus import open_corpus
from chunk_cache_tools.warm.warm_state import WarmState, load


class FakeServer:
    """Answers as the routes do; `stored` is what it holds, `seen` all texts that it was asked to warm."""

    def __init__(self) -> None:
        self.stored: set[str] = set()
        self.seen: list[str] = []
        self.bodies: list[dict[str, Any]] = []
        self.life = 0
        self.key: str | None = None
        self.before_line: Callable[[int], None] = lambda done: None  # may raise ConnectionError: the stream ends
        self.num_stats = 0
        fake = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *args: Any) -> None:
                pass

            def do_GET(self) -> None:
                fake.num_stats += 1
                if self._is_allowed():
                    self._json(200, {"instance": f"life {fake.life}", "ranks": [{"num_flushes": 0}]})

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                if self._is_allowed():
                    self.send_response(200)
                    self.end_headers()
                    try:
                        for line in fake.warm(body):
                            self.wfile.write(json.dumps(line).encode() + b"\n")
                            self.wfile.flush()
                    except ConnectionError:
                        self.close_connection = True

            def _is_allowed(self) -> bool:
                is_allowed = fake.key is None or self.headers.get("Authorization") == f"Bearer {fake.key}"
                if not is_allowed:
                    self._json(401, {"error": "Unauthorized"})
                return is_allowed

            def _json(self, status: int, value: Any) -> None:
                data = json.dumps(value).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._http.server_address[1]}"
        threading.Thread(target=self._http.serve_forever, daemon=True).start()

    def warm(self, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        self.bodies.append(body)
        texts = body["texts"]
        behind = body.get("neighbours")
        if behind is not None:  # a chunk is another one behind other neighbours
            texts = [" | ".join([texts[i], *(texts[j] for j in near)]) for i, near in enumerate(behind)]
        if body.get("dry_run"):
            yield self.estimate(body, texts)
            return
        stored = already = 0
        for done, text in enumerate(texts, 1):
            self.before_line(len(self.seen))
            self.seen.append(text)
            failed = [{"index": done - 1, "error": f"texts[{done - 1}]: no good"}] if "bad" in text else []
            already += text in self.stored
            stored += not failed and text not in self.stored
            if not failed:
                self.stored.add(text)
            yield {"done": done, "total": len(texts), "stored": stored, "already": already, "failed": failed}
        yield {"summary": True}

    def estimate(self, body: dict[str, Any], texts: list[str]) -> dict[str, Any]:
        new = [i for i, text in enumerate(texts) if text not in self.stored]
        near = {j for i in new for j in body.get("neighbours", [[]] * len(texts))[i]}
        cost = [{"index": i, "tokens": 10, "neighbour_tokens": 20} for i in new]
        alone = [{"index": j, "tokens": 10, "neighbour_tokens": 0} for j in near]
        return {
            "summary": True,
            "already": len(texts) - len(new),
            "exact": alone if "neighbours" in body else cost,
            "prepared": cost if "neighbours" in body else [],
            "failed": [],
            "computed_tokens": 10 * (len(near) + len(new)),
            "kv_bytes": 1024 * 10 * (len(near) + len(new)),
            "capacity_tokens": 500,
        }

    def restart(self) -> None:
        self.life += 1
        self.stored.clear()

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()


@pytest.fixture
def fake() -> Iterator[FakeServer]:
    server = FakeServer()
    yield server
    server.close()


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    path = tmp_path / "corpus.jsonl"
    path.write_text("".join(json.dumps({"text": f"passage {i}"}) + "\n" for i in range(10)))
    return path


def run(corpus: Path, fake: FakeServer, *flags: str) -> int:
    return command.main([str(corpus), "--url", fake.url, "--retry-s", "5", *flags])


@pytest.mark.parametrize(
    ("flags", "front"),
    [
        (("--system", "Read."), [("system", "Read.")]),
        (("--system", ""), []),
        (("--user", "\n"), [("user", "\n")]),
        (("--system", "Read.", "--user", "\n"), [("system", "Read."), ("user", "\n")]),
    ],
)
def test_the_front_of_chats_is_sent_as_messages(corpus, fake, flags, front):
    assert run(corpus, fake, *flags) == 0
    assert fake.bodies[0]["messages"] == [{"role": role, "content": text} for role, text in front]
    assert "prefix_text" not in fake.bodies[0]


def test_the_second_run_does_nothing(corpus, fake, capsys):
    assert run(corpus, fake, "--extra-key", "a", "--prefix", "Read.", "--batch", "3") == 0
    assert fake.seen == [f"passage {i}" for i in range(10)]
    assert [body for body in fake.bodies if body.pop("texts")] == [
        {"extra_key": "a", "prefix_text": "Read.", "batch": 3}
    ]
    assert "10 lines: 10 stored, 0 already there, 0 failed" in capsys.readouterr().out
    assert run(corpus, fake, "--extra-key", "a", "--prefix", "Read.", "--batch", "8") == 0
    assert len(fake.seen) == 10
    assert "10 stored" in capsys.readouterr().out
    assert run(corpus, fake, "--extra-key", "a", "--prefix", "Read.", "--fresh") == 0
    assert len(fake.seen) == 20
    assert "0 stored, 10 already there" in capsys.readouterr().out


def test_it_goes_on_where_it_was_killed(corpus, fake, monkeypatch):
    def kill(done: int) -> None:
        if done == 4:
            raise ConnectionError

    fake.before_line = kill
    monkeypatch.setattr(command.Task, "_wait", lambda self, error: (_ for _ in ()).throw(KeyboardInterrupt))
    assert run(corpus, fake) == 130
    state = load(corpus.with_name("corpus.jsonl.warm-state"))
    assert state is not None
    assert (state.line, state.num_stored) == (4, 4)
    fake.before_line = lambda done: None
    assert run(corpus, fake) == 0
    assert fake.seen == [f"passage {i}" for i in range(10)], "nothing twice"


def test_a_cut_stream_is_taken_up_again(corpus, fake, capsys):
    cuts = [3, 7]

    def cut(done: int) -> None:
        if cuts and done == cuts[0]:
            cuts.pop(0)
            raise ConnectionError

    fake.before_line = cut
    assert run(corpus, fake) == 0
    assert fake.seen == [f"passage {i}" for i in range(10)]
    assert "trying again" in capsys.readouterr().err


def test_a_restarted_server_is_warmed_again_from_the_beginning(corpus, fake, capsys):
    restarts = [6]

    def restart(done: int) -> None:
        if restarts and done == restarts[0]:
            restarts.pop()
            fake.restart()
            raise ConnectionError

    fake.before_line = restart
    assert run(corpus, fake) == 0
    assert fake.stored == {f"passage {i}" for i in range(10)}
    assert "restarted or flushed" in capsys.readouterr().err
    fake.restart()
    assert run(corpus, fake) == 0
    assert len(fake.stored) == 10


def test_another_corpus_begins_anew(corpus, fake, capsys):
    assert run(corpus, fake) == 0
    with corpus.open("a") as file:
        file.write(json.dumps({"text": "one more"}) + "\n")
    assert run(corpus, fake) == 0
    assert "another corpus" in capsys.readouterr().err
    assert len(fake.seen) == 21


def test_bad_lines_are_named(tmp_path, fake, capsys):
    lines = ["{}", '{"text": "good"}', "", "nonsense", '{"text": 3}', '{"text": " "}', '{"text": "bad"}', "[1]"]
    path = tmp_path / "c.jsonl"
    path.write_text("\n".join(lines))
    assert run(path, fake) == 1
    captured = capsys.readouterr()
    assert [line.partition(": ")[0] for line in captured.err.splitlines()] == [
        f"{path}:{n}" for n in (1, 4, 5, 6, 7, 8)
    ]
    assert "no field 'text'" in captured.err
    assert "c.jsonl:7: no good" in captured.err
    assert "8 lines: 1 stored, 0 already there, 6 failed" in captured.out
    assert run(path, fake) == 1, "what failed is not forgotten"
    assert fake.seen == ["good", "bad"]


def test_more_lines_than_one_request(tmp_path, fake, monkeypatch):
    monkeypatch.setattr(command, "LINES_PER_REQUEST", 4)
    path = tmp_path / "c.jsonl"
    path.write_text("".join(json.dumps({"id": i, "passage": f"p{i}"}) + "\n" for i in range(9)) + "nonsense\n")
    assert run(path, fake, "--field", "passage") == 1
    assert [len(body["texts"]) for body in fake.bodies] == [4, 4, 1]


ABOUT = ["cats and mice", "cats and dogs", "cars and trains", "trains and ships", "dogs and cats"]


def write_corpus(path: Path, lines: list[Any]) -> Path:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def test_similar_chunks_are_named_as_neighbours(tmp_path, fake, capsys, monkeypatch):
    monkeypatch.setattr(command, "LINES_PER_REQUEST", 2)
    path = write_corpus(tmp_path / "c.jsonl", [{"text": text} for text in ABOUT])
    assert run(path, fake, "--neighbours", "1") == 0
    assert [len(body["neighbours"]) for body in fake.bodies] == [2, 2, 1]
    assert fake.seen == [
        "cats and mice | cats and dogs",
        "cats and dogs | dogs and cats",
        "cars and trains | trains and ships",
        "trains and ships | cars and trains",
        "dogs and cats | cats and dogs",
    ]
    assert "5 lines: 5 stored, 0 already there, 0 failed" in capsys.readouterr().out
    write_corpus(path, [{"text": text} for text in [*ABOUT[:4], "planes", ABOUT[0]]])
    assert run(path, fake, "--neighbours", "1") == 0
    captured = capsys.readouterr()
    assert "6 lines: 2 stored, 4 already there, 0 failed" in captured.out, "cats and dogs, and the new one"
    assert "c.jsonl:6: the same chunk as line 1, which is prepared once" in captured.err


def test_the_file_names_neighbours(tmp_path, fake, capsys):
    lines = [
        {"text": "a", "neighbours": [2, 3]},
        {"text": "b", "neighbours": []},
        {"text": "c", "neighbours": [1]},
        {"text": "a", "neighbours": [2, 3]},
        "nonsense",
        {"text": "d", "neighbours": [99]},
        {"text": "e", "neighbours": [1, 5]},
        {"text": "f", "neighbours": [8]},
        {"text": "g"},
        {"text": "h", "neighbours": "1"},
        {"text": "i", "neighbours": [True]},
        {"text": "a", "neighbours": [2]},
        {"text": " ", "neighbours": [2]},
    ]
    path = write_corpus(tmp_path / "c.jsonl", lines)
    assert run(path, fake, "--neighbours", "file") == 1
    assert fake.seen == ["a | b | c", "b", "c | a", "a | b | c"]
    captured = capsys.readouterr()
    assert "13 lines: 3 stored, 1 already there, 9 failed" in captured.out
    said = [line for line in captured.err.splitlines() if "the same chunk as line 1, which is prepared" not in line]
    for line, (number, problem) in zip(
        said,
        [
            (5, "not JSON"),
            (6, "neighbours[0]: 99 is no line of the file"),
            (7, "neighbours[1]: 5 is a line without a chunk (not JSON"),
            (8, "neighbours[0]: 8 has the chunk of the line itself"),
            (9, "has no field 'neighbours'"),
            (10, "neighbours: '1' is not a list of line numbers"),
            (11, "neighbours[0]: true is not the number of a line"),
            (12, "neighbours: line 1 has the same chunk and other neighbours"),
            (13, "text: the text is empty"),
        ],
        strict=True,
    ):
        assert line.startswith(f"{path}:{number}: {problem}")


def test_a_dry_run_counts_and_changes_nothing(tmp_path, fake, capsys, monkeypatch):
    monkeypatch.setattr(command, "LINES_PER_REQUEST", 2)
    path = write_corpus(tmp_path / "c.jsonl", [{"text": text} for text in ABOUT] + ["[" * 10**5 + "]" * 10**5])
    assert run(path, fake, "--neighbours", "1", "--dry-run") == 1
    assert fake.seen == []
    assert list(tmp_path.iterdir()) == [path], "no state is written"
    captured = capsys.readouterr()
    assert captured.err.splitlines()[-1] == f"{path}:6: objects or lists are nested too deep"
    first, second = captured.out.splitlines()
    # Cats and dogs is the neighbour of two lines, in two requests.
    assert first == "6 lines: 4 chunks to compute, 5 behind their neighbours, 0 already there, 1 failed."
    assert second.startswith("90 tokens to compute, 100 of neighbours to read; 0.1 MiB of KV; the KV pool holds 500")
    assert run(path, fake, "--dry-run") == 1
    assert "5 chunks to compute, 0 behind" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "word"),
    [
        (("--batch", "0"), "--batch 0"),
        *((("--retry-s", text), f"--retry-s {text}: not a number of seconds") for text in ("nan", "inf", "-1.0")),
        (("--neighbours", "0"), "--neighbours 0: neither a number from 1 to 32 nor 'file'; give one of them"),
        (("--neighbours", "33"), "--neighbours 33: "),
        (("--neighbours", "lots"), "--neighbours lots: "),
        (("--system", "Read.", "--prefix", "Read."), "--system: given beside --prefix; "),
        (("--user", "", "--prefix", "Read."), "--user: given beside --prefix; "),
        (("--retriever", "some/model"), "--retriever some/model: given without --neighbours; "),
        (("--url", "nonsense"), "not a URL"),
        (("--state", "/nonexistent/state"), "--state"),
    ],
)
def test_a_mistake_is_one_sentence(corpus, fake, capsys, flags, word):
    assert run(corpus, fake, *flags) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert word in error


def test_a_missing_corpus_and_a_foreign_state_file(tmp_path, corpus, fake, capsys):
    assert run(tmp_path / "none.jsonl", fake) == 2
    other = tmp_path / "notes.txt"
    other.write_text("my notes")
    assert run(corpus, fake, "--state", str(other)) == 2
    assert other.read_text() == "my notes"
    assert "not a state of this command" in capsys.readouterr().err


def test_the_key_is_sent(corpus, fake, capsys, monkeypatch):
    fake.key = "k"
    assert run(corpus, fake) == 2
    assert "--api-key" in capsys.readouterr().err
    assert run(corpus, fake, "--api-key", "k") == 0
    monkeypatch.setenv(KEY_ENV, "k")
    assert run(corpus, fake) == 0


def test_a_server_that_stays_away(corpus, fake, capsys):
    fake.close()
    assert command.main([str(corpus), "--url", fake.url, "--retry-s", "0.2"]) == 1
    assert "start the server and run the command again" in capsys.readouterr().err


def test_a_state_file_is_replaced_as_a_whole(tmp_path):
    path = tmp_path / "state"
    state = WarmState({"corpus": "a"}, "epoch")
    assert load(path) is None
    state.save(path)
    state.fail(3, "no")
    state.advance(4, 50, stored=2, already=1)
    state.save(path)
    assert load(path) == state
    assert list(tmp_path.iterdir()) == [path]
    saved = path.read_text()
    path.write_text(saved[:-9])
    assert load(path) is None, "not JSON"
    path.write_text(saved.replace('[[3, "no"]]', "[1]"))
    assert load(path) is None, "no failures"


def test_lines_from_the_middle(tmp_path):
    path = tmp_path / "c.jsonl"
    path.write_text('{"text": "ä"}\n\n{"text": "b"}\n{"text": "c"}')
    corpus = open_corpus(path, "text")
    lines = list(corpus.lines())
    assert corpus.num_lines == 4
    assert [(line.number, line.text) for line in lines] == [(1, "ä"), (3, "b"), (4, "c")]
    assert list(corpus.lines(lines[1].number, lines[1].end)) == lines[2:]


def test_half_of_a_surrogate_pair_is_a_bad_line(tmp_path: Path) -> None:
    path = tmp_path / "corpus.jsonl"
    path.write_text('{"text": "good"}\n{"text": "cut \\ud83d"}\n')
    good, bad = open_corpus(path, "text").lines()
    assert (good.text, good.problem) == ("good", None)
    assert (bad.text, bad.problem) == (None, "text: half of a surrogate pair, which is no character")
